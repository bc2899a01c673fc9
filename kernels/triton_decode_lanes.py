"""Decoding heads with each of a lane's 32 elements in a register of its own: `triton_lanes.STRIDED` runs of eight.

A run's codes are taken out in pairs four elements apart, both at once: added to the bits of 1024 they are float16
numbers, which tensor cores transform and which subtract exactly.
"""

# Triton reads the annotations of kernels, so only what it knows can stand there; its tuples grow by concatenation only.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"
# mypy: disable-error-code="var-annotated, unreachable"
# ruff: noqa: RUF005, SIM109

from __future__ import annotations

import triton
import triton.language as tl

from spectrumkv_sglang.kernels.triton_arithmetic import from_float32
from spectrumkv_sglang.kernels.triton_hadamard_lanes import (
    floats_with_signs,
    half_transformed_codes,
    transformed,
    with_signs,
)
from spectrumkv_sglang.kernels.triton_lanes import permuted

_INT8, _FP8 = tl.constexpr(1), tl.constexpr(2)
_STRIDED = tl.constexpr(2)
_THOUSAND = tl.constexpr(0x64006400)
"""1024 and 1024 in float16, whose last bits count ones."""
_BIASED = tl.constexpr(0x64806480)


@triton.jit
def _load(codes_ptr, pair, run, START: tl.constexpr, BYTES: tl.constexpr, TYPE: tl.constexpr, SIZE: tl.constexpr):
    """[pairs, lanes] of a type of SIZE bytes: of each head, BYTES long, the ``run``-th [lanes] from byte START on.

    Only a pointer to the type itself lets Triton see that lanes read neighbours, and so lay them out.
    """
    heads = pair.to(tl.int64) * (BYTES // SIZE)
    return tl.load(codes_ptr.to(tl.pointer_type(TYPE)) + (heads[:, None] + (run + START // SIZE)[None, :]))


@triton.jit
def _moved(x, UP: tl.constexpr):
    return x << UP if UP >= 0 else (x >> -UP)


@triton.jit
def _spread(x):
    """The second byte of an int32 below 65536 becomes the third."""
    return (x | (x << 8)) & 0x00FF00FF


@triton.jit
def _pairs_of_run(
    codes_ptr, pair, run, DIM: tl.constexpr, PRECISION: tl.constexpr, BITS: tl.constexpr, HARDWARE: tl.constexpr
):
    """Four int32 [pairs, lanes]: float16 numbers of elements i and i + 4 of a run, the codes and `_offset` more.

    Args:
        codes_ptr: the group's first code.
        pair: whose codes they are, [pairs].
        run: of each lane, [lanes], eight elements of a head.
    """
    BYTES: tl.constexpr = DIM * BITS // 8
    pairs = ()
    if BITS == 8:
        both = _load(codes_ptr, pair, run, 0, BYTES, tl.int64, 8)
        low, high = both.to(tl.int32), (both >> 32).to(tl.int32)
        for i in tl.static_range(4):
            bytes = permuted(low, high, 0x4400 + 0x1111 * i, HARDWARE)
            if PRECISION == _INT8:
                pairs = pairs + ((bytes & 0x00FF00FF) ^ _BIASED,)
            else:
                # An E4M3 number moved up by 7 bits is the float16 of 2^-8 times its value, subnormals included.
                pairs = pairs + (((bytes << 8) & -2147450880) | ((bytes << 7) & 0x3F803F80),)
    elif BITS >= 4:
        word = _load(codes_ptr, pair, run, 0, BYTES, tl.int32, 4)
        for i in tl.static_range(4):
            pairs = pairs + ((_moved(word, -4 * i) & 0x000F000F) | _THOUSAND,)
    else:
        spread = _spread(_load(codes_ptr, pair, run, 0, BYTES, tl.uint16, 2).to(tl.int32))
        for i in tl.static_range(4):
            pairs = pairs + ((_moved(spread, -2 * i) & 0x00030003) | _THOUSAND,)
    if BITS == 6:
        spread = _spread(_load(codes_ptr, pair, run, DIM // 2, BYTES, tl.uint16, 2).to(tl.int32))
        above = ()
        for i in tl.static_range(4):
            above = above + (pairs[i] | (_moved(spread, 4 - 2 * i) & 0x00300030),)
        pairs = above
    elif BITS == 5 or BITS == 3:
        LOW: tl.constexpr = BITS - 1
        spread = _load(codes_ptr, pair, run, DIM * LOW // 8, BYTES, tl.uint8, 1).to(tl.int32)
        spread |= spread << 12
        above = ()
        for i in tl.static_range(4):
            above = above + (pairs[i] | (_moved(spread, LOW - i) & (0x00010001 << LOW)),)
        pairs = above
    return pairs


@triton.jit
def _low_half(pair):
    return pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _high_half(pair):
    return (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def decode_lanes(
    codes_ptr,
    params_ptr,
    pair,
    LANES: tl.constexpr,
    PRECISION: tl.constexpr,
    BITS: tl.constexpr,
    HADAMARD: tl.constexpr,
    BFLOAT16: tl.constexpr,
    FLOAT16: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Elements of whole heads in the pool's format.

    Args:
        codes_ptr: the first head's codes, at a 16-byte boundary.
        params_ptr: float16, scales, or scales and zeros, of all heads.
        pair: which of them, int32 [pairs].
        LANES: of a head.
        BITS: of a code.
        HADAMARD: whether the codes are of transformed heads.
        PACKED: instructions of NVIDIA's Ampere are there, and the pool's elements have 16 bits.

    Returns:
        16 int32 [pairs, lanes], elements in pairs, of a pool of 16 bits; else 32 float32.
    """
    PAIRS: tl.constexpr = pair.shape[0]
    DIM: tl.constexpr = LANES * 32
    lanes = tl.arange(0, LANES)
    lane = lanes[None, :]
    registers = ()
    for run in tl.static_range(4):
        registers = registers + _pairs_of_run(codes_ptr, pair, lanes + run * LANES, DIM, PRECISION, BITS, PACKED)
    if PRECISION == _INT8:
        scale = tl.load(params_ptr + pair).to(tl.float32)
    elif PRECISION == _FP8:
        scale = tl.load(params_ptr + pair).to(tl.float32) * 256.0
    else:
        scale = tl.load(params_ptr + pair * 2).to(tl.float32)
        zero = tl.broadcast_to(tl.load(params_ptr + pair * 2 + 1).to(tl.float32)[:, None], (PAIRS, LANES))
    scale = tl.broadcast_to(scale[:, None], (PAIRS, LANES))
    OFFSET: tl.constexpr = 0.0 if PRECISION == _FP8 else (1152.0 if PRECISION == _INT8 else 1024.0)
    values = ()
    if HADAMARD and PACKED:
        x = half_transformed_codes(registers)
        scale *= DIM**-0.5
        # The transform of a constant is as many times the constant, then zeros; one butterfly is still to come.
        first_of_head = tl.broadcast_to(lane == 0, (PAIRS, LANES))
        offset = tl.where(first_of_head, OFFSET * (DIM // 2), 0.0)
        for i in tl.static_range(16):
            above, below = x[2 * i], x[2 * i + 1]
            if i == 0 and OFFSET != 0.0:
                above, below = above - offset, below - offset
            above *= scale
            values = values + (tl.fma(below, scale, above), tl.fma(below, -scale, above))
    else:
        numbers = ()
        for run in tl.static_range(4):
            for j in tl.static_range(8):
                register = registers[4 * run + j % 4]
                number = _high_half(register) if j >= 4 else _low_half(register)
                numbers = numbers + (number - OFFSET,)
        if HADAMARD:
            numbers = transformed(numbers)
            scale *= DIM**-0.5
        for j in tl.static_range(32):
            if HADAMARD or PRECISION == _INT8 or PRECISION == _FP8:
                values = values + (numbers[j] * scale,)
            else:
                # Codes and scales have so few bits that their product is exact.
                values = values + (tl.fma(numbers[j], scale, zero),)
    if HADAMARD:
        if PRECISION != _INT8 and PRECISION != _FP8:
            first = values[0] + tl.where(tl.broadcast_to(lane == 0, (PAIRS, LANES)), zero * DIM**0.5, 0.0)
            moved = (first,)
            for j in tl.static_range(1, 32):
                moved = moved + (values[j],)
            values = moved
        if not BFLOAT16 and not FLOAT16:
            values = floats_with_signs(values, _STRIDED)
    if BFLOAT16 or FLOAT16:
        rounded = ()
        for i in tl.static_range(16):
            rounded = rounded + (_rounded_pair(values[2 * i], values[2 * i + 1], BFLOAT16, FLOAT16, PACKED),)
        return with_signs(rounded, PAIRS, LANES, _STRIDED) if HADAMARD else rounded
    else:
        return values


@triton.jit
def _rounded_pair(even, odd, BFLOAT16: tl.constexpr, FLOAT16: tl.constexpr, PACKED: tl.constexpr):
    """int32 of two float32 in the pool's format of 16 bits."""
    if PACKED and BFLOAT16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low = from_float32(even, BFLOAT16, FLOAT16, False).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return low | (from_float32(odd, BFLOAT16, FLOAT16, False).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def store_pairs(pool_ptr, start, registers, inside):
    """Store heads of 16-bit elements, in pairs, at ``start`` [pairs] in units of 16 bytes."""
    PAIRS: tl.constexpr = registers[0].shape[0]
    LANES: tl.constexpr = registers[0].shape[1]
    place = tl.arange(0, 4 * LANES)
    heads = pool_ptr.to(tl.pointer_type(tl.int32)) + start * 4
    for run in tl.static_range(4):
        even = tl.join(registers[4 * run], registers[4 * run + 2])
        odd = tl.join(registers[4 * run + 1], registers[4 * run + 3])
        target = heads[:, None] + (place + run * 4 * LANES)[None, :]
        tl.store(target, tl.reshape(tl.join(even, odd), (PAIRS, 4 * LANES)), mask=inside[:, None])


@triton.jit
def store_floats(pool_ptr, start, values, inside):
    """Store heads of float32 elements at ``start`` [pairs] in units of 16 bytes."""
    PAIRS: tl.constexpr = values[0].shape[0]
    LANES: tl.constexpr = values[0].shape[1]
    heads = pool_ptr.to(tl.pointer_type(tl.float32)) + start * 4
    run = tl.arange(0, LANES) * 8
    for j in tl.static_range(32):
        target = heads[:, None] + (run + (j // 8 * LANES * 8 + j % 8))[None, :]
        tl.store(target, values[j], mask=tl.broadcast_to(inside[:, None], (PAIRS, LANES)))
