"""`payload_checksum` on the GPU, equal to the CPU's bit for bit: of a payload as it stands, and of one being packed."""

# Triton reads the annotations of kernels, so only what it knows can stand there.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spectrumkv_sglang.kernels.checksum import WORDS_PER_BLOCK
from spectrumkv_sglang.kernels.segment_group import TABLE_COLUMNS, TileShape
from spectrumkv_sglang.kernels.triton_running_sum import BLOCK_WORDS, STEP, add_words, scramble
from spectrumkv_sglang.kernels.triton_tiles import launch

PROLOGUE_WORDS = 32
"""64-bit words of a payload's prologue."""
SHAPE = TileShape(2048, 4)
"""Words of a tile and warps that were fastest on an H200 (docs/results/gpu.md)."""

_SUMS_AT_ONCE = 1024
_TAIL_WORDS_AT_ONCE = 2048
_PROLOGUE_WORDS = tl.constexpr(PROLOGUE_WORDS)
_COLUMNS = tl.constexpr(TABLE_COLUMNS)


@triton.jit(do_not_specialize=["words"])
def _sum_blocks(words_ptr, prologue_ptr, verdict_ptr, words, TILE_WORDS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    start = block * BLOCK_WORDS
    lane = tl.arange(0, TILE_WORDS)
    partial = tl.zeros((TILE_WORDS,), dtype=tl.int64)
    if start + BLOCK_WORDS <= words:
        for tile in range(0, BLOCK_WORDS, TILE_WORDS):
            position = tile + lane
            partial += scramble(tl.load(words_ptr + (start + position)) + (position + 1).to(tl.int64) * STEP)
    else:
        for tile in range(0, BLOCK_WORDS, TILE_WORDS):
            position = tile + lane
            valid = position < words - start
            x = tl.load(words_ptr + (start + position), mask=valid, other=0) + (position + 1).to(tl.int64) * STEP
            partial += tl.where(valid, scramble(x), 0)
    total = scramble(tl.sum(partial, axis=0) + (block + 1) * STEP)
    tl.atomic_add(verdict_ptr, total, sem="relaxed")
    if block == 0:
        word = tl.arange(0, _PROLOGUE_WORDS)
        valid = word < words
        came = tl.load(words_ptr + word, mask=valid, other=0)
        announced = tl.load(prologue_ptr + word, mask=valid, other=0)
        tl.atomic_add(verdict_ptr + 2, tl.sum((came != announced).to(tl.int64), axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["chunks"])
def _sum_tails(words_ptr, sums_ptr, table_ptr, chunks, CHUNK: tl.constexpr):
    entry = table_ptr + (tl.program_id(0) // chunks) * _COLUMNS
    first = tl.load(entry + 2) * 2 + (tl.program_id(0) % chunks) * CHUNK
    end = tl.load(entry + 3) * 2
    if first < end:
        offset = tl.arange(0, CHUNK)
        valid = first + offset < end
        words = tl.load(words_ptr + (first + offset), mask=valid, other=0)
        add_words(sums_ptr, (words,), (offset,), (valid,), first, CHUNK, 0)


@triton.jit(do_not_specialize=["blocks"])
def _close_blocks(words_ptr, prologue_ptr, sums_ptr, verdict_ptr, blocks, SUMS: tl.constexpr):
    block = tl.program_id(0) * SUMS + tl.arange(0, SUMS)
    valid = block < blocks
    sums = tl.load(sums_ptr + block, mask=valid, other=0)
    # The next payload starts from zero.
    tl.store(sums_ptr + block, tl.zeros((SUMS,), dtype=tl.int64), mask=valid)
    if tl.program_id(0) == 0:
        word = tl.arange(0, _PROLOGUE_WORDS)
        prologue = tl.load(prologue_ptr + word)
        tl.store(words_ptr + word, prologue)
        mixed = tl.sum(scramble(prologue + (word + 1).to(tl.int64) * STEP), axis=0)
        sums += tl.where(block == 0, mixed, 0)
    closed = scramble(sums + (block + 1).to(tl.int64) * STEP)
    tl.atomic_add(verdict_ptr, tl.sum(tl.where(valid, closed, 0), axis=0), sem="relaxed")


def sum_payload(
    payload: torch.Tensor, prologue: torch.Tensor, verdict: torch.Tensor, shape: TileShape | None = None
) -> None:
    """Sum up a payload as it stands and compare its prologue, on the current stream of ``verdict``'s device.

    Args:
        payload: int64 words, on the device or in pinned host memory.
        prologue: int64 [32], what the payload ought to begin with; the payload itself where that is not known.
        verdict: int64 [3 or more] on the device. To the first is added the scrambled sum of each checksum block (modulo
            2^64 it goes to `combine`), to the third the number of words of the prologue that differ.
        shape: how to cut the work; None for what was fastest.
    """
    shape = shape or SHAPE
    programs = triton.cdiv(payload.numel(), WORDS_PER_BLOCK)
    if programs:
        launch(
            _sum_blocks,
            programs,
            verdict.device,
            shape,
            (payload, prologue, verdict, payload.numel()),
            {"TILE_WORDS": shape.elements},
        )


def sum_tails(table: torch.Tensor, longest: int, payload: torch.Tensor, block_sums: torch.Tensor) -> None:
    """Add the parameters of every segment, and the padding after them, to the sums of a payload's blocks.

    They are a few bytes of a hundred and were written last: reading them again costs less than summing them up where
    they are made, a few at a time.

    Args:
        table: int64 [segments, 4] on the device, of all groups, see `TABLE_COLUMNS`.
        longest: 64-bit words of the longest tail.
        payload: int64 words, on the device or in pinned host memory.
        block_sums: int64 on the device; scrambled words are added.
    """
    chunks = triton.cdiv(longest, _TAIL_WORDS_AT_ONCE)
    programs = table.numel() // TABLE_COLUMNS * chunks
    if programs:
        launch(
            _sum_tails,
            programs,
            block_sums.device,
            TileShape(_TAIL_WORDS_AT_ONCE, 4),
            (payload, block_sums, table, chunks),
            {"CHUNK": _TAIL_WORDS_AT_ONCE},
        )


def close_payload(
    payload: torch.Tensor, prologue: torch.Tensor, block_sums: torch.Tensor, verdict: torch.Tensor
) -> None:
    """Write the prologue of a packed payload and turn the sums of its blocks into one, on the current stream.

    Args:
        payload: int64 words, on the device or in pinned host memory; the first 32 are written.
        prologue: int64 [32] on the device; the payload itself to leave its prologue as it is.
        block_sums: int64 on the device: sum of the scrambled words of each checksum block, without the prologue's; zero
            afterwards.
        verdict: int64 on the device; to the first is added the scrambled sum of each block.
    """
    blocks = triton.cdiv(payload.numel(), WORDS_PER_BLOCK)
    launch(
        _close_blocks,
        triton.cdiv(blocks, _SUMS_AT_ONCE),
        verdict.device,
        TileShape(_SUMS_AT_ONCE, 4),
        (payload, prologue, block_sums, verdict, blocks),
        {"SUMS": _SUMS_AT_ONCE},
    )
