"""Gather rows of the pool by slot id and quantise them with a scale and a zero for each channel of a block.

A program takes some channels of one head of the rows of one block and holds them in registers, so that memory is read
once: each lane sixteen neighbouring elements of some rows, two elements or one to an int32. Extremes are taken along
the rows that a lane holds, then over the lanes; sixteen lanes share a channel and each has sixteen, so each of them
works out the parameters of one. The torch reference is `AffineChannelQuantiser.quantise`; results are equal bit for
bit. A block with a NaN, an infinity, a zero beyond float16 or a scale outside its normal range is read again and
encoded a slower way.
"""

# Triton reads the annotations of kernels, so only what it knows can stand there.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from spectrumkv_sglang.kernels.precision import CHANNEL_BLOCK_ROWS, Precision
from spectrumkv_sglang.kernels.segment_group import TABLE_COLUMNS, GroupLaunch, TileShape
from spectrumkv_sglang.kernels.triton_affine import code_bits, full_range
from spectrumkv_sglang.kernels.triton_arithmetic import (
    divisor_of,
    finite_or_zero,
    is_finite,
    negated_reciprocal,
)
from spectrumkv_sglang.kernels.triton_channel_codes import words_of_codes
from spectrumkv_sglang.kernels.triton_encode_int4 import is_regular
from spectrumkv_sglang.kernels.triton_padding import pad_segment
from spectrumkv_sglang.kernels.triton_running_sum import add_distant_words
from spectrumkv_sglang.kernels.triton_runs import elements_of, packed
from spectrumkv_sglang.kernels.triton_tiles import code_constants, group_constants, has_capability
from spectrumkv_sglang.kernels.triton_tiles import launch as launch_kernel

_COLUMNS = tl.constexpr(TABLE_COLUMNS)
_ROWS_AT_ONCE = 16
"""Rows of an irregular block that are read at a time: one for each lane that shares a channel."""
SHAPES = {
    Precision.INT3_CHANNEL: TileShape(CHANNEL_BLOCK_ROWS * 64, 2, 128),
    Precision.INT4_CHANNEL: TileShape(CHANNEL_BLOCK_ROWS * 64, 2, 128),
    Precision.INT5_CHANNEL: TileShape(CHANNEL_BLOCK_ROWS * 64, 2, 128),
    Precision.INT6_CHANNEL: TileShape(CHANNEL_BLOCK_ROWS * 64, 2, 128),
    Precision.INT8_CHANNEL: TileShape(CHANNEL_BLOCK_ROWS * 64, 2, 128),
}
"""Channels of a block that a program takes, times its rows: whole words of the narrowest plane, and a warp for each 32,
so that it has one channel for each thread. With 128 registers a multiprocessor holds sixteen warps. 64 channels and two
warps beat 32 and one by 11 (INT8) and 22 (INT4) points of the floor on an H200, four warps lose as much
(docs/results/gpu.md). Pools of four bytes an element take twice the warps and what registers they like."""


@triton.jit
def _extremes_bfloat16(low, high, other_low, other_high):
    return packed(low, other_low, False, True), packed(high, other_high, True, True)


@triton.jit
def _extremes_float16(low, high, other_low, other_high):
    return packed(low, other_low, False, False), packed(high, other_high, True, False)


@triton.jit
def _load_rows(
    pool_ptr,
    slots_ptr,
    row,
    count,
    start,
    slot_stride,
    part,
    LANES: tl.constexpr,
    DIM: tl.constexpr,
    ITEMSIZE: tl.constexpr,
):
    """Rows ``row`` of a block of ``count``, int32 [rows, LANES, 4 * ITEMSIZE].

    Rows beyond the last repeat it, which changes no extreme; elements beyond a head repeat its last sixteen.
    """
    slot = tl.load(slots_ptr + tl.minimum(row, count - 1))
    heads = pool_ptr.to(tl.pointer_type(tl.int32)) + (start + slot * slot_stride) * 4
    unit = tl.arange(0, 4 * LANES)
    sixteen = part * LANES + unit // 4
    if DIM % (16 * LANES) != 0:
        sixteen = tl.minimum(sixteen, DIM // 16 - 1)
    source = heads[:, None] + (sixteen * (4 * ITEMSIZE) + unit % 4)[None, :]
    ROWS: tl.constexpr = row.shape[0]
    first = tl.reshape(tl.load(source), (ROWS, LANES, 4))
    second = tl.reshape(tl.load(source + 4), (ROWS, LANES, 4))
    both = tl.join(first, second)
    if ITEMSIZE == 2:
        return tl.reshape(tl.permute(both, (0, 1, 3, 2)), (ROWS, LANES, 8))
    else:
        third = tl.reshape(tl.load(source + 8), (ROWS, LANES, 4))
        fourth = tl.reshape(tl.load(source + 12), (ROWS, LANES, 4))
        runs = tl.join(both, tl.join(third, fourth))
        return tl.reshape(tl.permute(runs, (0, 1, 4, 3, 2)), (ROWS, LANES, 16))


@triton.jit
def _even_and_odd(block, ITEMSIZE: tl.constexpr, BFLOAT16: tl.constexpr, FLOAT16: tl.constexpr):
    """float32 [..., lanes, 8] each, of int32 [rows, lanes, 4 * ITEMSIZE]."""
    if ITEMSIZE == 2:
        return elements_of(block, BFLOAT16, FLOAT16)
    else:
        return tl.split(tl.reshape(block.to(tl.float32, bitcast=True), (block.shape[0], block.shape[1], 8, 2)))


@triton.jit
def _of_own_channel(even, odd):
    """float32 [16, lanes]: of even and odd channels [lanes, 8] one for each of the lanes that share them."""
    own = tl.arange(0, 16)[:, None, None]
    pair = tl.arange(0, 8)[None, None, :]
    both = tl.where(own % 2 == 0, even[None, :, :], odd[None, :, :])
    return tl.sum(tl.where(own // 2 == pair, both, 0.0), axis=2)


@triton.jit
def _packed_of_own_channel(extremes, BFLOAT16: tl.constexpr):
    """`_of_own_channel` of int32 [lanes, 8], two channels each."""
    own = tl.arange(0, 16)[:, None, None]
    pair = tl.arange(0, 8)[None, None, :]
    both = tl.sum(tl.where(own // 2 == pair, extremes[None, :, :], 0), axis=2)
    odd = (tl.arange(0, 16) % 2 == 1)[:, None]
    if BFLOAT16:
        return tl.where(odd, both & -65536, both << 16).to(tl.float32, bitcast=True)
    else:
        return tl.where(odd, both >> 16, both).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _to_all_lanes(own):
    """Even and odd [1, lanes, 8] of float32 [16, lanes]."""
    LANES: tl.constexpr = own.shape[1]
    # The compiler would rather work out all sixteen in every lane than move them; a sum of floats it does not repeat.
    own = tl.sum(tl.reshape(own, (16, LANES, 1)), axis=2)
    return tl.split(tl.reshape(tl.trans(own), (1, LANES, 8, 2)))


@triton.jit
def _encode(
    block,
    origin,
    divisor,
    reciprocal,
    ITEMSIZE: tl.constexpr,
    BFLOAT16: tl.constexpr,
    FLOAT16: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    CLEAN: tl.constexpr,
):
    """`words_of_codes` of int32 [rows, lanes, 4 * ITEMSIZE] with parameters float32 [16, lanes]."""
    LAST: tl.constexpr = (1 << (LOW + HIGH)) - 1
    even, odd = _even_and_odd(block, ITEMSIZE, BFLOAT16, FLOAT16)
    even_origin, odd_origin = _to_all_lanes(origin)
    even_reciprocal, odd_reciprocal = _to_all_lanes(reciprocal)
    even_divisor, odd_divisor = 1.0, 1.0
    if CLEAN:
        even_divisor, odd_divisor = _to_all_lanes(divisor)
    return words_of_codes(
        code_bits(even, even_origin, even_divisor, even_reciprocal, LAST, CLEAN),
        code_bits(odd, odd_origin, odd_divisor, odd_reciprocal, LAST, CLEAN),
        LOW,
        HIGH,
    )


@triton.jit
def _store_plane(
    payload_ptr,
    sums_ptr,
    words,
    row,
    count,
    first,
    word,
    HEAD_WORDS: tl.constexpr,
    LAST_WORD: tl.constexpr,
    HEADS: tl.constexpr,
    CHECKSUM: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Store words of a plane of rows ``row`` of a block of ``count`` whose first word is ``first``, and sum them up;
    ``word`` is where they begin in a head, LAST_WORD where the plane ends."""
    column = word + tl.arange(0, words.shape[1])
    offset = row[:, None] * (HEADS * HEAD_WORDS) + column[None, :]
    valid = (row < count)[:, None] & (column < LAST_WORD)[None, :]
    tl.store(payload_ptr + (first + offset), words, mask=valid)
    if CHECKSUM:
        add_distant_words(sums_ptr, words, offset, valid, first, ((count - 1) * HEADS + 1) * HEAD_WORDS, WARPS)


@triton.jit
def _store_words(
    payload_ptr,
    sums_ptr,
    low,
    high,
    row,
    count,
    first,
    part,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    LANES: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    CHECKSUM: tl.constexpr,
    WARPS: tl.constexpr,
):
    HEAD_WORDS: tl.constexpr = DIM * (LOW + HIGH) // 64
    SPLIT: tl.constexpr = DIM * LOW // 64
    _store_plane(
        payload_ptr,
        sums_ptr,
        low,
        row,
        count,
        first,
        part * (LANES * LOW // 4),
        HEAD_WORDS,
        SPLIT,
        HEADS,
        CHECKSUM,
        WARPS,
    )
    if HIGH > 0:
        _store_plane(
            payload_ptr,
            sums_ptr,
            high,
            row,
            count,
            first,
            SPLIT + part * (LANES * HIGH // 4),
            HEAD_WORDS,
            HEAD_WORDS,
            HEADS,
            CHECKSUM,
            WARPS,
        )


@triton.jit
def _store_parameters(params_ptr, scale, zero, part, DIM: tl.constexpr):
    """Scales of all channels, then their zeros, float16 [16, lanes]; ``params_ptr`` points at int16."""
    channel = (part * scale.shape[1] + tl.arange(0, scale.shape[1]))[None, :] * 16 + tl.arange(0, 16)[:, None]
    tl.store(params_ptr + channel, scale.to(tl.int16, bitcast=True), mask=channel < DIM)
    tl.store(params_ptr + (DIM + channel), zero.to(tl.int16, bitcast=True), mask=channel < DIM)


@triton.jit
def _pack_irregular(
    pool_ptr,
    payload_ptr,
    sums_ptr,
    slots_ptr,
    params_ptr,
    count,
    start,
    first,
    slot_stride,
    part,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    BFLOAT16: tl.constexpr,
    FLOAT16: tl.constexpr,
    CHECKSUM: tl.constexpr,
    WARPS: tl.constexpr,
):
    """A block that needs cleaning or clamping, read again a few rows at a time: in registers it would take so many of
    them that every block had to wait for them."""
    LAST: tl.constexpr = (1 << (LOW + HIGH)) - 1
    row = tl.arange(0, ROWS_AT_ONCE)
    even_low = tl.full((ROWS_AT_ONCE, LANES, 8), float("inf"), dtype=tl.float32)
    even_high, odd_low, odd_high = -even_low, even_low, -even_low
    for done in range(0, BLOCK_ROWS, ROWS_AT_ONCE):
        chunk = _load_rows(pool_ptr, slots_ptr, done + row, count, start, slot_stride, part, LANES, DIM, ITEMSIZE)
        even, odd = _even_and_odd(chunk, ITEMSIZE, BFLOAT16, FLOAT16)
        even, odd = finite_or_zero(even), finite_or_zero(odd)
        even_low, even_high = tl.minimum(even_low, even), tl.maximum(even_high, even)
        odd_low, odd_high = tl.minimum(odd_low, odd), tl.maximum(odd_high, odd)
    low = _of_own_channel(tl.min(even_low, axis=0), tl.min(odd_low, axis=0))
    high = _of_own_channel(tl.max(even_high, axis=0), tl.max(odd_high, axis=0))
    scale, zero = full_range(low, high, LAST)
    _store_parameters(params_ptr, scale, zero, part, DIM)
    divisor = divisor_of(scale)
    for done in range(0, BLOCK_ROWS, ROWS_AT_ONCE):
        chunk = _load_rows(pool_ptr, slots_ptr, done + row, count, start, slot_stride, part, LANES, DIM, ITEMSIZE)
        first_plane, second_plane = _encode(
            chunk,
            zero.to(tl.float32),
            divisor,
            negated_reciprocal(divisor),
            ITEMSIZE,
            BFLOAT16,
            FLOAT16,
            LOW,
            HIGH,
            True,
        )
        _store_words(
            payload_ptr,
            sums_ptr,
            first_plane,
            second_plane,
            done + row,
            count,
            first,
            part,
            LOW,
            HIGH,
            LANES,
            DIM,
            HEADS,
            CHECKSUM,
            WARPS,
        )


@triton.jit(
    do_not_specialize=["rows", "first_row", "slot_stride", "head_stride"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def _pack_channels(
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
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    BFLOAT16: tl.constexpr,
    FLOAT16: tl.constexpr,
    PACKED: tl.constexpr,
    CHECKSUM: tl.constexpr,
    WARPS: tl.constexpr,
):
    # Slices of a head and heads of the same rows are read at the same time: they are neighbours in the pool.
    PARTS: tl.constexpr = (DIM + 16 * LANES - 1) // (16 * LANES)
    part = tl.program_id(0) % PARTS
    program = tl.program_id(0) // PARTS
    head = program % HEADS
    blocks = (rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    number = program // HEADS % blocks
    entry = table_ptr + program // HEADS // blocks * _COLUMNS
    pool_start = tl.load(entry)
    codes_start = tl.load(entry + 1) * 2
    params_start = tl.load(entry + 2) * 2
    segment_end = tl.load(entry + 3) * 2

    WORDS: tl.constexpr = DIM * (LOW + HIGH) // 64
    LAST: tl.constexpr = (1 << (LOW + HIGH)) - 1
    count = tl.minimum(rows - number * BLOCK_ROWS, BLOCK_ROWS)
    slots_ptr += first_row + number * BLOCK_ROWS
    start = pool_start + head * head_stride.to(tl.int64)
    first = codes_start + (number.to(tl.int64) * (BLOCK_ROWS * HEADS) + head) * WORDS
    params_ptr = (payload_ptr + params_start).to(tl.pointer_type(tl.int16)) + (number * HEADS + head) * (2 * DIM)

    row = tl.arange(0, BLOCK_ROWS)
    block = _load_rows(pool_ptr, slots_ptr, row, count, start, slot_stride, part, LANES, DIM, ITEMSIZE)
    irregular = 0
    if PACKED:
        low, high = tl.reduce((block, block), 0, _extremes_bfloat16 if BFLOAT16 else _extremes_float16)
        low, high = _packed_of_own_channel(low, BFLOAT16), _packed_of_own_channel(high, BFLOAT16)
    else:
        even, odd = _even_and_odd(block, ITEMSIZE, BFLOAT16, FLOAT16)
        irregular = tl.max(((is_finite(even) & is_finite(odd)) == 0).to(tl.int32))
        even, odd = finite_or_zero(even), finite_or_zero(odd)
        low = _of_own_channel(tl.min(even, axis=0), tl.min(odd, axis=0))
        high = _of_own_channel(tl.max(even, axis=0), tl.max(odd, axis=0))
    scale, zero = full_range(low, high, LAST)
    regular = is_regular(low, high, scale, zero)
    if tl.maximum(irregular, tl.max((regular == 0).to(tl.int32))) > 0:
        _pack_irregular(
            pool_ptr,
            payload_ptr,
            sums_ptr,
            slots_ptr,
            params_ptr,
            count,
            start,
            first,
            slot_stride,
            part,
            LOW,
            HIGH,
            HEADS,
            DIM,
            LANES,
            BLOCK_ROWS,
            ROWS_AT_ONCE,
            ITEMSIZE,
            BFLOAT16,
            FLOAT16,
            CHECKSUM,
            WARPS,
        )
    else:
        _store_parameters(params_ptr, scale, zero, part, DIM)
        divisor = divisor_of(scale)
        first_plane, second_plane = _encode(
            block,
            zero.to(tl.float32),
            divisor,
            negated_reciprocal(divisor),
            ITEMSIZE,
            BFLOAT16,
            FLOAT16,
            LOW,
            HIGH,
            False,
        )
        _store_words(
            payload_ptr,
            sums_ptr,
            first_plane,
            second_plane,
            row,
            count,
            first,
            part,
            LOW,
            HIGH,
            LANES,
            DIM,
            HEADS,
            CHECKSUM,
            WARPS,
        )
    if (number == blocks - 1) & (head == 0) & (part == 0):
        codes_end = (codes_start + rows.to(tl.int64) * (HEADS * WORDS)) * 4
        params_end = params_start * 4 + blocks.to(tl.int64) * (HEADS * DIM * 2)
        pad_segment(payload_ptr, sums_ptr, codes_end, params_end, params_start * 4, segment_end * 4, CHECKSUM)


def pack_channels(
    launch: GroupLaunch,
    pool: torch.Tensor,
    payload: torch.Tensor,
    block_sums: torch.Tensor,
    checksum: bool = True,
    shapes: Mapping[Precision, TileShape] = SHAPES,
) -> None:
    """Encode the rows of every segment of a group on the current stream, padding included.

    Args:
        launch: the group to pack, of `KernelFamily.CHANNELS`.
        pool: first key buffer, which the table's addresses count from.
        payload: the payload as int64 words, at a 16-byte boundary; on the device or in pinned host memory.
        block_sums: int64, one for each of the payload's checksum blocks; scrambled words are added.
        checksum: whether to add them.
        shapes: how to cut the work.
    """
    (group,) = launch.groups
    device = block_sums.device
    constants = group_constants(group) | code_constants(group)
    del constants["BLOCK_DIM"]
    shape = shapes[group.precision]
    if group.dtype.itemsize > 2:
        shape = TileShape(shape.elements, 2 * shape.warps)
    columns = shape.elements // CHANNEL_BLOCK_ROWS
    blocks = triton.cdiv(group.rows, CHANNEL_BLOCK_ROWS)
    programs = group.segments * blocks * group.heads * triton.cdiv(group.dim, columns)
    if not programs:
        return
    constants |= {
        "LANES": columns // 16,
        "BLOCK_ROWS": CHANNEL_BLOCK_ROWS,
        # The interpreter takes its time for each operation, whatever it works on.
        "ROWS_AT_ONCE": _ROWS_AT_ONCE if device.type == "cuda" else CHANNEL_BLOCK_ROWS,
        "PACKED": group.dtype.itemsize == 2 and has_capability(device, 8, 0),
        "CHECKSUM": checksum,
        "WARPS": shape.warps,
    }
    pointers = (pool.view(torch.int64), payload, block_sums, launch.slots, launch.table)
    scalars = (group.rows, group.first_row, group.slot_stride, group.head_stride)
    launch_kernel(_pack_channels, programs, device, shape, (*pointers, *scalars), constants)
