"""Quantising heads, transformed or not, with each of a lane's 32 elements in a register of its own.

The torch references are the quantisers' `quantise` methods behind `HadamardTransform.forward`. Without a transform
results are equal bit for bit. With one, sums of the transform are made in another order, and so are the mean and the
deviation of a row, in float32: a code that lies next to the edge between two may be the other, and a parameter the next
float16. As in `triton_encode` a tile with a number that is not ordinary is encoded a second, slower way.
"""

# Triton reads the annotations of kernels, so only what it knows can stand there; its tuples grow by concatenation only.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"
# mypy: disable-error-code="var-annotated, unreachable"
# ruff: noqa: RUF005, SIM108, SIM109

from __future__ import annotations

import triton
import triton.language as tl

from spectrumkv_sglang.kernels.quantisers.cut_ranges import NORMAL_STEPS
from spectrumkv_sglang.kernels.transforms.hadamard import signs
from spectrumkv_sglang.kernels.triton_affine import code_bits, full_range, full_step, rounded_scale, rounded_zero
from spectrumkv_sglang.kernels.triton_arithmetic import (
    LARGEST,
    ROUNDER,
    ROUNDER_BITS,
    SMALLEST_NORMAL,
    divisor_of,
    finite_or_zero,
    float16_bits,
    joined,
    larger,
    negated_reciprocal,
)
from spectrumkv_sglang.kernels.triton_encode import e4m3_bits, negated_and_cleaned, rounded_bits, symmetric_scale
from spectrumkv_sglang.kernels.triton_encode_int4 import is_regular
from spectrumkv_sglang.kernels.triton_hadamard_lanes import (
    floats_with_signs,
    transformed,
    transformed_pairs,
    with_signs,
)
from spectrumkv_sglang.kernels.triton_lane_words import plane_words
from spectrumkv_sglang.kernels.triton_lanes import elements_in, least_and_largest, registers_of, sum_of
from spectrumkv_sglang.kernels.triton_runs import extremes, load_runs

_INT8, _FP8 = tl.constexpr(1), tl.constexpr(2)
_STEP_OF_2_BITS, _STEP_OF_3_BITS = tl.constexpr(NORMAL_STEPS[2]), tl.constexpr(NORMAL_STEPS[3])
_FLOOR = tl.constexpr(128.5)
"""Added to a float32 between -1/2 and 127.5 it leaves the nearest integer in the third byte, but for ties."""
_FIRST_SIGN = tl.constexpr(float(signs(1)[0]))
_MANY_STEPS = tl.constexpr(4096.0)
"""Of a zero: its multiple of the scale is rounded to 2^-12 at most."""


@triton.jit
def _finite_pairs(registers, BFLOAT16: tl.constexpr):
    """Pairs of 16-bit elements with 0 for what is not finite."""
    EXPONENT: tl.constexpr = 0x7F80 if BFLOAT16 else 0x7C00
    results = ()
    for i in tl.static_range(len(registers)):
        x = registers[i]
        x = tl.where((x & EXPONENT) == EXPONENT, x & -65536, x)
        results = results + (tl.where((x & (EXPONENT << 16)) == (EXPONENT << 16), x & 0xFFFF, x),)
    return results


@triton.jit
def _finite(x):
    results = ()
    for j in tl.static_range(len(x)):
        results = results + (finite_or_zero(x[j]),)
    return results


@triton.jit
def _rotated(
    registers,
    ARRANGEMENT: tl.constexpr,
    BFLOAT16: tl.constexpr,
    FLOAT16: tl.constexpr,
    PACKED: tl.constexpr,
    CLEAN: tl.constexpr,
):
    """Elements behind the transform but for its factor, 32 float32 [pairs, lanes]."""
    if PACKED:
        PAIRS: tl.constexpr = registers[0].shape[0]
        LANES: tl.constexpr = registers[0].shape[1]
        pairs = _finite_pairs(registers, BFLOAT16) if CLEAN else registers
        return transformed_pairs(with_signs(pairs, PAIRS, LANES, ARRANGEMENT), BFLOAT16)
    else:
        x = elements_in(registers, BFLOAT16, FLOAT16)
        return transformed(floats_with_signs(_finite(x) if CLEAN else x, ARRANGEMENT))


@triton.jit
def _saturated_fma(x, factor, addend, HARDWARE: tl.constexpr):
    """Between 0 and 1."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, factor, addend], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.minimum(tl.maximum(tl.fma(x, factor, addend), 0.0), 1.0)


@triton.jit
def _like(number, x):
    """A number of each head for each of its elements."""
    return tl.broadcast_to(number[:, None], x.shape)


@triton.jit
def _ordinary_bits(
    x,
    scale,
    zero,
    BITS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    CUT: tl.constexpr,
    FACTOR: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Codes in a byte of 32 int32 each, and which byte; ``x`` times FACTOR is what is encoded."""
    LAST: tl.constexpr = (1 << BITS) - 1
    divisor = divisor_of(scale)
    results = ()
    if SYMMETRIC:
        factor = _like(FACTOR / divisor, x[0])
        rounder = tl.zeros_like(x[0]) + ROUNDER
        for j in tl.static_range(32):
            results = results + (tl.fma(x[j], factor, rounder).to(tl.int32, bitcast=True),)
    elif FACTOR == 1.0:
        origin = _like(zero.to(tl.float32), x[0])
        reciprocal = _like(negated_reciprocal(divisor), x[0])
        for j in tl.static_range(32):
            results = results + (code_bits(x[j], origin, origin, reciprocal, LAST, False),)
    elif CUT:
        factor = _like(FACTOR / (divisor * LAST), x[0])
        addend = _like(-zero.to(tl.float32) / (divisor * LAST), x[0])
        last = tl.zeros_like(x[0]) + LAST
        floor = tl.zeros_like(x[0]) + _FLOOR
        for j in tl.static_range(32):
            moved = _saturated_fma(x[j], factor, addend, HARDWARE)
            results = results + (tl.fma(moved, last, floor).to(tl.int32, bitcast=True),)
    else:
        factor = _like(FACTOR / divisor, x[0])
        # The constant comes last: the interpreter takes what begins with one for a constant.
        addend = _like(-zero.to(tl.float32) / divisor + _FLOOR, x[0])
        for j in tl.static_range(32):
            results = results + (tl.fma(x[j], factor, addend).to(tl.int32, bitcast=True),)
    return results


@triton.jit
def _fp8_words(x, factor, HARDWARE: tl.constexpr):
    """Four int64 of codes of 32 ordinary elements times a factor of each head."""
    factor = _like(factor, x[0])
    bits = ()
    for j in tl.static_range(32):
        bits = bits + (e4m3_bits(x[j] * factor),)
    return plane_words(bits, 0, 8, HARDWARE)


@triton.jit
def _fp8_words_by_hardware(x, factor):
    factor = _like(factor, x[0])
    halves = ()
    for i in tl.static_range(8):
        halves = halves + (
            tl.inline_asm_elementwise(
                "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; "
                "mov.b32 $0, {l, h}; }",
                "=r,f,f,f,f",
                [x[4 * i] * factor, x[4 * i + 1] * factor, x[4 * i + 2] * factor, x[4 * i + 3] * factor],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            ),
        )
    words = ()
    for i in tl.static_range(4):
        words = words + (joined(halves[2 * i], halves[2 * i + 1]),)
    return words


@triton.jit
def _any_bits(x, scale, zero, PRECISION: tl.constexpr, BITS: tl.constexpr):
    """Codes of any elements in the low byte of 32 int32."""
    divisor = divisor_of(scale)
    results = ()
    if PRECISION == _INT8 or PRECISION == _FP8:
        LARGEST_CODE: tl.constexpr = 127.0 if PRECISION == _INT8 else 448.0
        divisor = _like(divisor, x[0])
        reciprocal = -1.0 / divisor
        for j in tl.static_range(32):
            negated = negated_and_cleaned(x[j], divisor, reciprocal, LARGEST_CODE)
            if PRECISION == _INT8:
                results = results + (rounded_bits(negated) - ROUNDER_BITS,)
            else:
                results = results + (e4m3_bits(negated) ^ 0x80,)
    else:
        reciprocal = _like(negated_reciprocal(divisor), x[0])
        divisor = _like(divisor, x[0])
        origin = _like(zero.to(tl.float32), x[0])
        for j in tl.static_range(32):
            results = results + (code_bits(x[j], origin, divisor, reciprocal, (1 << BITS) - 1, True),)
    return results


@triton.jit
def _cut_range(low, high, mean, sigma, LAST: tl.constexpr):
    """`cut_ranges.normal_range` of what it needs to know of each head, float32."""
    STEP: tl.constexpr = _STEP_OF_2_BITS if LAST == 3 else _STEP_OF_3_BITS
    zero = rounded_zero(low)
    full = full_step(zero, high, LAST)
    step = sigma * STEP
    cut = step < full
    scale = rounded_scale(tl.where(cut, step, full))
    span = scale.to(tl.float32) * LAST
    centred = tl.minimum(tl.maximum(mean - span * 0.5, low), high - span)
    return scale, tl.where(cut, rounded_zero(centred), zero)


@triton.jit
def _squares(x):
    """Sum of the squares of each lane's elements."""
    even, odd = x[0] * x[0], x[1] * x[1]
    for i in tl.static_range(1, 16):
        even, odd = tl.fma(x[2 * i], x[2 * i], even), tl.fma(x[2 * i + 1], x[2 * i + 1], odd)
    return even + odd


@triton.jit
def _moments(x, peak, DIM: tl.constexpr):
    """Mean and population standard deviation of each head of any finite elements, ``peak`` the largest magnitude."""
    divisor = tl.where(peak == 0.0, 1.0, peak)[:, None]
    shares = ()
    for j in tl.static_range(32):
        shares = shares + (x[j] / divisor,)
    mean = sum_of(shares) * (1.0 / DIM)
    apart = ()
    for j in tl.static_range(32):
        apart = apart + (shares[j] - mean[:, None],)
    return mean * peak, tl.sqrt(tl.sum(_squares(apart), axis=1) * (1.0 / DIM)) * peak


@triton.jit
def _encode_any(
    heads,
    PAIRS: tl.constexpr,
    LANES: tl.constexpr,
    DIM: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    BITS: tl.constexpr,
    HADAMARD: tl.constexpr,
    BFLOAT16: tl.constexpr,
    FLOAT16: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """`encode_lanes` of any elements, read once more; words, and float16 scale and zero."""
    LAST: tl.constexpr = (1 << BITS) - 1
    FACTOR: tl.constexpr = DIM**-0.5 if HADAMARD else 1.0
    ARRANGEMENT: tl.constexpr = 1 if BITS == 8 else 0
    registers = registers_of(load_runs(heads, PAIRS, LANES, DIM, ITEMSIZE, ARRANGEMENT == 0))
    if HADAMARD:
        rotated = _rotated(registers, ARRANGEMENT, BFLOAT16, FLOAT16, HARDWARE and ITEMSIZE == 2, True)
        x = ()
        for j in tl.static_range(32):
            x = x + (finite_or_zero(rotated[j]) * FACTOR,)
    else:
        x = elements_in(registers, BFLOAT16, FLOAT16)
    finite = _finite(x)
    low, high = least_and_largest(finite)
    if PRECISION == _INT8 or PRECISION == _FP8:
        scale = symmetric_scale(larger(high, -low), 448.0 if PRECISION == _FP8 else 127.0)
        zero = scale
    elif HADAMARD and BITS <= 3:
        mean, sigma = _moments(finite, larger(high, -low), DIM)
        scale, zero = _cut_range(low, high, mean, sigma, LAST)
    else:
        scale, zero = full_range(low, high, LAST)
    return plane_words(_any_bits(x, scale, zero, PRECISION, BITS), 0, BITS, HARDWARE), scale, zero


@triton.jit
def encode_lanes(
    heads,
    PAIRS: tl.constexpr,
    LANES: tl.constexpr,
    DIM: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    BITS: tl.constexpr,
    HADAMARD: tl.constexpr,
    BFLOAT16: tl.constexpr,
    FLOAT16: tl.constexpr,
    HARDWARE: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
):
    """Words and parameters of whole heads, lanes of 32 consecutive elements, or HALVES for codes of 8 bits.

    Args:
        heads: int32 addresses [PAIRS].
        LANES: of a head, whose elements they are; 2, 4 or 8.
        BITS: of a code.
        HADAMARD: whether the heads are transformed.
        HARDWARE: instructions of NVIDIA's Ampere are there.
        HARDWARE_FP8: an instruction converts to E4M3.

    Returns:
        The tuple of `plane_words`, and int32 [PAIRS]: bits of the scale, plus 65536 times those of the zero if there is
        one.
    """
    LAST: tl.constexpr = (1 << BITS) - 1
    SYMMETRIC: tl.constexpr = PRECISION == _INT8 or PRECISION == _FP8
    CUT: tl.constexpr = HADAMARD and BITS <= 3
    FACTOR: tl.constexpr = DIM**-0.5 if HADAMARD else 1.0
    PACKED: tl.constexpr = HARDWARE and ITEMSIZE == 2
    ARRANGEMENT: tl.constexpr = 1 if BITS == 8 else 0
    LARGEST_CODE: tl.constexpr = 448.0 if PRECISION == _FP8 else 127.0
    runs = load_runs(heads, PAIRS, LANES, DIM, ITEMSIZE, ARRANGEMENT == 0)
    registers = registers_of(runs)
    if HADAMARD:
        x = _rotated(registers, ARRANGEMENT, BFLOAT16, FLOAT16, PACKED, False)
        low, high = least_and_largest(x)
        low *= FACTOR
        high *= FACTOR
    else:
        x = elements_in(registers, BFLOAT16, FLOAT16)
        low, high = extremes(runs, BFLOAT16, FLOAT16, PACKED, False)
    empty = (low == 0.0) & (high == 0.0)
    if SYMMETRIC:
        scale = symmetric_scale(larger(high, -low), LARGEST_CODE)
        zero = scale
        wide = scale.to(tl.float32)
        regular = ((wide >= SMALLEST_NORMAL) & (wide < LARGEST)) | empty
    elif CUT:
        power = tl.sum(_squares(x), axis=1) * (FACTOR * FACTOR / DIM)
        # The sum of the outputs is the first input times the square root of their number.
        first = elements_in((tl.load(heads),), BFLOAT16, FLOAT16)[0]
        mean = first * (_FIRST_SIGN * FACTOR)
        variance = power - mean * mean
        scale, zero = _cut_range(low, high, mean, tl.sqrt(tl.maximum(variance, 0.0)), LAST)
        wide = scale.to(tl.float32)
        regular = (wide >= SMALLEST_NORMAL) & (wide < LARGEST) & (variance * 64.0 >= power)
        regular = (regular & (tl.abs(low) < LARGEST) & (tl.abs(high) < LARGEST)) | empty
        regular &= tl.abs(zero.to(tl.float32)) <= tl.maximum(wide * _MANY_STEPS, 0.0)
    else:
        scale, zero = full_range(low, high, LAST)
        regular = is_regular(low, high, scale, zero)
        if HADAMARD:
            regular &= tl.abs(zero.to(tl.float32)) <= scale.to(tl.float32) * _MANY_STEPS
    if tl.max((regular == 0).to(tl.int32), axis=0) > 0:
        words, scale, zero = _encode_any(
            heads, PAIRS, LANES, DIM, ITEMSIZE, PRECISION, BITS, HADAMARD, BFLOAT16, FLOAT16, HARDWARE
        )
    elif PRECISION == _FP8:
        if HARDWARE_FP8:
            words = _fp8_words_by_hardware(x, FACTOR / divisor_of(scale))
        else:
            words = _fp8_words(x, FACTOR / divisor_of(scale), HARDWARE)
    else:
        bits = _ordinary_bits(x, scale, zero, BITS, SYMMETRIC, CUT, FACTOR, HARDWARE)
        BYTE: tl.constexpr = 2 if HADAMARD and not SYMMETRIC else 0
        words = plane_words(bits, BYTE, BITS, HARDWARE)
    if SYMMETRIC:
        params = float16_bits(scale)
    else:
        params = float16_bits(scale) | (float16_bits(zero) << 16)
    return words, params
