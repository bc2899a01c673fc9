"""Gather rows by slot id, transform and quantise them with each of a lane's elements in a register, and sum them up.

For rows behind the Hadamard transform, and for codes by row that are neither nibbles nor bytes. A program is one warp
that takes a few turns, so that nothing of a tile waits for another warp, and what is the same for every turn is done
once. The torch references are the quantisers' `quantise` methods behind `HadamardTransform.forward`;
`triton_encode_lanes` says how far results are equal.
"""

# Triton reads the annotations of kernels, so only what it knows can stand there.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.segment_group import TABLE_COLUMNS, GroupLaunch, TileShape
from spectrumkv_sglang.kernels.triton_encode_lanes import encode_lanes
from spectrumkv_sglang.kernels.triton_lane_words import store_planes
from spectrumkv_sglang.kernels.triton_padding import pad_segment
from spectrumkv_sglang.kernels.triton_running_sum import BLOCK_WORDS, add_sums, add_words, sum_within_block
from spectrumkv_sglang.kernels.triton_runs import ELEMENTS_PER_LANE as _ELEMENTS_PER_LANE
from spectrumkv_sglang.kernels.triton_tiles import (
    GROUP_SCALARS,
    LANES_INTERPRETED,
    has_capability,
    lane_constants,
    launch_groups,
)

TURNS = 8
"""Of a program: each takes as many heads as its lanes hold."""
SHAPE = TileShape(TURNS * 32 * _ELEMENTS_PER_LANE, 1, 96)
"""With 96 registers INT6 behind Hadamard gains 4 points of the floor on an H200 and INT3 loses none; 80 lose 1 to 4."""

_COLUMNS = tl.constexpr(TABLE_COLUMNS)
ELEMENTS_PER_LANE = tl.constexpr(_ELEMENTS_PER_LANE)


@triton.jit
def _pack_tile(
    pool_ptr,
    payload_ptr,
    sums_ptr,
    slots_ptr,
    table_ptr,
    program,
    pairs,
    tiles,
    slot_stride,
    head_stride,
    PRECISION: tl.constexpr,
    BITS: tl.constexpr,
    HADAMARD: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    BFLOAT16: tl.constexpr,
    FLOAT16: tl.constexpr,
    HARDWARE: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    CHECKSUM: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    TURNS: tl.constexpr,
):
    PAIRS: tl.constexpr = BLOCK_PAIRS // TURNS
    LANES: tl.constexpr = DIM // ELEMENTS_PER_LANE
    WORDS: tl.constexpr = DIM * BITS // 64
    PARAMETERS: tl.constexpr = 1 if BITS == 8 else 2
    segment = program // tiles
    tile = program % tiles
    entry = table_ptr + segment * _COLUMNS
    pool_start = tl.load(entry)
    codes_start = tl.load(entry + 1) * 2
    params_start = tl.load(entry + 2) * 2
    segment_end = tl.load(entry + 3) * 2

    lane = tl.arange(0, PAIRS)
    start_of_tile = codes_start + tile.to(tl.int64) * (BLOCK_PAIRS * WORDS)
    sums = tl.zeros((PAIRS, LANES), dtype=tl.int64)
    within_block = (start_of_tile & (BLOCK_WORDS - 1)) + BLOCK_PAIRS * WORDS <= BLOCK_WORDS
    turns = tl.minimum((pairs - tile * BLOCK_PAIRS + PAIRS - 1) // PAIRS, TURNS)
    for turn in range(turns):
        # Pairs beyond the last repeat it when reading, so that loads need no mask.
        pair = tile * BLOCK_PAIRS + turn * PAIRS + lane
        inside = pair < pairs
        readable = tl.minimum(pair, pairs - 1)
        slot = tl.load(slots_ptr + readable // HEADS)
        start = pool_start + slot * slot_stride + (readable % HEADS).to(tl.int64) * head_stride
        first = start_of_tile + turn * (PAIRS * WORDS)
        words, params = encode_lanes(
            pool_ptr.to(tl.pointer_type(tl.int32)) + start * 4,
            PAIRS,
            LANES,
            DIM,
            ITEMSIZE,
            PRECISION,
            BITS,
            HADAMARD,
            BFLOAT16,
            FLOAT16,
            HARDWARE,
            HARDWARE_FP8,
        )
        if PARAMETERS == 1:
            params_ptr = (payload_ptr + params_start).to(tl.pointer_type(tl.int16))
            tl.store(params_ptr + pair, params.to(tl.int16), mask=inside)
        else:
            params_ptr = (payload_ptr + params_start).to(tl.pointer_type(tl.int32))
            tl.store(params_ptr + pair, params, mask=inside)
        words, offsets, valids = store_planes(payload_ptr, first, inside, words, BITS, 1 if BITS == 8 else 0)
        if CHECKSUM:
            if within_block:
                sums += sum_within_block(words, offsets, valids, first)
            else:
                add_words(sums_ptr, words, offsets, valids, first, PAIRS * WORDS, 1)
    if CHECKSUM:
        add_sums(sums_ptr, sums, start_of_tile, 1)

    if tile == tiles - 1:
        codes_end = (codes_start + pairs.to(tl.int64) * WORDS) * 4
        params_end = params_start * 4 + pairs.to(tl.int64) * PARAMETERS
        pad_segment(payload_ptr, sums_ptr, codes_end, params_end, params_start * 4, segment_end * 4, CHECKSUM)


@triton.jit(
    do_not_specialize=[*GROUP_SCALARS, "slot_stride", "head_stride"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def _pack_lanes(
    pool_ptr,
    payload_ptr,
    sums_ptr,
    slots_ptr,
    table_ptr,
    pairs_0,
    pairs_1,
    pairs_2,
    pairs_3,
    segments_0,
    segments_1,
    segments_2,
    segments_3,
    first_row_0,
    first_row_1,
    first_row_2,
    first_row_3,
    slot_stride,
    head_stride,
    PRECISIONS: tl.constexpr,
    BITS: tl.constexpr,
    HADAMARD: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    BFLOAT16: tl.constexpr,
    FLOAT16: tl.constexpr,
    HARDWARE: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    CHECKSUM: tl.constexpr,
    TURNS: tl.constexpr,
    WARPS: tl.constexpr,
):
    pairs = (pairs_0, pairs_1, pairs_2, pairs_3)
    segments = (segments_0, segments_1, segments_2, segments_3)
    first_row = (first_row_0, first_row_1, first_row_2, first_row_3)
    program = tl.program_id(0)
    lines_ptr = table_ptr
    for group in tl.static_range(len(PRECISIONS)):
        tiles = (pairs[group] + BLOCK_PAIRS[group] - 1) // BLOCK_PAIRS[group]
        programs = tiles * segments[group]
        if (program >= 0) & (program < programs):
            _pack_tile(
                pool_ptr,
                payload_ptr,
                sums_ptr,
                slots_ptr + first_row[group],
                lines_ptr,
                program,
                pairs[group],
                tiles,
                slot_stride,
                head_stride,
                PRECISIONS[group],
                BITS[group],
                HADAMARD[group],
                HEADS,
                DIM,
                ITEMSIZE,
                BFLOAT16,
                FLOAT16,
                HARDWARE,
                HARDWARE_FP8,
                CHECKSUM,
                BLOCK_PAIRS[group],
                TURNS,
            )
        program -= programs
        lines_ptr += segments[group] * _COLUMNS


def pack_lanes(
    launch: GroupLaunch,
    pool: torch.Tensor,
    payload: torch.Tensor,
    block_sums: torch.Tensor,
    checksum: bool = True,
    shape: TileShape = SHAPE,
) -> None:
    """Encode the rows of every segment of some groups on the current stream, padding included.

    Args:
        launch: what to pack, of `KernelFamily.LANES`.
        pool: first key buffer, which the table's addresses count from.
        payload: the payload as int64 words, at a 16-byte boundary; on the device or in pinned host memory.
        block_sums: int64, at least one more than the payload's checksum blocks; scrambled words are added.
        checksum: whether to add them.
        shape: how to cut the work: one warp, and a multiple of the elements that it holds.
    """
    device = block_sums.device
    constants = {
        **lane_constants(launch.groups, device, shape),
        "HARDWARE": has_capability(device, 8, 0),
        "HARDWARE_FP8": has_capability(device, 8, 9),
        "CHECKSUM": checksum,
    }
    pointers = (pool.view(torch.int64), payload, block_sums, launch.slots, launch.table)
    shapes = dict.fromkeys(Precision, shape)
    launch_groups(_pack_lanes, launch.groups, shapes, pointers, device, constants, LANES_INTERPRETED)
