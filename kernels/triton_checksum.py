"""The block sums of `payload_checksum` on the GPU, equal to the CPU's bit for bit."""

# Triton reads the annotations of kernels, so only what it knows can stand there.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
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
    check_checksum_input,
)

_TILE_WORDS = 2048


@triton.jit
def _scramble(
    x,
    FIRST_SHIFT: tl.constexpr,
    SECOND_SHIFT: tl.constexpr,
    THIRD_SHIFT: tl.constexpr,
    FIRST_FACTOR: tl.constexpr,
    SECOND_FACTOR: tl.constexpr,
):
    x ^= (x >> FIRST_SHIFT) & ((1 << (64 - FIRST_SHIFT)) - 1)
    x *= FIRST_FACTOR
    x ^= (x >> SECOND_SHIFT) & ((1 << (64 - SECOND_SHIFT)) - 1)
    x *= SECOND_FACTOR
    x ^= (x >> THIRD_SHIFT) & ((1 << (64 - THIRD_SHIFT)) - 1)
    return x


@triton.jit
def _mixed_block_sums(
    words_ptr,
    sums_ptr,
    words,
    WORDS_PER_BLOCK: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    POSITION_STEP: tl.constexpr,
    FIRST_SHIFT: tl.constexpr,
    SECOND_SHIFT: tl.constexpr,
    THIRD_SHIFT: tl.constexpr,
    FIRST_FACTOR: tl.constexpr,
    SECOND_FACTOR: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    partial = tl.zeros((TILE_WORDS,), dtype=tl.int64)
    for tile in range(WORDS_PER_BLOCK // TILE_WORDS):
        position = tile * TILE_WORDS + tl.arange(0, TILE_WORDS).to(tl.int64)
        index = block * WORDS_PER_BLOCK + position
        x = tl.load(words_ptr + index, mask=index < words, other=0) + (position + 1) * POSITION_STEP
        x = _scramble(x, FIRST_SHIFT, SECOND_SHIFT, THIRD_SHIFT, FIRST_FACTOR, SECOND_FACTOR)
        partial += tl.where(index < words, x, 0)
    total = tl.sum(partial, axis=0) + (block + 1) * POSITION_STEP
    total = _scramble(total, FIRST_SHIFT, SECOND_SHIFT, THIRD_SHIFT, FIRST_FACTOR, SECOND_FACTOR)
    tl.store(sums_ptr + block, total)


def mixed_block_sums(payload: torch.Tensor) -> torch.Tensor:
    """Scrambled sum of each block of words, int64 [blocks]; their sum modulo 2^64 goes to `combine`.

    Args:
        payload: contiguous uint8 vector, a multiple of 8 bytes long, on the GPU.

    Raises:
        SpectrumKVError: as `payload_checksum`.
    """
    check_checksum_input(payload)
    words = payload.view(torch.int64)
    blocks = triton.cdiv(words.numel(), WORDS_PER_BLOCK)
    sums = torch.zeros(blocks, dtype=torch.int64, device=payload.device)
    if not blocks:
        return sums
    constants = {
        "WORDS_PER_BLOCK": WORDS_PER_BLOCK,
        "TILE_WORDS": _TILE_WORDS,
        # Arithmetic shifts are masked and factors taken as signed: the same bits as unsigned arithmetic.
        "POSITION_STEP": POSITION_STEP - 2**64,
        "FIRST_SHIFT": FIRST_SHIFT,
        "SECOND_SHIFT": SECOND_SHIFT,
        "THIRD_SHIFT": THIRD_SHIFT,
        "FIRST_FACTOR": FIRST_FACTOR - 2**64,
        "SECOND_FACTOR": SECOND_FACTOR - 2**64,
    }
    if payload.is_cuda:
        with torch.cuda.device(payload.device):
            _mixed_block_sums[(blocks,)](words, sums, words.numel(), **constants)
    else:
        _mixed_block_sums[(blocks,)](words, sums, words.numel(), **constants)
    return sums
