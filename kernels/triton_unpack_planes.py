"""Dequantise codes in planes, undo the Hadamard transform, and scatter the rows into the pool by slot id.

The counterpart of `triton_pack_planes`. The torch references are the quantisers' `dequantise` methods and
`HadamardTransform.inverse`; results are equal bit for bit without a transform. With one, float32 sums are made in
another order; where a row has parameters of its own, its codes are transformed, which is exact, and scaled afterwards.
"""

# Triton reads the annotations of kernels, so only what it knows can stand there.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spectrumkv_sglang.kernels.precision import CHANNEL_BLOCK_ROWS
from spectrumkv_sglang.kernels.segment_group import TABLE_COLUMNS, GroupLaunch, TileShape
from spectrumkv_sglang.kernels.triton_arithmetic import from_float32
from spectrumkv_sglang.kernels.triton_hadamard import hadamard, signs
from spectrumkv_sglang.kernels.triton_planes import load_codes
from spectrumkv_sglang.kernels.triton_pool import pool_elements, writable_rows
from spectrumkv_sglang.kernels.triton_tiles import has_capability, plane_constants
from spectrumkv_sglang.kernels.triton_tiles import launch as launch_kernel

SHAPE = TileShape(4096, 4)
"""Elements of a tile, whole rows of one head and at most a block of them, and the warps that work on it."""

_COLUMNS = tl.constexpr(TABLE_COLUMNS)


@triton.jit(
    do_not_specialize=["rows", "first_row", "slot_stride", "head_stride"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def _unpack_planes(
    pool_ptr,
    payload_ptr,
    verdict_ptr,
    slots_ptr,
    table_ptr,
    rows,
    first_row,
    slot_stride,
    head_stride,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    HADAMARD: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    BFLOAT16: tl.constexpr,
    FLOAT16: tl.constexpr,
    HARDWARE_BFLOAT16: tl.constexpr,
):
    program = tl.program_id(0)
    head = program % HEADS
    tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
    tile = program // HEADS % tiles
    entry = table_ptr + program // HEADS // tiles * _COLUMNS
    pool_start = tl.load(entry)
    codes_start = tl.load(entry + 1) * 2
    params_start = tl.load(entry + 2) * 2
    writable = writable_rows(verdict_ptr, rows)

    row = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    readable = tl.minimum(row, rows - 1)
    slot = tl.load(slots_ptr + first_row + readable)
    start = pool_start + slot * slot_stride + head * head_stride.to(tl.int64)
    pair = readable.to(tl.int64) * HEADS + head
    heads_ptr = payload_ptr.to(tl.pointer_type(tl.int32)) + (codes_start * 2 + pair * (DIM * (LOW + HIGH) // 32))
    numbers = load_codes(heads_ptr, DIM, LOW, HIGH).to(tl.float32)

    params_ptr = (payload_ptr + params_start).to(tl.pointer_type(tl.float16))
    element = tl.arange(0, DIM)[None, :]
    block = tile // (BLOCK_ROWS // TILE_ROWS)
    channel = (block * HEADS + head) * (2 * DIM) + element
    scale = tl.load(params_ptr + channel).to(tl.float32)
    values = numbers * scale + tl.load(params_ptr + (channel + DIM)).to(tl.float32)
    if HADAMARD:
        values = hadamard(values, DIM, HARDWARE_BFLOAT16) * signs(DIM)

    elements_ptr = pool_elements(pool_ptr, BFLOAT16, FLOAT16)
    target = elements_ptr + ((start * (16 // ITEMSIZE))[:, None] + element)
    valid = tl.broadcast_to((row < writable)[:, None], (TILE_ROWS, DIM))
    tl.store(target, from_float32(values, BFLOAT16, FLOAT16, HARDWARE_BFLOAT16), mask=valid)


def unpack_planes(
    launch: GroupLaunch, pool: torch.Tensor, payload: torch.Tensor, verdict: torch.Tensor, shape: TileShape = SHAPE
) -> None:
    """Decode every segment of a group into its rows on the current stream, if the payload is intact.

    Args:
        launch: the group to unpack, of `KernelFamily.PLANES`; its slots are distinct.
        pool: first key buffer, which the table's addresses count from.
        payload: the payload as int64 words, at a 16-byte boundary; on the device or in pinned host memory.
        verdict: as for `unpack_groups`: nothing is written unless the first two words are equal and the third is 0.
        shape: how to cut the work.
    """
    (group,) = launch.groups
    device = verdict.device
    tile_rows = min(CHANNEL_BLOCK_ROWS, shape.elements // group.dim)
    programs = group.segments * triton.cdiv(group.rows, tile_rows) * group.heads
    if not programs:
        return
    constants = {
        **plane_constants(group),
        "BLOCK_ROWS": CHANNEL_BLOCK_ROWS,
        "TILE_ROWS": tile_rows,
        "HARDWARE_BFLOAT16": has_capability(device, 8, 0),
    }
    pointers = (pool.view(torch.int64), payload, verdict, launch.slots, launch.table)
    scalars = (group.rows, group.first_row, group.slot_stride, group.head_stride)
    launch_kernel(_unpack_planes, programs, device, shape, (*pointers, *scalars), constants)
