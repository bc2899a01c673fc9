"""Codes of a lane's 32 elements in the words of a payload's planes; `quantisers.code_planes` says how they lie.

32 codes of a plane of n bits are n int32, so that no code leaves its lane on the way.
"""

# Triton reads the annotations of kernels, so only what it knows can stand there; its tuples grow by concatenation only.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from spectrumkv_sglang.kernels.triton_arithmetic import joined
from spectrumkv_sglang.kernels.triton_lanes import permuted


@triton.jit
def four_bytes(a, b, c, d, BYTE: tl.constexpr, HARDWARE: tl.constexpr):
    """One byte of each of four int32, the first lowest."""
    low = permuted(a, b, BYTE | (4 + BYTE) << 4, HARDWARE)
    high = permuted(c, d, BYTE | (4 + BYTE) << 4, HARDWARE)
    return permuted(low, high, 0x5410, HARDWARE)


@triton.jit
def _columns(bits, BYTE: tl.constexpr, HARDWARE: tl.constexpr):
    """Eight int32: codes i, i + 8, i + 16 and i + 24 in the bytes of the i-th."""
    columns = ()
    for i in tl.static_range(8):
        columns = columns + (four_bytes(bits[i], bits[i + 8], bits[i + 16], bits[i + 24], BYTE, HARDWARE),)
    return columns


@triton.jit
def _moved(x, UP: tl.constexpr):
    return x << UP if UP >= 0 else (x >> -UP)


@triton.jit
def _plane_of_4(columns, HARDWARE: tl.constexpr):
    """Four int32 of the low four bits of each code."""
    pairs = ()
    for i in tl.static_range(4):
        pairs = pairs + ((columns[2 * i] & 0x0F0F0F0F) | ((columns[2 * i + 1] << 4) & ~0x0F0F0F0F),)
    # Transposed: byte k of each of the four make word k.
    low_01, low_23 = permuted(pairs[0], pairs[1], 0x5140, HARDWARE), permuted(pairs[2], pairs[3], 0x5140, HARDWARE)
    high_01, high_23 = permuted(pairs[0], pairs[1], 0x7362, HARDWARE), permuted(pairs[2], pairs[3], 0x7362, HARDWARE)
    return (
        permuted(low_01, low_23, 0x5410, HARDWARE),
        permuted(low_01, low_23, 0x7632, HARDWARE),
        permuted(high_01, high_23, 0x5410, HARDWARE),
        permuted(high_01, high_23, 0x7632, HARDWARE),
    )


@triton.jit
def _plane_of_2(columns, SHIFT: tl.constexpr, HARDWARE: tl.constexpr):
    """Two int32 of two bits of each code."""
    quads = ()
    for i in tl.static_range(2):
        low = (_moved(columns[4 * i], -SHIFT) & 0x03030303) | (_moved(columns[4 * i + 1], 2 - SHIFT) & 0x0C0C0C0C)
        high = (_moved(columns[4 * i + 2], 4 - SHIFT) & 0x30303030) | (
            _moved(columns[4 * i + 3], 6 - SHIFT) & ~0x3F3F3F3F
        )
        quads = quads + ((low & 0x0F0F0F0F) | (high & ~0x0F0F0F0F),)
    return permuted(quads[0], quads[1], 0x5140, HARDWARE), permuted(quads[0], quads[1], 0x7362, HARDWARE)


@triton.jit
def _plane_of_1(columns, SHIFT: tl.constexpr):
    """An int32 of a bit of each code."""
    word = _moved(columns[0], -SHIFT) & 0x01010101
    for i in tl.static_range(1, 8):
        word |= _moved(columns[i], i - SHIFT) & ((0x01010101 << i) - (2**32 if i == 7 else 0))
    return word


@triton.jit
def plane_words(bits, BYTE: tl.constexpr, BITS: tl.constexpr, HARDWARE: tl.constexpr):
    """Words of each plane of a lane's codes.

    Args:
        bits: 32 int32 that hold a code in a byte each, whatever the others are.
        BYTE: which.
        BITS: of a code.

    Returns:
        A tuple of int64 and, of a plane of one bit, int32 [pairs, lanes]: plane after plane, first code lowest.
    """
    if BITS == 8:
        words = ()
        for i in tl.static_range(4):
            low = four_bytes(bits[8 * i], bits[8 * i + 1], bits[8 * i + 2], bits[8 * i + 3], BYTE, HARDWARE)
            high = four_bytes(bits[8 * i + 4], bits[8 * i + 5], bits[8 * i + 6], bits[8 * i + 7], BYTE, HARDWARE)
            words = words + (joined(low, high),)
    elif BITS == 4:
        halves = ()
        for i in tl.static_range(4):
            even = four_bytes(bits[8 * i], bits[8 * i + 2], bits[8 * i + 4], bits[8 * i + 6], BYTE, HARDWARE)
            odd = four_bytes(bits[8 * i + 1], bits[8 * i + 3], bits[8 * i + 5], bits[8 * i + 7], BYTE, HARDWARE)
            halves = halves + ((even & 0x0F0F0F0F) | ((odd << 4) & ~0x0F0F0F0F),)
        words = (joined(halves[0], halves[1]), joined(halves[2], halves[3]))
    else:
        columns = _columns(bits, BYTE, HARDWARE)
        words = ()
        if BITS >= 5:
            halves = _plane_of_4(columns, HARDWARE)
            words = (joined(halves[0], halves[1]), joined(halves[2], halves[3]))
            if BITS == 6:
                halves = _plane_of_2(columns, 4, HARDWARE)
                words = words + (joined(halves[0], halves[1]),)
            else:
                words = words + (_plane_of_1(columns, 4),)
        else:
            halves = _plane_of_2(columns, 0, HARDWARE)
            words = (joined(halves[0], halves[1]),)
            if BITS == 3:
                words = words + (_plane_of_1(columns, 2),)
    return words


@triton.jit
def _of_two_lanes(halves):
    """int64 of the int32 of two neighbouring lanes, which both get it."""
    PAIRS: tl.constexpr = halves.shape[0]
    LANES: tl.constexpr = halves.shape[1]
    odd = tl.arange(0, LANES) & 1
    parts = halves.to(tl.uint32, bitcast=True).to(tl.int64) << (odd * 32).to(tl.int64)[None, :]
    both = tl.sum(tl.reshape(parts, (PAIRS, LANES // 2, 2)), axis=2)
    return tl.reshape(tl.broadcast_to(both[:, :, None], (PAIRS, LANES // 2, 2)), (PAIRS, LANES))


@triton.jit
def store_planes(payload_ptr, first, inside, words, BITS: tl.constexpr, ARRANGEMENT: tl.constexpr):
    """Store a lane's words, and say which of the payload's they are.

    Args:
        payload_ptr: the payload as int64.
        first: word of the first pair, int64.
        inside: pairs that are there, [pairs].
        words: of `plane_words`.
        BITS: of a code.
        ARRANGEMENT: CONSECUTIVE, or HALVES of codes of 8 bits.

    Returns:
        As `add_words` takes them: a tuple of int64 [pairs, lanes], of their offsets from ``first``, and of which count.
    """
    PAIRS: tl.constexpr = words[0].shape[0]
    LANES: tl.constexpr = words[0].shape[1]
    WORDS: tl.constexpr = LANES * BITS // 2
    heads = tl.arange(0, PAIRS)[:, None] * WORDS
    lane = tl.arange(0, LANES)
    valid = tl.broadcast_to(inside[:, None], (PAIRS, LANES))
    summed = ()
    offsets = ()
    valids = ()
    both = tl.arange(0, 2 * LANES)
    for i in tl.static_range(BITS // 4 if BITS == 8 else (1 if BITS >= 4 else 0)):
        # Two words are neighbours and leave together.
        place = both // 2 + i * LANES if ARRANGEMENT == 1 else both // 2 * (BITS // 4) + i
        joined = tl.reshape(tl.join(words[2 * i], words[2 * i + 1]), (PAIRS, 2 * LANES))
        tl.store(payload_ptr + (first + (heads + (place * 2 + both % 2)[None, :])), joined, mask=inside[:, None])
        for odd in tl.static_range(2):
            place = lane + i * LANES if ARRANGEMENT == 1 else lane * (BITS // 4) + i
            summed = summed + (words[2 * i + odd],)
            offsets = offsets + (heads + (place * 2 + odd)[None, :],)
            valids = valids + (valid,)
    START: tl.constexpr = 2 * LANES if BITS >= 4 else 0
    if BITS == 2 or BITS == 3 or BITS == 6:
        offset = heads + (lane + START)[None, :]
        tl.store(payload_ptr + (first + offset), words[len(words) - (2 if BITS == 3 else 1)], mask=valid)
        summed = summed + (words[len(words) - (2 if BITS == 3 else 1)],)
        offsets = offsets + (offset,)
        valids = valids + (valid,)
    if BITS == 3 or BITS == 5:
        PLANE: tl.constexpr = LANES if BITS == 3 else 2 * LANES
        halves_ptr = payload_ptr.to(tl.pointer_type(tl.int32))
        halves = words[len(words) - 1]
        tl.store(halves_ptr + (2 * first + (heads * 2 + (lane + 2 * PLANE)[None, :])), halves, mask=valid)
        summed = summed + (_of_two_lanes(halves),)
        offsets = offsets + (heads + (lane // 2 + PLANE)[None, :],)
        valids = valids + (valid & ((lane & 1) == 0)[None, :],)
    return summed, offsets, valids
