"""Summing up a payload for its checksum while its words are at hand: scrambled words, added to the sums of blocks."""

# Triton reads the annotations of kernels, so only what it knows can stand there.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from spectrumkv_sglang.kernels.checksum import (
    FIRST_FACTOR,
    FIRST_SHIFT,
    POSITION_STEP,
    SECOND_FACTOR,
    SECOND_SHIFT,
    THIRD_SHIFT,
    WORDS_PER_BLOCK,
)

# Constants as signed 64-bit numbers: the same bits as unsigned arithmetic.
STEP = tl.constexpr(POSITION_STEP - 2**64)
FIRST = tl.constexpr(FIRST_FACTOR - 2**64)
SECOND = tl.constexpr(SECOND_FACTOR - 2**64)
SHIFT_1, SHIFT_2, SHIFT_3 = tl.constexpr(FIRST_SHIFT), tl.constexpr(SECOND_SHIFT), tl.constexpr(THIRD_SHIFT)
# Shifts of signed numbers repeat the sign: these clear it.
MASK_1, MASK_2, MASK_3 = (tl.constexpr(2 ** (64 - shift) - 1) for shift in (FIRST_SHIFT, SECOND_SHIFT, THIRD_SHIFT))
BLOCK_WORDS = tl.constexpr(WORDS_PER_BLOCK)
BLOCK_BITS = tl.constexpr(WORDS_PER_BLOCK.bit_length() - 1)
_BLOCK_STEP = tl.constexpr((WORDS_PER_BLOCK * POSITION_STEP + 2**63) % 2**64 - 2**63)


@triton.jit
def scramble(x):
    """Bijection of 64-bit words of `payload_checksum`."""
    x ^= (x >> SHIFT_1) & MASK_1
    x *= FIRST
    x ^= (x >> SHIFT_2) & MASK_2
    x *= SECOND
    x ^= (x >> SHIFT_3) & MASK_3
    return x


@triton.jit
def _total(sums, WARPS: tl.constexpr):
    """Sum of int64 [a, b] modulo 2^64; where warps divide it, by 32-bit sums over each warp, one instruction each."""
    if len(sums.shape) == 2 and sums.shape[1] <= 32 and sums.numel % (WARPS * 32) == 0:
        ROWS: tl.constexpr = WARPS * 32 // sums.shape[1]
        by_warp = tl.sum(tl.reshape(sums, (sums.shape[0] // ROWS, WARPS, 32)), axis=0)
        low = tl.sum((by_warp & 0x7FFFFFF).to(tl.int32), axis=1).to(tl.uint32, bitcast=True).to(tl.int64)
        middle = tl.sum(((by_warp >> 27) & 0x7FFFFFF).to(tl.int32), axis=1).to(tl.uint32, bitcast=True).to(tl.int64)
        high = tl.sum((by_warp >> 54).to(tl.int32), axis=1).to(tl.int64)
        return tl.sum(low + (middle << 27) + (high << 54), axis=0)
    else:
        return tl.sum(sums)


@triton.jit
def add_words(sums_ptr, words, offsets, valids, first, SPAN: tl.constexpr, WARPS: tl.constexpr):
    """Scramble words and add them to the sums of their checksum blocks.

    Args:
        sums_ptr: int64, one for each block and one more.
        words: tuple of int64 tensors of one shape [a, b].
        offsets: where they lie, int32, counted from ``first``.
        valids: which of them belong to the payload.
        first: word of the payload, int64.
        SPAN: upper bound of the offsets, at most a block.
        WARPS: warps of the program.
    """
    position = first & (BLOCK_WORDS - 1)
    key = (position + 1) * STEP
    sum_ptr = sums_ptr + (first >> BLOCK_BITS)
    sums = tl.zeros_like(words[0])
    if position + SPAN > BLOCK_WORDS:
        beyond = tl.zeros_like(words[0])
        for i in tl.static_range(len(words)):
            past = position + offsets[i] >= BLOCK_WORDS
            x = words[i] + (key + offsets[i].to(tl.int64) * STEP) - tl.where(past, _BLOCK_STEP, 0)
            mixed = tl.where(valids[i], scramble(x), 0)
            beyond += tl.where(past, mixed, 0)
            sums += tl.where(past, 0, mixed)
        tl.atomic_add(sum_ptr + 1, _total(beyond, WARPS), sem="relaxed")
    else:
        for i in tl.static_range(len(words)):
            mixed = scramble(words[i] + (key + offsets[i].to(tl.int64) * STEP))
            sums += tl.where(valids[i], mixed, 0)
    tl.atomic_add(sum_ptr, _total(sums, WARPS), sem="relaxed")


@triton.jit
def sum_within_block(words, offsets, valids, first):
    """Scrambled words of one checksum block, those of a thread added up: int64 [a, b], for `add_sums`.

    Args:
        words, offsets, valids, first: as for `add_words`.
    """
    key = ((first & (BLOCK_WORDS - 1)) + 1) * STEP
    sums = tl.zeros_like(words[0])
    for i in tl.static_range(len(words)):
        sums += tl.where(valids[i], scramble(words[i] + (key + offsets[i].to(tl.int64) * STEP)), 0)
    return sums


@triton.jit
def add_sums(sums_ptr, sums, first, WARPS: tl.constexpr):
    """Add sums of scrambled words, int64 [a, b], to that of the block of word ``first``."""
    tl.atomic_add(sums_ptr + (first >> BLOCK_BITS), _total(sums, WARPS), sem="relaxed")


@triton.jit
def add_distant_words(sums_ptr, words, offsets, valid, first, span, WARPS: tl.constexpr):
    """`add_words` of words that may lie further apart than a block is long.

    Args:
        sums_ptr: int64, one for each block.
        words: int64 [a, b].
        offsets: where they lie, int32, counted from ``first``.
        valid: which of them belong to the payload.
        first: word of the payload, int64.
        span: words from ``first`` to the end of the last valid one.
        WARPS: warps of the program.
    """
    position = (first & (BLOCK_WORDS - 1)).to(tl.int32)
    sum_ptr = sums_ptr + (first >> BLOCK_BITS)
    places = position + offsets
    key = ((places & (BLOCK_WORDS - 1)) + 1).to(tl.int64) * STEP
    mixed = tl.where(valid, scramble(words + key), 0)
    last = (position + span - 1) >> BLOCK_BITS
    if last == 0:
        tl.atomic_add(sum_ptr, _total(mixed, WARPS), sem="relaxed")
    else:
        blocks = places >> BLOCK_BITS
        for block in range(last + 1):
            tl.atomic_add(sum_ptr + block, _total(tl.where(blocks == block, mixed, 0), WARPS), sem="relaxed")
