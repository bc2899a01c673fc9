"""Codes of a block of rows in the words of a payload, for lanes that hold sixteen neighbouring elements of rows.

Sixteen codes of a plane of 4 or 8 bits are whole words; those of narrower planes meet those of the next lanes. Codes
are first added up a byte apart, each with ROUNDER_BITS, so that the planes of four of them are cut at once.
`quantisers.code_planes` says how planes lie.
"""

# Triton reads the annotations of kernels, so only what it knows can stand there.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from spectrumkv_sglang.kernels.triton_arithmetic import joined
from spectrumkv_sglang.kernels.triton_encode_int4 import MINUS_EIGHT_ROUNDERS

_MINUS_FOUR_ROUNDERS = tl.constexpr((-0x4B400000 * 0x01010101 + 2**31) % 2**32 - 2**31)
"""Takes the rounder's bits out of four codes that were added up eight bits apart, modulo 2^32."""
_GATHER_BIT_PAIRS = tl.constexpr(0x01041040)
"""Times four bytes of two bits each: those eight bits in the upmost byte."""


@triton.jit
def _words_of_pairs(halves):
    """int64 [rows, n] of int32 [rows, 2 n]."""
    low, high = tl.split(tl.reshape(halves, (halves.shape[0], halves.shape[1] // 2, 2)))
    return joined(low, high)


@triton.jit
def _in_fours(even, odd):
    """Even and odd codes of each eight elements in the bytes of int32, [rows, lanes, 2] each."""
    shift = (tl.arange(0, 4) * 8)[None, None, None, :]
    ROWS: tl.constexpr = even.shape[0]
    LANES: tl.constexpr = even.shape[1]
    return (
        tl.sum(tl.reshape(even, (ROWS, LANES, 2, 4)) << shift, axis=3) + _MINUS_FOUR_ROUNDERS,
        tl.sum(tl.reshape(odd, (ROWS, LANES, 2, 4)) << shift, axis=3) + _MINUS_FOUR_ROUNDERS,
    )


@triton.jit
def _plane(even, odd, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
    """Bits ``SHIFT`` on of eight codes each, neighbours in the lowest 8 * WIDTH bits of int32."""
    MASK: tl.constexpr = ((1 << WIDTH) - 1) * 0x01010101
    pairs = ((even >> SHIFT) & MASK) | (((odd >> SHIFT) & MASK) << WIDTH)
    if WIDTH == 4:
        return pairs
    elif WIDTH == 2:
        quads = (pairs | (pairs >> 4)) & 0x00FF00FF
        return (quads | (quads >> 8)) & 0xFFFF
    else:
        return ((pairs * _GATHER_BIT_PAIRS) >> 24) & 0xFF


@triton.jit
def _plane_words(even, odd, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
    """Words of a plane, int64 [rows, 16 * lanes * WIDTH / 64]."""
    eights = _plane(even, odd, SHIFT, WIDTH)
    if WIDTH == 4:
        low, high = tl.split(eights)
        return joined(low, high)
    else:
        bits = tl.sum(eights << (tl.arange(0, 2) * (8 * WIDTH))[None, None, :], axis=2)
        if WIDTH == 1:
            pairs = tl.reshape(bits, (bits.shape[0], bits.shape[1] // 2, 2))
            bits = tl.sum(pairs << (tl.arange(0, 2) * 16)[None, None, :], axis=2)
        return _words_of_pairs(bits)


@triton.jit
def words_of_codes(even, odd, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Words of both planes.

    Args:
        even: codes of the even elements plus ROUNDER_BITS, int32 [rows, lanes, 8].
        odd: those of the odd elements.
        LOW: bits of the first plane.
        HIGH: bits of the second, 0 if there is none.

    Returns:
        int64 [rows, words] of the first plane, and of the second, or the first again.
    """
    ROWS: tl.constexpr = even.shape[0]
    LANES: tl.constexpr = even.shape[1]
    if HIGH > 0 or LOW == 2:
        even, odd = _in_fours(even, odd)
        low = _plane_words(even, odd, 0, LOW)
        if HIGH > 0:
            return low, _plane_words(even, odd, LOW, HIGH)
        else:
            return low, low
    elif LOW == 4:
        codes = tl.reshape(even + (odd << 4), (ROWS, LANES, 2, 4))
        halves = tl.sum(codes << (tl.arange(0, 4) * 8)[None, None, None, :], axis=3) + MINUS_EIGHT_ROUNDERS
        first, second = tl.split(halves)
        words = joined(first, second)
        return words, words
    else:
        codes = tl.reshape(even + (odd << 8), (ROWS, LANES, 4, 2))
        halves = tl.sum(codes << (tl.arange(0, 2) * 16)[None, None, None, :], axis=3) + _MINUS_FOUR_ROUNDERS
        first, second = tl.split(tl.reshape(halves, (ROWS, LANES, 2, 2)))
        words = tl.reshape(joined(first, second), (ROWS, LANES * 2))
        return words, words
