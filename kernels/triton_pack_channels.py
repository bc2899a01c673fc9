"""Gather rows of the pool by slot id and quantise them to INT4 with a scale and a zero for each channel of a block.

A program takes one head of the rows of one block and holds them in registers, two elements or one to an int32, so that
the extremes of a channel are found within a few threads and memory is read once. The torch reference is
`AffineChannelQuantiser.quantise`; results are equal bit for bit. A block with a NaN, an infinity, a zero beyond float16
or a scale outside its normal range is read again and encoded a slower way.
"""

# Triton reads the annotations of kernels, so only what it knows can stand there.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spectrumkv_sglang.kernels.precision import CHANNEL_BLOCK_ROWS
from spectrumkv_sglang.kernels.segment_group import TABLE_COLUMNS, GroupLaunch, TileShape
from spectrumkv_sglang.kernels.triton_arithmetic import (
    divisor_of,
    finite_or_zero,
    float16_bits,
    is_finite,
    negated_reciprocal,
)
from spectrumkv_sglang.kernels.triton_encode_int4 import MINUS_EIGHT_ROUNDERS, int4_bits, int4_parameters, is_regular
from spectrumkv_sglang.kernels.triton_padding import pad_segment
from spectrumkv_sglang.kernels.triton_running_sum import add_distant_words
from spectrumkv_sglang.kernels.triton_runs import packed
from spectrumkv_sglang.kernels.triton_tiles import group_constants, has_capability
from spectrumkv_sglang.kernels.triton_tiles import launch as launch_kernel

_COLUMNS = tl.constexpr(TABLE_COLUMNS)
_BYTES_PER_WARP = 8192
"""Bytes of a block that a warp holds: 64 registers of each thread."""
_ROWS_AT_ONCE = tl.constexpr(32)
"""Rows of an irregular block that are read at a time."""


@triton.jit
def _least_bfloat16(a, b):
    return packed(a, b, False, True)


@triton.jit
def _largest_bfloat16(a, b):
    return packed(a, b, True, True)


@triton.jit
def _least_float16(a, b):
    return packed(a, b, False, False)


@triton.jit
def _largest_float16(a, b):
    return packed(a, b, True, False)


@triton.jit
def _even_and_odd(block, BFLOAT16: tl.constexpr, FLOAT16: tl.constexpr):
    """Elements of int32 [..., columns], float32 [..., columns], or half as many columns of a float32 pool."""
    if BFLOAT16:
        return (block << 16).to(tl.float32, bitcast=True), (block & -65536).to(tl.float32, bitcast=True)
    elif FLOAT16:
        even, odd = block.to(tl.int16), (block >> 16).to(tl.int16)
        return even.to(tl.float16, bitcast=True).to(tl.float32), odd.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        pairs = tl.reshape(block.to(tl.float32, bitcast=True), (block.shape[0], block.shape[1] // 2, 2))
        return tl.split(pairs)


@triton.jit
def _finite_extremes(x):
    """Least and largest element of each channel [columns], NaN and infinities counted as 0."""
    x = finite_or_zero(x)
    return tl.min(x, axis=0), tl.max(x, axis=0)


@triton.jit
def _packed_extremes(block, BFLOAT16: tl.constexpr):
    """Least and largest elements of each two channels, int32 [columns], NaN kept."""
    if BFLOAT16:
        return tl.reduce(block, 0, _least_bfloat16), tl.reduce(block, 0, _largest_bfloat16)
    else:
        return tl.reduce(block, 0, _least_float16), tl.reduce(block, 0, _largest_float16)


@triton.jit
def _code_bits(x, scale, zero, CLEAN: tl.constexpr):
    divisor = divisor_of(scale)
    reciprocal = negated_reciprocal(divisor)[None, :]
    return int4_bits(x, zero.to(tl.float32)[None, :], divisor[None, :], reciprocal, CLEAN)


@triton.jit
def _half_words(
    block,
    even_scale,
    even_zero,
    odd_scale,
    odd_zero,
    BFLOAT16: tl.constexpr,
    FLOAT16: tl.constexpr,
    CLEAN: tl.constexpr,
):
    """Eight codes to an int32, the first in the lowest bits: [rows, elements / 8]."""
    even, odd = _even_and_odd(block, BFLOAT16, FLOAT16)
    codes = _code_bits(even, even_scale, even_zero, CLEAN) + (_code_bits(odd, odd_scale, odd_zero, CLEAN) << 4)
    codes = tl.reshape(codes, (codes.shape[0], codes.shape[1] // 4, 4))
    return tl.sum(codes << (tl.arange(0, 4) * 8)[None, None, :], axis=2) + MINUS_EIGHT_ROUNDERS


@triton.jit
def _load_rows(
    pool_ptr,
    slots_ptr,
    lane,
    count,
    start,
    slot_stride,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ITEMSIZE: tl.constexpr,
):
    """Rows ``lane`` of a block of ``count``, int32 [lanes, columns]; those beyond the last repeat it, which changes no
    extreme."""
    slot = tl.load(slots_ptr + tl.minimum(lane, count - 1))
    column = tl.arange(0, BLOCK_DIM * ITEMSIZE // 4)
    source = pool_ptr.to(tl.pointer_type(tl.int32)) + (((start + slot * slot_stride) * 4)[:, None] + column[None, :])
    if BLOCK_DIM == DIM:
        return tl.load(source)
    else:
        return tl.load(source, mask=(column < DIM * ITEMSIZE // 4)[None, :], other=0)


@triton.jit
def _store_codes(
    payload_ptr,
    sums_ptr,
    halves,
    lane,
    count,
    first,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    CHECKSUM: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Store the codes of rows ``lane`` of a block of ``count`` whose first word is ``first``, and sum them up."""
    WORDS: tl.constexpr = DIM // 16
    low, high = tl.split(tl.reshape(halves, (halves.shape[0], BLOCK_DIM // 16, 2)))
    words = low.to(tl.uint32, bitcast=True).to(tl.int64) | (high.to(tl.int64) << 32)
    word = tl.arange(0, BLOCK_DIM // 16)
    offset = lane[:, None] * (HEADS * WORDS) + word[None, :]
    valid = (lane < count)[:, None] & (word < WORDS)[None, :]
    tl.store(payload_ptr + (first + offset), words, mask=valid)
    if CHECKSUM:
        add_distant_words(sums_ptr, words, offset, valid, first, ((count - 1) * HEADS + 1) * WORDS, WARPS)


@triton.jit
def _store_parameters(params_ptr, even_scale, even_zero, odd_scale, odd_zero, DIM: tl.constexpr):
    """Scales of all channels, then their zeros; ``params_ptr`` points at int32."""
    channels = tl.arange(0, even_scale.shape[0])
    scales = float16_bits(even_scale) | (float16_bits(odd_scale) << 16)
    zeros = float16_bits(even_zero) | (float16_bits(odd_zero) << 16)
    tl.store(params_ptr + channels, scales, mask=channels < DIM // 2)
    tl.store(params_ptr + (DIM // 2 + channels), zeros, mask=channels < DIM // 2)


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
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    BFLOAT16: tl.constexpr,
    FLOAT16: tl.constexpr,
    CHECKSUM: tl.constexpr,
    WARPS: tl.constexpr,
):
    """A block that needs cleaning or clamping, read again a few rows at a time: in registers it would take so many of
    them that every block had to wait for them."""
    lane = tl.arange(0, _ROWS_AT_ONCE)
    even_low = tl.full((_ROWS_AT_ONCE, BLOCK_DIM // 2), float("inf"), dtype=tl.float32)
    even_high, odd_low, odd_high = -even_low, even_low, -even_low
    for row in range(0, BLOCK_ROWS, _ROWS_AT_ONCE):
        part = _load_rows(pool_ptr, slots_ptr, row + lane, count, start, slot_stride, DIM, BLOCK_DIM, ITEMSIZE)
        even, odd = _even_and_odd(part, BFLOAT16, FLOAT16)
        even, odd = finite_or_zero(even), finite_or_zero(odd)
        even_low, even_high = tl.minimum(even_low, even), tl.maximum(even_high, even)
        odd_low, odd_high = tl.minimum(odd_low, odd), tl.maximum(odd_high, odd)
    even_scale, even_zero = int4_parameters(tl.min(even_low, axis=0), tl.max(even_high, axis=0))
    odd_scale, odd_zero = int4_parameters(tl.min(odd_low, axis=0), tl.max(odd_high, axis=0))
    _store_parameters(params_ptr, even_scale, even_zero, odd_scale, odd_zero, DIM)
    for row in range(0, BLOCK_ROWS, _ROWS_AT_ONCE):
        part = _load_rows(pool_ptr, slots_ptr, row + lane, count, start, slot_stride, DIM, BLOCK_DIM, ITEMSIZE)
        halves = _half_words(part, even_scale, even_zero, odd_scale, odd_zero, BFLOAT16, FLOAT16, True)
        _store_codes(payload_ptr, sums_ptr, halves, row + lane, count, first, HEADS, DIM, BLOCK_DIM, CHECKSUM, WARPS)


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
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    BFLOAT16: tl.constexpr,
    FLOAT16: tl.constexpr,
    PACKED: tl.constexpr,
    CHECKSUM: tl.constexpr,
    WARPS: tl.constexpr,
):
    # Heads of the same rows are read at the same time: they are neighbours in the pool.
    program = tl.program_id(0)
    head = program % HEADS
    blocks = (rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    number = program // HEADS % blocks
    entry = table_ptr + program // HEADS // blocks * _COLUMNS
    pool_start = tl.load(entry)
    codes_start = tl.load(entry + 1) * 2
    params_start = tl.load(entry + 2) * 2
    segment_end = tl.load(entry + 3) * 2

    WORDS: tl.constexpr = DIM // 16
    count = tl.minimum(rows - number * BLOCK_ROWS, BLOCK_ROWS)
    slots_ptr += first_row + number * BLOCK_ROWS
    start = pool_start + head * head_stride.to(tl.int64)
    first = codes_start + (number.to(tl.int64) * (BLOCK_ROWS * HEADS) + head) * WORDS
    params_ptr = (payload_ptr + params_start).to(tl.pointer_type(tl.int32)) + (number * HEADS + head) * DIM

    lane = tl.arange(0, BLOCK_ROWS)
    block = _load_rows(pool_ptr, slots_ptr, lane, count, start, slot_stride, DIM, BLOCK_DIM, ITEMSIZE)
    if PACKED:
        low, high = _packed_extremes(block, BFLOAT16)
        even_low, odd_low = _even_and_odd(low, BFLOAT16, FLOAT16)
        even_high, odd_high = _even_and_odd(high, BFLOAT16, FLOAT16)
        irregular = 0
    else:
        even, odd = _even_and_odd(block, BFLOAT16, FLOAT16)
        even_low, even_high = _finite_extremes(even)
        odd_low, odd_high = _finite_extremes(odd)
        irregular = 1 - tl.min(tl.min((is_finite(even) & is_finite(odd)).to(tl.int32), axis=0), axis=0)
    even_scale, even_zero = int4_parameters(even_low, even_high)
    odd_scale, odd_zero = int4_parameters(odd_low, odd_high)
    regular = is_regular(even_low, even_high, even_scale, even_zero)
    regular &= is_regular(odd_low, odd_high, odd_scale, odd_zero)
    irregular |= tl.max((regular == 0).to(tl.int32), axis=0)
    if irregular > 0:
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
            HEADS,
            DIM,
            BLOCK_DIM,
            BLOCK_ROWS,
            ITEMSIZE,
            BFLOAT16,
            FLOAT16,
            CHECKSUM,
            WARPS,
        )
    else:
        _store_parameters(params_ptr, even_scale, even_zero, odd_scale, odd_zero, DIM)
        halves = _half_words(block, even_scale, even_zero, odd_scale, odd_zero, BFLOAT16, FLOAT16, False)
        _store_codes(payload_ptr, sums_ptr, halves, lane, count, first, HEADS, DIM, BLOCK_DIM, CHECKSUM, WARPS)
    if (number == blocks - 1) & (head == 0):
        codes_end = (codes_start + rows.to(tl.int64) * (HEADS * WORDS)) * 4
        params_end = params_start * 4 + blocks.to(tl.int64) * (HEADS * DIM * 2)
        pad_segment(payload_ptr, sums_ptr, codes_end, params_end, params_start * 4, segment_end * 4, CHECKSUM)


def pack_channels(
    launch: GroupLaunch, pool: torch.Tensor, payload: torch.Tensor, block_sums: torch.Tensor, checksum: bool = True
) -> None:
    """Encode the rows of every segment of a group on the current stream, padding included.

    Args:
        launch: the group to pack, of `Precision.INT4_CHANNEL`.
        pool: first key buffer, which the table's addresses count from.
        payload: the payload as int64 words, at a 16-byte boundary; on the device or in pinned host memory.
        block_sums: int64, one for each of the payload's checksum blocks; scrambled words are added.
        checksum: whether to add them.
    """
    (group,) = launch.groups
    device = block_sums.device
    programs = group.segments * triton.cdiv(group.rows, CHANNEL_BLOCK_ROWS) * group.heads
    if not programs:
        return
    of_group = group_constants(group)
    block_dim = of_group["BLOCK_DIM"]
    warps = max(1, CHANNEL_BLOCK_ROWS * block_dim * group.dtype.itemsize // _BYTES_PER_WARP)
    pointers = (pool.view(torch.int64), payload, block_sums, launch.slots, launch.table)
    constants = {
        **of_group,
        "BLOCK_ROWS": CHANNEL_BLOCK_ROWS,
        "PACKED": group.dtype.itemsize == 2 and has_capability(device, 8, 0),
        "CHECKSUM": checksum,
        "WARPS": warps,
    }
    scalars = (group.rows, group.first_row, group.slot_stride, group.head_stride)
    shape = TileShape(CHANNEL_BLOCK_ROWS * block_dim, warps)
    launch_kernel(_pack_channels, programs, device, shape, (*pointers, *scalars), constants)
