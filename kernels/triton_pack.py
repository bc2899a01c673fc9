"""Gather rows of the pool by slot id, quantise them into a payload and sum it up, one launch per group of segments."""

# Triton reads the annotations of kernels, so only what it knows can stand there.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.segment_group import TABLE_COLUMNS, SegmentGroup, TileShape
from spectrumkv_sglang.kernels.triton_encode import encode_fp8_e4m3, encode_int4, encode_int8
from spectrumkv_sglang.kernels.triton_tiles import (
    BLOCK_BITS,
    STEP,
    add_to_block_sums,
    beyond_block,
    crosses_block,
    has_capability,
    launch_over_tiles,
    mix,
    move_to_next_block,
    scramble,
    shape_for,
    to_float32,
)
from spectrumkv_sglang.kernels.triton_tiles import BLOCK_WORDS as CHECKSUM_BLOCK

SHAPES = {
    Precision.NATIVE: TileShape(4096, 4),
    Precision.INT8: TileShape(4096, 4, 48),
    Precision.FP8_E4M3: TileShape(8192, 4, 96),
    Precision.INT4: TileShape(8192, 4, 96),
}
"""Tiles that were fastest on an H200 (docs/results/gpu.md)."""

_COLUMNS = tl.constexpr(TABLE_COLUMNS)
_PADDING_LANES = tl.constexpr(256)
"""More than the 16-bit halves of padding between two segments (at most 4 and 128)."""


@triton.jit(
    do_not_specialize=["pairs", "tiles", "slot_stride", "head_stride"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def _pack_tiles(
    pool_ptr,
    payload_ptr,
    sums_ptr,
    slots_ptr,
    table_ptr,
    pairs,
    tiles,
    slot_stride,
    head_stride,
    PRECISION: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    BFLOAT16: tl.constexpr,
    FLOAT16: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    CHECKSUM: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    segment = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    entry = table_ptr + segment * _COLUMNS
    pool_start = tl.load(entry)
    codes_start = tl.load(entry + 1) * 2
    params_start = tl.load(entry + 2) * 2
    segment_end = tl.load(entry + 3) * 2

    PER_UNIT: tl.constexpr = 16 // ITEMSIZE
    HALF_DIM: tl.constexpr = BLOCK_DIM // 2
    FULL: tl.constexpr = BLOCK_DIM == DIM
    # Where the right half of a head begins. INT4 takes heads in alternate runs of eight, so that a thread holds all
    # sixteen codes of a word.
    RIGHT: tl.constexpr = 8 if PRECISION == 3 else HALF_DIM
    WORDS: tl.constexpr = DIM * ITEMSIZE // 8 if PRECISION == 0 else (DIM // 16 if PRECISION == 3 else DIM // 8)
    TILE_WORDS: tl.constexpr = BLOCK_DIM * ITEMSIZE // 8 if PRECISION == 0 else HALF_DIM // 8

    # Pairs beyond the last repeat it when reading, so that loads need no mask.
    lane = tl.arange(0, BLOCK_PAIRS)
    pair = tile * BLOCK_PAIRS + lane
    inside = pair < pairs
    readable = tl.minimum(pair, pairs - 1)
    slot = tl.load(slots_ptr + readable // HEADS)
    start = pool_start + slot * slot_stride + (readable % HEADS).to(tl.int64) * head_stride

    first = codes_start + tile.to(tl.int64) * (BLOCK_PAIRS * WORDS)
    word = tl.arange(0, TILE_WORDS)
    offset = lane[:, None] * WORDS + word[None, :]
    valid = inside[:, None] & (word < WORDS)[None, :]
    if PRECISION == 0:
        source = pool_ptr + ((start * 2)[:, None] + word[None, :])
        words = tl.load(source) if FULL else tl.load(source, mask=(word < WORDS)[None, :], other=0)
    else:
        element = tl.arange(0, HALF_DIM)
        if PRECISION == 3:
            element = (element // 8) * 16 + element % 8
        source = pool_ptr + ((start * PER_UNIT)[:, None] + element[None, :])
        inside_left, inside_right = (element < DIM)[None, :], (element < DIM - RIGHT)[None, :]
        if FULL:
            left, right = tl.load(source), tl.load(source + RIGHT)
        else:
            left = tl.load(source, mask=inside_left, other=0)
            right = tl.load(source + RIGHT, mask=inside_right, other=0)
        left, right = to_float32(left, BFLOAT16), to_float32(right, BFLOAT16)
        if PRECISION == 1:
            words, right_words, params = encode_int8(left, right, BLOCK_PAIRS, HALF_DIM, BFLOAT16)
        elif PRECISION == 2:
            words, right_words, params = encode_fp8_e4m3(left, right, BLOCK_PAIRS, HALF_DIM, HARDWARE_FP8)
        else:
            words, params = encode_int4(left, right, inside_left, inside_right, BLOCK_PAIRS, HALF_DIM, FULL)
        if PRECISION == 3:
            params_ptr = (payload_ptr + params_start).to(tl.pointer_type(tl.int32))
            tl.store(params_ptr + pair, params, mask=inside)
        else:
            params_ptr = (payload_ptr + params_start).to(tl.pointer_type(tl.int16))
            tl.store(params_ptr + pair, params.to(tl.int16), mask=inside)

    tl.store(payload_ptr + (first + offset), words, mask=valid)
    if CHECKSUM:
        crosses = crosses_block(first, BLOCK_PAIRS * WORDS)
        sums = mix(words, first, offset, valid)
        if crosses:
            move_to_next_block(sums_ptr, beyond_block(sums, first, offset), first)
    if PRECISION == 1 or PRECISION == 2:
        right_offset = offset + TILE_WORDS
        right_valid = inside[:, None] & (word < WORDS - TILE_WORDS)[None, :]
        tl.store(payload_ptr + (first + right_offset), right_words, mask=right_valid)
        if CHECKSUM:
            right_sums = mix(right_words, first, right_offset, right_valid)
            if crosses:
                move_to_next_block(sums_ptr, beyond_block(right_sums, first, right_offset), first)
            sums += right_sums
    if CHECKSUM:
        add_to_block_sums(sums_ptr, sums, first)

    if tile == tiles - 1:
        # Padding: a word between codes and parameters (lane 0), and what follows the parameters, or native codes.
        codes_end = (codes_start + pairs.to(tl.int64) * WORDS) * 4
        if PRECISION == 0:
            params_end = codes_end
            gap_end = codes_end
        else:
            params_end = params_start * 4 + pairs * (2 if PRECISION == 3 else 1)
            gap_end = params_start * 4
        halves_ptr = payload_ptr.to(tl.pointer_type(tl.int16))
        padding = tl.arange(0, _PADDING_LANES)
        index = tl.where(padding < 4, codes_end + padding, params_end + padding - 4)
        empty = index < tl.where(padding < 4, gap_end, segment_end * 4)
        tl.store(halves_ptr + index, tl.zeros((_PADDING_LANES,), dtype=tl.int16), mask=empty)
        if CHECKSUM:
            index //= 4
            mixed_zeros = scramble(((index & (CHECKSUM_BLOCK - 1)) + 1) * STEP)
            tl.atomic_add(sums_ptr + (index >> BLOCK_BITS), mixed_zeros, mask=empty & (padding == 0), sem="relaxed")


def pack_segments(
    group: SegmentGroup,
    table: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
    payload: torch.Tensor,
    block_sums: torch.Tensor,
    checksum: bool = True,
    shape: TileShape | None = None,
) -> None:
    """Encode the rows ``slots`` of every segment of a group on the current stream, padding included.

    Args:
        group: what the segments have in common; ``rows`` and ``segments`` at least 1.
        table: int64 [segments, 4] on the device, see `TABLE_COLUMNS`.
        slots: int64 [rows] on the device, valid pool slots (not checked here).
        pool: first key buffer, which the table's addresses count from.
        payload: the payload as int64 words, at a 16-byte boundary; on the device or in pinned host memory.
        block_sums: int64, at least one more than the payload's checksum blocks; scrambled words are added.
        checksum: whether to add them.
        shape: how to cut the work; None for what was fastest.
    """
    shape = shape or shape_for(block_sums.device, SHAPES[group.precision])
    constants = {"HARDWARE_FP8": has_capability(block_sums.device, 8, 9), "CHECKSUM": checksum}
    launch_over_tiles(_pack_tiles, group, shape, pool, payload, block_sums, slots, table, constants)
