"""Dequantise a payload and scatter its rows into the pool by slot id, several groups of segments a launch.

The torch references are the quantisers' `dequantise` methods; results are equal bit for bit.
"""

# Triton reads the annotations of kernels, so only what it knows can stand there.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.segment_group import TABLE_COLUMNS, GroupLaunch, KernelFamily, TileShape
from spectrumkv_sglang.kernels.triton_arithmetic import from_float32
from spectrumkv_sglang.kernels.triton_pool import pool_elements, writable_rows
from spectrumkv_sglang.kernels.triton_tiles import GROUP_SCALARS, has_capability, launch_groups
from spectrumkv_sglang.kernels.triton_unpack_channels import unpack_channels
from spectrumkv_sglang.kernels.triton_unpack_lanes import unpack_lanes
from spectrumkv_sglang.kernels.triton_unpack_planes import unpack_planes

SHAPES = {
    Precision.NATIVE: TileShape(2048, 2),
    Precision.INT8: TileShape(2048, 2),
    Precision.FP8_E4M3: TileShape(2048, 2),
    Precision.INT4: TileShape(2048, 2),
}
"""Tiles that were fastest on an H200 (docs/results/gpu.md)."""

_COLUMNS = tl.constexpr(TABLE_COLUMNS)


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
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    BFLOAT16: tl.constexpr,
    FLOAT16: tl.constexpr,
    HARDWARE_BFLOAT16: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    segment = program // tiles
    tile = program % tiles
    entry = table_ptr + segment * _COLUMNS
    pool_start = tl.load(entry)
    codes_start = tl.load(entry + 1) * 2
    params_start = tl.load(entry + 2) * 2
    writable = writable_rows(verdict_ptr, pairs)

    lane = tl.arange(0, BLOCK_PAIRS)
    pair = tile * BLOCK_PAIRS + lane
    inside = pair < writable
    readable = tl.minimum(pair, pairs - 1)
    slot = tl.load(slots_ptr + readable // HEADS)
    head = (readable % HEADS).to(tl.int64)
    start = pool_start + slot * slot_stride + head * head_stride

    if PRECISION == 0:
        PER_WORD: tl.constexpr = 8 // ITEMSIZE
        WORDS: tl.constexpr = DIM // PER_WORD
        BLOCK_WORDS: tl.constexpr = BLOCK_DIM // PER_WORD
        word = tl.arange(0, BLOCK_WORDS)
        source = payload_ptr + (codes_start + readable.to(tl.int64)[:, None] * WORDS + word[None, :])
        target = pool_ptr + ((start * 2)[:, None] + word[None, :])
        valid = inside[:, None] & (word < WORDS)[None, :]
        if BLOCK_WORDS == WORDS:
            tl.store(target, tl.load(source), mask=valid)
        else:
            tl.store(target, tl.load(source, mask=(word < WORDS)[None, :], other=0), mask=valid)
    else:
        PER_UNIT: tl.constexpr = 16 // ITEMSIZE
        # Half words of eight INT4 codes, words of eight INT8 or FP8 codes: 16 bytes of bfloat16 to store.
        UNITS: tl.constexpr = DIM // 8
        BLOCK_UNITS: tl.constexpr = BLOCK_DIM // 8
        unit = tl.arange(0, BLOCK_UNITS)
        if PRECISION == 3:
            units_ptr = payload_ptr.to(tl.pointer_type(tl.int32)) + 2 * codes_start
        else:
            units_ptr = payload_ptr + codes_start
        source = units_ptr + (readable.to(tl.int64)[:, None] * UNITS + unit[None, :])
        units = tl.load(source) if BLOCK_UNITS == UNITS else tl.load(source, mask=(unit < UNITS)[None, :], other=0)
        params_ptr = (payload_ptr + params_start).to(tl.pointer_type(tl.float16))
        if PRECISION == 3:
            shift = tl.arange(0, 8) * 4
            codes = (units[:, :, None] >> shift[None, None, :]) & 0xF
            codes = tl.reshape(codes, (BLOCK_PAIRS, BLOCK_DIM))
            scale = tl.load(params_ptr + readable * 2).to(tl.float32)
            zero = tl.load(params_ptr + readable * 2 + 1).to(tl.float32)
            values = codes.to(tl.float32) * scale[:, None] + zero[:, None]
        else:
            shift = (tl.arange(0, 8) * 8).to(tl.int64)
            codes = ((units[:, :, None] >> shift[None, None, :]) & 0xFF).to(tl.int32)
            codes = tl.reshape(codes, (BLOCK_PAIRS, BLOCK_DIM))
            scale = tl.load(params_ptr + readable).to(tl.float32)
            if PRECISION == 1:
                values = ((codes ^ 0x80) - 128).to(tl.float32) * scale[:, None]
            else:
                # An E4M3 number moved up by 7 bits is the float16 of 2^-8 times its value, subnormals included.
                half = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
                values = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * (scale * 256.0)[:, None]
        elements_ptr = pool_elements(pool_ptr, BFLOAT16, FLOAT16)
        element = tl.arange(0, BLOCK_DIM)
        target = elements_ptr + ((start * PER_UNIT)[:, None] + element[None, :])
        valid = inside[:, None] & (element < DIM)[None, :]
        tl.store(target, from_float32(values, BFLOAT16, FLOAT16, HARDWARE_BFLOAT16), mask=valid)


@triton.jit(
    do_not_specialize=[*GROUP_SCALARS, "slot_stride", "head_stride"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def _unpack_groups(
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
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    BFLOAT16: tl.constexpr,
    FLOAT16: tl.constexpr,
    HARDWARE_BFLOAT16: tl.constexpr,
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
                HEADS,
                DIM,
                ITEMSIZE,
                BFLOAT16,
                FLOAT16,
                HARDWARE_BFLOAT16,
                BLOCK_PAIRS[group],
                BLOCK_DIM,
            )
        program -= programs
        lines_ptr += segments[group] * _COLUMNS


def unpack_groups(
    launch: GroupLaunch,
    pool: torch.Tensor,
    payload: torch.Tensor,
    verdict: torch.Tensor,
    shapes: Mapping[Precision, TileShape] = SHAPES,
) -> None:
    """Decode every segment of some groups into their rows on the current stream, if the payload is intact.

    Args:
        launch: what to unpack; its slots are distinct.
        pool: first key buffer, which the table's addresses count from.
        payload: the payload as int64 words, at a 16-byte boundary; on the device or in pinned host memory.
        verdict: int64 [3 or more] on the device: sum over the payload's checksum blocks, the same as announced, words
            of the prologue that differ. Nothing is written unless the first two are equal and the third is 0.
        shapes: how to cut the work of `KernelFamily.HEADS`.
    """
    device = verdict.device
    family = launch.groups[0].family
    if family is KernelFamily.LANES:
        unpack_lanes(launch, pool, payload, verdict)
        return
    if family is not KernelFamily.HEADS:
        unpack = unpack_channels if family is KernelFamily.CHANNELS else unpack_planes
        for one in launch.apart():
            unpack(one, pool, payload, verdict)
        return
    constants = {"HARDWARE_BFLOAT16": has_capability(device, 8, 0)}
    pointers = (pool.view(torch.int64), payload, verdict, launch.slots, launch.table)
    launch_groups(_unpack_groups, launch.groups, shapes, pointers, device, constants)
