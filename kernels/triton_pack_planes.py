"""Gather rows of the pool by slot id, transform and quantise them to codes in planes, and sum the words up.

For codes by channel that `triton_pack_channels` does not encode: those of 2 bits, and all behind the Hadamard
transform. A program takes some channels of a block, whole heads behind the transform, and holds them in registers. The
torch references are the quantisers' `quantise` methods behind `HadamardTransform.forward`; results are equal bit for
bit without a transform. With one, a sum of the transform may differ by its rounding, and so may a code that lies next
to the edge between two.
"""

# Triton reads the annotations of kernels, so only what it knows can stand there.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spectrumkv_sglang.kernels.precision import CHANNEL_BLOCK_ROWS
from spectrumkv_sglang.kernels.segment_group import TABLE_COLUMNS, GroupLaunch, TileShape
from spectrumkv_sglang.kernels.transforms.base import Transform
from spectrumkv_sglang.kernels.triton_affine import encode_affine
from spectrumkv_sglang.kernels.triton_arithmetic import (
    finite_or_zero,
    to_float32,
)
from spectrumkv_sglang.kernels.triton_hadamard import hadamard, signs
from spectrumkv_sglang.kernels.triton_padding import pad_segment
from spectrumkv_sglang.kernels.triton_planes import plane_words
from spectrumkv_sglang.kernels.triton_pool import pool_elements
from spectrumkv_sglang.kernels.triton_running_sum import add_distant_words
from spectrumkv_sglang.kernels.triton_tiles import has_capability, plane_constants
from spectrumkv_sglang.kernels.triton_tiles import launch as launch_kernel

_COLUMNS = tl.constexpr(TABLE_COLUMNS)
_SLICE = 64
"""Channels of a block that a program takes where they need not meet: whole words of the narrowest plane."""
_ELEMENTS_PER_WARP = 2048
"""Of a block: 64 registers of each thread."""


@triton.jit
def _load_rows(
    pool_ptr,
    start,
    column,
    HADAMARD: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    BFLOAT16: tl.constexpr,
    FLOAT16: tl.constexpr,
    HARDWARE_BFLOAT16: tl.constexpr,
):
    """Elements of heads at ``start`` [rows], in units of 16 bytes, from ``column`` on, float32 [rows, COLUMNS];
    transformed if they are to be, whole heads then."""
    elements_ptr = pool_elements(pool_ptr, BFLOAT16, FLOAT16)
    columns = (column + tl.arange(0, COLUMNS))[None, :]
    x = to_float32(tl.load(elements_ptr + ((start * (16 // ITEMSIZE))[:, None] + columns)), BFLOAT16)
    if HADAMARD:
        # A NaN would spread over its head; a change of sign is exact in any format.
        signed = finite_or_zero(x) * signs(DIM)
        if FLOAT16:
            x = hadamard(signed.to(tl.float16), DIM, HARDWARE_BFLOAT16)
        elif BFLOAT16 and HARDWARE_BFLOAT16:
            x = hadamard(signed.to(tl.bfloat16), DIM, HARDWARE_BFLOAT16)
        else:
            x = hadamard(signed, DIM, HARDWARE_BFLOAT16)
    return x


@triton.jit(
    do_not_specialize=["rows", "first_row", "slot_stride", "head_stride"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def _pack_planes(
    pool_ptr,
    payload_ptr,
    sums_ptr,
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
    COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    BFLOAT16: tl.constexpr,
    FLOAT16: tl.constexpr,
    HARDWARE_BFLOAT16: tl.constexpr,
    CHECKSUM: tl.constexpr,
    WARPS: tl.constexpr,
):
    # Slices of a head and heads of the same rows are read at the same time: they are neighbours in the pool.
    SLICES: tl.constexpr = DIM // COLUMNS
    part = tl.program_id(0) % SLICES
    program = tl.program_id(0) // SLICES
    head = program % HEADS
    tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
    tile = program // HEADS % tiles
    entry = table_ptr + program // HEADS // tiles * _COLUMNS
    pool_start = tl.load(entry)
    codes_start = tl.load(entry + 1) * 2
    params_start = tl.load(entry + 2) * 2
    segment_end = tl.load(entry + 3) * 2

    # Rows beyond the last repeat it when reading, which changes no extreme.
    lane = tl.arange(0, TILE_ROWS)
    count = tl.minimum(rows - tile * TILE_ROWS, TILE_ROWS)
    inside = lane < count
    slot = tl.load(slots_ptr + first_row + tile * TILE_ROWS + tl.minimum(lane, count - 1))
    start = pool_start + slot * slot_stride + head * head_stride.to(tl.int64)
    x = _load_rows(
        pool_ptr, start, part * COLUMNS, HADAMARD, DIM, COLUMNS, ITEMSIZE, BFLOAT16, FLOAT16, HARDWARE_BFLOAT16
    )

    params_ptr = (payload_ptr + params_start).to(tl.pointer_type(tl.int16))
    codes, scale, zero = encode_affine(x, inside[:, None], LOW + HIGH)
    channel = (tile * HEADS + head) * (2 * DIM) + (part * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    tl.store(params_ptr + channel, scale.to(tl.int16, bitcast=True))
    tl.store(params_ptr + (channel + DIM), zero.to(tl.int16, bitcast=True))

    WORDS: tl.constexpr = DIM * (LOW + HIGH) // 64
    first = codes_start + (tile.to(tl.int64) * (TILE_ROWS * HEADS) + head) * WORDS
    span = ((count - 1) * HEADS + 1) * WORDS
    heads = lane[:, None] * (HEADS * WORDS)
    words = plane_words(codes, 0, LOW)
    offset = heads + (part * words.shape[1] + tl.arange(0, words.shape[1]))[None, :]
    valid = tl.broadcast_to(inside[:, None], offset.shape)
    tl.store(payload_ptr + (first + offset), words, mask=valid)
    if CHECKSUM:
        add_distant_words(sums_ptr, words, offset, valid, first, span, WARPS)
    if HIGH > 0:
        words = plane_words(codes, LOW, HIGH)
        offset = heads + (DIM * LOW // 64 + part * words.shape[1] + tl.arange(0, words.shape[1]))[None, :]
        valid = tl.broadcast_to(inside[:, None], offset.shape)
        tl.store(payload_ptr + (first + offset), words, mask=valid)
        if CHECKSUM:
            add_distant_words(sums_ptr, words, offset, valid, first, span, WARPS)

    if (tile == tiles - 1) & (head == 0) & (part == 0):
        codes_end = (codes_start + rows.to(tl.int64) * (HEADS * WORDS)) * 4
        params_end = params_start * 4 + tiles.to(tl.int64) * (HEADS * DIM * 2)
        pad_segment(payload_ptr, sums_ptr, codes_end, params_end, params_start * 4, segment_end * 4, CHECKSUM)


def pack_planes(
    launch: GroupLaunch,
    pool: torch.Tensor,
    payload: torch.Tensor,
    block_sums: torch.Tensor,
    checksum: bool = True,
) -> None:
    """Encode the rows of every segment of a group on the current stream, padding included.

    Args:
        launch: the group to pack, of `KernelFamily.PLANES`.
        pool: first key buffer, which the table's addresses count from.
        payload: the payload as int64 words, at a 16-byte boundary; on the device or in pinned host memory.
        block_sums: int64, one for each of the payload's checksum blocks; scrambled words are added.
        checksum: whether to add them.
    """
    (group,) = launch.groups
    device = block_sums.device
    columns = group.dim if group.transform is Transform.HADAMARD else _SLICE
    # Squared errors of codes of 2 bits are float64.
    elements_per_warp = _ELEMENTS_PER_WARP // 2 if group.precision.bits == 2 else _ELEMENTS_PER_WARP
    tile_rows = CHANNEL_BLOCK_ROWS
    shape = TileShape(tile_rows * columns, tile_rows * columns // elements_per_warp)
    programs = group.segments * triton.cdiv(group.rows, tile_rows) * group.heads * (group.dim // columns)
    if not programs:
        return
    constants = {
        **plane_constants(group),
        "COLUMNS": columns,
        "TILE_ROWS": tile_rows,
        "HARDWARE_BFLOAT16": has_capability(device, 8, 0),
        "CHECKSUM": checksum,
        "WARPS": shape.warps,
    }
    pointers = (pool.view(torch.int64), payload, block_sums, launch.slots, launch.table)
    scalars = (group.rows, group.first_row, group.slot_stride, group.head_stride)
    launch_kernel(_pack_planes, programs, device, shape, (*pointers, *scalars), constants)
