"""Gather rows of the pool by slot id, quantise them into a payload and sum it up, a few groups of segments a launch."""

# Triton reads the annotations of kernels, so only what it knows can stand there; its tuples grow by concatenation only.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"
# ruff: noqa: RUF005

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.segment_group import TABLE_COLUMNS, GroupLaunch, KernelFamily, TileShape
from spectrumkv_sglang.kernels.triton_encode import encode_8_bits
from spectrumkv_sglang.kernels.triton_encode_int4 import encode_int4
from spectrumkv_sglang.kernels.triton_pack_channels import pack_channels
from spectrumkv_sglang.kernels.triton_pack_lanes import pack_lanes
from spectrumkv_sglang.kernels.triton_pack_planes import pack_planes
from spectrumkv_sglang.kernels.triton_padding import pad_segment
from spectrumkv_sglang.kernels.triton_running_sum import add_words
from spectrumkv_sglang.kernels.triton_runs import ELEMENTS_PER_LANE as _ELEMENTS_PER_LANE
from spectrumkv_sglang.kernels.triton_runs import load_runs, sixteen_of
from spectrumkv_sglang.kernels.triton_tiles import GROUP_SCALARS, has_capability, launch_groups

SHAPES = {
    Precision.NATIVE: TileShape(4096, 4),
    Precision.INT8: TileShape(4096, 2, 64),
    Precision.FP8_E4M3: TileShape(4096, 2, 64),
    Precision.INT4: TileShape(4096, 2, 64),
}
"""Tiles that were fastest on an H200 (docs/results/gpu.md)."""

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
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    BFLOAT16: tl.constexpr,
    FLOAT16: tl.constexpr,
    HARDWARE: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    CHECKSUM: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WARPS: tl.constexpr,
):
    segment = program // tiles
    tile = program % tiles
    entry = table_ptr + segment * _COLUMNS
    pool_start = tl.load(entry)
    codes_start = tl.load(entry + 1) * 2
    params_start = tl.load(entry + 2) * 2
    segment_end = tl.load(entry + 3) * 2

    FULL: tl.constexpr = BLOCK_DIM == DIM
    WORDS: tl.constexpr = DIM * ITEMSIZE // 8 if PRECISION == 0 else (DIM // 16 if PRECISION == 3 else DIM // 8)

    # Pairs beyond the last repeat it when reading, so that loads need no mask.
    lane = tl.arange(0, BLOCK_PAIRS)
    pair = tile * BLOCK_PAIRS + lane
    inside = pair < pairs
    readable = tl.minimum(pair, pairs - 1)
    slot = tl.load(slots_ptr + readable // HEADS)
    start = pool_start + slot * slot_stride + (readable % HEADS).to(tl.int64) * head_stride
    first = codes_start + tile.to(tl.int64) * (BLOCK_PAIRS * WORDS)

    codes = ()
    offsets = ()
    valids = ()
    if PRECISION == 0:
        word = tl.arange(0, BLOCK_DIM * ITEMSIZE // 8)
        source = pool_ptr + ((start * 2)[:, None] + word[None, :])
        codes = (tl.load(source) if FULL else tl.load(source, mask=(word < WORDS)[None, :], other=0),)
        offsets = (lane[:, None] * WORDS + word[None, :],)
        valids = (inside[:, None] & (word < WORDS)[None, :],)
        tl.store(payload_ptr + (first + offsets[0]), codes[0], mask=valids[0])
    else:
        LANES: tl.constexpr = BLOCK_DIM // ELEMENTS_PER_LANE
        heads_ptr = pool_ptr.to(tl.pointer_type(tl.int32)) + start * 4
        runs = load_runs(heads_ptr, BLOCK_PAIRS, LANES, DIM, ITEMSIZE, PRECISION == 3)
        PACKED: tl.constexpr = HARDWARE and ITEMSIZE == 2
        if PRECISION == 3:
            even_codes, odd_codes, params = encode_int4(runs, BFLOAT16, FLOAT16, PACKED)
            codes = (even_codes, odd_codes)
            params_ptr = (payload_ptr + params_start).to(tl.pointer_type(tl.int32))
            tl.store(params_ptr + pair, params, mask=inside)
        else:
            codes, params = encode_8_bits(runs, PRECISION, BFLOAT16, FLOAT16, PACKED, HARDWARE_FP8)
            params_ptr = (payload_ptr + params_start).to(tl.pointer_type(tl.int16))
            tl.store(params_ptr + pair, params.to(tl.int16), mask=inside)
        # Two words are neighbours and leave together.
        both = tl.arange(0, 2 * LANES)
        lanes = tl.arange(0, LANES)
        for i in tl.static_range(len(codes) // 2):
            word = both if PRECISION == 3 else sixteen_of(both // 2, i, LANES, False) * 2 + both % 2
            target = payload_ptr + (first + (lane[:, None] * WORDS + word[None, :]))
            words = tl.reshape(tl.join(codes[2 * i], codes[2 * i + 1]), (BLOCK_PAIRS, 2 * LANES))
            tl.store(target, words, mask=inside[:, None] & (word < WORDS)[None, :])
            for odd in tl.static_range(2):
                word = lanes * 2 + odd if PRECISION == 3 else sixteen_of(lanes, i, LANES, False) * 2 + odd
                offsets = offsets + (lane[:, None] * WORDS + word[None, :],)
                valids = valids + (inside[:, None] & (word < WORDS)[None, :],)
    if CHECKSUM:
        add_words(sums_ptr, codes, offsets, valids, first, BLOCK_PAIRS * WORDS, WARPS)

    if tile == tiles - 1:
        codes_end = (codes_start + pairs.to(tl.int64) * WORDS) * 4
        if PRECISION == 0:
            pad_segment(payload_ptr, sums_ptr, codes_end, codes_end, codes_end, segment_end * 4, CHECKSUM)
        else:
            params_end = params_start * 4 + pairs * (2 if PRECISION == 3 else 1)
            pad_segment(payload_ptr, sums_ptr, codes_end, params_end, params_start * 4, segment_end * 4, CHECKSUM)


@triton.jit(
    do_not_specialize=[*GROUP_SCALARS, "slot_stride", "head_stride"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def _pack_groups(
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
                HEADS,
                DIM,
                ITEMSIZE,
                BFLOAT16,
                FLOAT16,
                HARDWARE,
                HARDWARE_FP8,
                CHECKSUM,
                BLOCK_PAIRS[group],
                BLOCK_DIM,
                WARPS,
            )
        program -= programs
        lines_ptr += segments[group] * _COLUMNS


def pack_groups(
    launch: GroupLaunch,
    pool: torch.Tensor,
    payload: torch.Tensor,
    block_sums: torch.Tensor,
    checksum: bool = True,
    shapes: Mapping[Precision, TileShape] = SHAPES,
) -> None:
    """Encode the rows of every segment of some groups on the current stream, padding included.

    Args:
        launch: what to pack.
        pool: first key buffer, which the table's addresses count from.
        payload: the payload as int64 words, at a 16-byte boundary; on the device or in pinned host memory.
        block_sums: int64, at least one more than the payload's checksum blocks; scrambled words are added.
        checksum: whether to add them.
        shapes: how to cut the work of `KernelFamily.HEADS`.
    """
    device = block_sums.device
    family = launch.groups[0].family
    if family is KernelFamily.LANES:
        pack_lanes(launch, pool, payload, block_sums, checksum)
        return
    if family is not KernelFamily.HEADS:
        pack = pack_channels if family is KernelFamily.CHANNELS else pack_planes
        for one in launch.apart():
            pack(one, pool, payload, block_sums, checksum)
        return
    constants = {
        "HARDWARE": has_capability(device, 8, 0),
        "HARDWARE_FP8": has_capability(device, 8, 9),
        "CHECKSUM": checksum,
    }
    pointers = (pool.view(torch.int64), payload, block_sums, launch.slots, launch.table)
    launch_groups(_pack_groups, launch.groups, shapes, pointers, device, constants)
