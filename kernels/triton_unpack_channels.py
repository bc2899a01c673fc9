"""Dequantise codes with a scale and a zero for each channel of a block, and scatter the rows into the pool by slot id.

A program takes some rows of one head of one block, so that it reads the block's parameters once for all of them. The
torch reference is `AffineChannelQuantiser.dequantise`; results are equal bit for bit.
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
from spectrumkv_sglang.kernels.triton_pool import pool_elements, writable_rows
from spectrumkv_sglang.kernels.triton_tiles import code_constants, group_constants, has_capability
from spectrumkv_sglang.kernels.triton_tiles import launch as launch_kernel

TILE_ROWS = 64
"""Rows of a tile, whole ones of one head; they divide a block."""
_ELEMENTS_PER_WARP = 4096
"""Of a tile. With fewer, a lane works out addresses and parameters for too few of them."""

_COLUMNS = tl.constexpr(TABLE_COLUMNS)


@triton.jit
def _load_plane(bytes_ptr, heads, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr):
    """Bits of a plane of each element, ``SHIFT`` bits up, int32 [rows, BLOCK_DIM]; ``heads`` are bytes from the first
    to each head.

    Eight elements, 16 bytes of bfloat16 to store, are one number of 8 * WIDTH bits, so that the lane that stores them
    reads their bits, whatever the plane. Numbers narrower than a word are shifted out of one: loads of bytes would be
    given to few lanes, and what they hold moved to the others.
    """
    unit = tl.arange(0, BLOCK_DIM // 8)
    shift = tl.arange(0, 8) * WIDTH
    if WIDTH == 8:
        source = bytes_ptr.to(tl.pointer_type(tl.int64)) + ((heads // 8)[:, None] + unit[None, :])
    else:
        SHARE: tl.constexpr = 4 // WIDTH
        source = bytes_ptr.to(tl.pointer_type(tl.int32)) + ((heads // 4)[:, None] + (unit // SHARE)[None, :])
    units = tl.load(source) if BLOCK_DIM == DIM else tl.load(source, mask=(unit < DIM // 8)[None, :], other=0)
    if WIDTH == 8:
        bits = (units[:, :, None] >> shift.to(tl.int64)[None, None, :]).to(tl.int32)
    else:
        if WIDTH < 4:
            # All eight are moved where they belong at once.
            units = ((units >> (unit % SHARE * (8 * WIDTH))[None, :]) & ((1 << (8 * WIDTH)) - 1)) << SHIFT
        bits = units[:, :, None] >> shift[None, None, :]
    return tl.reshape(bits & (((1 << WIDTH) - 1) << SHIFT), (heads.shape[0], BLOCK_DIM))


@triton.jit(
    do_not_specialize=["rows", "first_row", "slot_stride", "head_stride"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def _unpack_channels(
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
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
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

    # In bytes from the first code of a segment to those of a head, of codes that lie in planes.
    heads = (readable.to(tl.int64) * HEADS + head) * (DIM * (LOW + HIGH) // 8)
    bytes_ptr = (payload_ptr + codes_start).to(tl.pointer_type(tl.int8))
    codes = _load_plane(bytes_ptr, heads, DIM, BLOCK_DIM, LOW, 0)
    if HIGH > 0:
        codes |= _load_plane(bytes_ptr + DIM * LOW // 8, heads, DIM, BLOCK_DIM, HIGH, LOW)
    element = tl.arange(0, BLOCK_DIM)
    block = tile // (BLOCK_ROWS // TILE_ROWS)
    params_ptr = (payload_ptr + params_start).to(tl.pointer_type(tl.float16)) + (block * HEADS + head) * (2 * DIM)
    if BLOCK_DIM == DIM:
        scale, zero = tl.load(params_ptr + element), tl.load(params_ptr + (DIM + element))
    else:
        scale = tl.load(params_ptr + element, mask=element < DIM, other=0.0)
        zero = tl.load(params_ptr + (DIM + element), mask=element < DIM, other=0.0)
    # A code times a float16 is exact in float32, so that the fused operation rounds as the reference does.
    zeros = tl.broadcast_to(zero.to(tl.float32)[None, :], (TILE_ROWS, BLOCK_DIM))
    values = tl.fma(codes.to(tl.float32), tl.broadcast_to(scale.to(tl.float32)[None, :], zeros.shape), zeros)

    elements_ptr = pool_elements(pool_ptr, BFLOAT16, FLOAT16)
    target = elements_ptr + ((start * (16 // ITEMSIZE))[:, None] + element[None, :])
    valid = (row < writable)[:, None] & (element < DIM)[None, :]
    tl.store(target, from_float32(values, BFLOAT16, FLOAT16, HARDWARE_BFLOAT16), mask=valid)


def unpack_channels(
    launch: GroupLaunch,
    pool: torch.Tensor,
    payload: torch.Tensor,
    verdict: torch.Tensor,
    tile_rows: int = TILE_ROWS,
    elements_per_warp: int = _ELEMENTS_PER_WARP,
) -> None:
    """Decode every segment of a group into its rows on the current stream, if the payload is intact.

    Args:
        launch: the group to unpack, of `KernelFamily.CHANNELS`; its slots are distinct.
        pool: first key buffer, which the table's addresses count from.
        payload: the payload as int64 words, at a 16-byte boundary; on the device or in pinned host memory.
        verdict: as for `unpack_groups`: nothing is written unless the first two words are equal and the third is 0.
        tile_rows: rows of a tile.
        elements_per_warp: of a tile.
    """
    (group,) = launch.groups
    device = verdict.device
    of_group = group_constants(group)
    block_dim = of_group["BLOCK_DIM"]
    if device.type != "cuda":
        tile_rows = CHANNEL_BLOCK_ROWS
    shape = TileShape(tile_rows * block_dim, max(1, tile_rows * block_dim // elements_per_warp))
    programs = group.segments * triton.cdiv(group.rows, tile_rows) * group.heads
    if not programs:
        return
    pointers = (pool.view(torch.int64), payload, verdict, launch.slots, launch.table)
    constants = {
        **of_group,
        **code_constants(group),
        "BLOCK_ROWS": CHANNEL_BLOCK_ROWS,
        "TILE_ROWS": tile_rows,
        "HARDWARE_BFLOAT16": has_capability(device, 8, 0),
    }
    scalars = (group.rows, group.first_row, group.slot_stride, group.head_stride)
    launch_kernel(_unpack_channels, programs, device, shape, (*pointers, *scalars), constants)
