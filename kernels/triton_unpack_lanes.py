"""Dequantise codes by row with each of a lane's elements in a register, undo the Hadamard transform, and scatter rows.

The counterpart of `triton_pack_lanes`. The torch references are the quantisers' `dequantise` methods and
`HadamardTransform.inverse`; results are equal bit for bit without a transform. With one, codes are transformed, which
is exact, and scaled afterwards. A lane holds every so many runs of eight elements (`triton_lanes.STRIDED`), so that
lanes which are neighbours write neighbouring 16 bytes.
"""

# Triton reads the annotations of kernels, so only what it knows can stand there; its tuples grow by concatenation only.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.segment_group import TABLE_COLUMNS, GroupLaunch, TileShape
from spectrumkv_sglang.kernels.triton_decode_lanes import decode_lanes, store_floats, store_pairs
from spectrumkv_sglang.kernels.triton_pool import writable_rows
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
SHAPE = TileShape(TURNS * 32 * _ELEMENTS_PER_LANE, 1)

_COLUMNS = tl.constexpr(TABLE_COLUMNS)
ELEMENTS_PER_LANE = tl.constexpr(_ELEMENTS_PER_LANE)


@triton.jit
def _unpack_tile(
    pool_ptr,
    payload_ptr,
    verdict_ptr,
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
    BLOCK_PAIRS: tl.constexpr,
    TURNS: tl.constexpr,
):
    PAIRS: tl.constexpr = BLOCK_PAIRS // TURNS
    LANES: tl.constexpr = DIM // ELEMENTS_PER_LANE
    segment = program // tiles
    tile = program % tiles
    entry = table_ptr + segment * _COLUMNS
    pool_start = tl.load(entry)
    codes_start = tl.load(entry + 1) * 2
    params_start = tl.load(entry + 2) * 2
    writable = writable_rows(verdict_ptr, pairs)
    params_ptr = (payload_ptr + params_start).to(tl.pointer_type(tl.float16))

    lane = tl.arange(0, PAIRS)
    turns = tl.minimum((pairs - tile * BLOCK_PAIRS + PAIRS - 1) // PAIRS, TURNS)
    for turn in range(turns):
        pair = tile * BLOCK_PAIRS + turn * PAIRS + lane
        inside = pair < writable
        readable = tl.minimum(pair, pairs - 1)
        slot = tl.load(slots_ptr + readable // HEADS)
        start = pool_start + slot * slot_stride + (readable % HEADS).to(tl.int64) * head_stride
        results = decode_lanes(
            payload_ptr + codes_start,
            params_ptr,
            readable,
            LANES,
            PRECISION,
            BITS,
            HADAMARD,
            BFLOAT16,
            FLOAT16,
            HARDWARE and ITEMSIZE == 2,
        )
        if ITEMSIZE == 2:
            store_pairs(pool_ptr, start, results, inside)
        else:
            store_floats(pool_ptr, start, results, inside)


@triton.jit(
    do_not_specialize=[*GROUP_SCALARS, "slot_stride", "head_stride"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def _unpack_lanes(
    pool_ptr,
    payload_ptr,
    verdict_ptr,
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
            _unpack_tile(
                pool_ptr,
                payload_ptr,
                verdict_ptr,
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
                BLOCK_PAIRS[group],
                TURNS,
            )
        program -= programs
        lines_ptr += segments[group] * _COLUMNS


def unpack_lanes(
    launch: GroupLaunch, pool: torch.Tensor, payload: torch.Tensor, verdict: torch.Tensor, shape: TileShape = SHAPE
) -> None:
    """Decode every segment of some groups into their rows on the current stream, if the payload is intact.

    Args:
        launch: what to unpack, of `KernelFamily.LANES`; its slots are distinct.
        pool: first key buffer, which the table's addresses count from.
        payload: the payload as int64 words, at a 16-byte boundary; on the device or in pinned host memory.
        verdict: as for `unpack_groups`: nothing is written unless the first two words are equal and the third is 0.
        shape: how to cut the work: one warp, and a multiple of the elements that it holds.
    """
    device = verdict.device
    constants = {
        **lane_constants(launch.groups, device, shape),
        "HARDWARE": has_capability(device, 8, 0),
    }
    pointers = (pool.view(torch.int64), payload, verdict, launch.slots, launch.table)
    shapes = dict.fromkeys(Precision, shape)
    launch_groups(_unpack_lanes, launch.groups, shapes, pointers, device, constants, LANES_INTERPRETED)
