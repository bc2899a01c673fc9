"""Gather rows of a pool buffer by slot id and quantise them into a payload, one launch per segment.

The torch references are the quantisers' `quantise` methods; results are equal bit for bit, NaN payloads included.
"""

# Triton reads the annotations of kernels, so only what it knows can stand there.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.triton_tiles import (
    as_kernel_pool,
    check_rows,
    divisor_of,
    is_finite,
    launch,
    load_float32,
    pool_addresses,
    round_to_even,
)


@triton.jit
def _pack_native(
    pool_ptr,
    slots_ptr,
    codes_ptr,
    params_ptr,
    pairs,
    heads,
    head_lo,
    dim,
    slot_stride,
    head_stride,
    BFLOAT16: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    pair = tl.program_id(0) * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    element = tl.arange(0, BLOCK_DIM)
    mask = (pair < pairs)[:, None] & (element < dim)[None, :]
    source = pool_addresses(slots_ptr, pair, element, pairs, heads, head_lo, slot_stride, head_stride)
    values = tl.load(pool_ptr + source, mask=mask, other=0)
    tl.store(codes_ptr + pair.to(tl.int64)[:, None] * dim + element[None, :], values, mask=mask)


@triton.jit
def _pack_int8(
    pool_ptr,
    slots_ptr,
    codes_ptr,
    params_ptr,
    pairs,
    heads,
    head_lo,
    dim,
    slot_stride,
    head_stride,
    BFLOAT16: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    pair = tl.program_id(0) * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    element = tl.arange(0, BLOCK_DIM)
    mask = (pair < pairs)[:, None] & (element < dim)[None, :]
    source = pool_addresses(slots_ptr, pair, element, pairs, heads, head_lo, slot_stride, head_stride)
    values = load_float32(pool_ptr + source, mask, BFLOAT16)
    peak = tl.max(tl.where(is_finite(values), tl.abs(values), 0.0), axis=1)
    scale = tl.minimum(tl.div_rn(peak, 127.0), 65504.0).to(tl.float16)
    scaled = tl.div_rn(tl.where(values == values, values, 0.0), divisor_of(scale)[:, None])
    codes = round_to_even(tl.minimum(tl.maximum(scaled, -127.0), 127.0)).to(tl.int32)
    tl.store(codes_ptr + pair.to(tl.int64)[:, None] * dim + element[None, :], (codes & 0xFF).to(tl.uint8), mask=mask)
    tl.store(params_ptr + pair, scale, mask=pair < pairs)


@triton.jit
def _pack_fp8_e4m3(
    pool_ptr,
    slots_ptr,
    codes_ptr,
    params_ptr,
    pairs,
    heads,
    head_lo,
    dim,
    slot_stride,
    head_stride,
    BFLOAT16: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    pair = tl.program_id(0) * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    element = tl.arange(0, BLOCK_DIM)
    mask = (pair < pairs)[:, None] & (element < dim)[None, :]
    source = pool_addresses(slots_ptr, pair, element, pairs, heads, head_lo, slot_stride, head_stride)
    values = load_float32(pool_ptr + source, mask, BFLOAT16)
    peak = tl.max(tl.where(is_finite(values), tl.abs(values), 0.0), axis=1)
    scale = tl.minimum(tl.div_rn(peak, 448.0), 65504.0).to(tl.float16)
    scaled = tl.div_rn(tl.where(values == values, values, 0.0), divisor_of(scale)[:, None])
    bits = tl.minimum(tl.maximum(scaled, -448.0), 448.0).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Normal numbers: drop 20 mantissa bits, nearest even, and move the exponent bias from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the step is 2^-9, the step of float32 numbers around 2^14 = 0x46800000.
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    codes = tl.where(magnitude < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)
    tl.store(codes_ptr + pair.to(tl.int64)[:, None] * dim + element[None, :], codes.to(tl.uint8), mask=mask)
    tl.store(params_ptr + pair, scale, mask=pair < pairs)


@triton.jit
def _pack_int4(
    pool_ptr,
    slots_ptr,
    codes_ptr,
    params_ptr,
    pairs,
    heads,
    head_lo,
    dim,
    slot_stride,
    head_stride,
    BFLOAT16: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    pair = tl.program_id(0) * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    column = tl.arange(0, BLOCK_DIM // 2)
    inside = (column < dim // 2)[None, :]
    mask = (pair < pairs)[:, None] & inside
    source = pool_addresses(slots_ptr, pair, column * 2, pairs, heads, head_lo, slot_stride, head_stride)
    even = load_float32(pool_ptr + source, mask, BFLOAT16)
    odd = load_float32(pool_ptr + source + 1, mask, BFLOAT16)
    finite_even = tl.where(is_finite(even), even, 0.0)
    finite_odd = tl.where(is_finite(odd), odd, 0.0)
    low = tl.min(tl.where(inside, tl.minimum(finite_even, finite_odd), float("inf")), axis=1)
    high = tl.max(tl.where(inside, tl.maximum(finite_even, finite_odd), float("-inf")), axis=1)
    # Adding 0 turns -0 into +0, as in the reference.
    zero = (tl.minimum(tl.maximum(low, -65504.0), 65504.0) + 0.0).to(tl.float16)
    wide_zero = zero.to(tl.float32)
    scale = (tl.minimum(tl.maximum(tl.div_rn(high - wide_zero, 15.0), 0.0), 65504.0) + 0.0).to(tl.float16)
    divisor = divisor_of(scale)[:, None]
    even = tl.div_rn(tl.where(even == even, even, 0.0) - wide_zero[:, None], divisor)
    odd = tl.div_rn(tl.where(odd == odd, odd, 0.0) - wide_zero[:, None], divisor)
    low_nibble = round_to_even(tl.minimum(tl.maximum(even, 0.0), 15.0)).to(tl.int32)
    high_nibble = round_to_even(tl.minimum(tl.maximum(odd, 0.0), 15.0)).to(tl.int32)
    target = codes_ptr + pair.to(tl.int64)[:, None] * (dim // 2) + column[None, :]
    tl.store(target, (low_nibble | (high_nibble << 4)).to(tl.uint8), mask=mask)
    tl.store(params_ptr + pair * 2, scale, mask=pair < pairs)
    tl.store(params_ptr + pair * 2 + 1, zero, mask=pair < pairs)


_KERNELS = {
    Precision.NATIVE: _pack_native,
    Precision.INT8: _pack_int8,
    Precision.FP8_E4M3: _pack_fp8_e4m3,
    Precision.INT4: _pack_int4,
}


def pack_rows(
    precision: Precision,
    buffer: torch.Tensor,
    pool_rows: torch.Tensor,
    head_lo: int,
    codes: torch.Tensor,
    params: torch.Tensor,
) -> None:
    """Encode ``buffer[pool_rows, head_lo : head_lo + heads]`` on the current stream.

    Args:
        precision: how to encode.
        buffer: pool buffer [slots, heads, dim], float32, float16 or bfloat16, any slot and head stride.
        pool_rows: contiguous int64 [rows], each a valid slot (not checked here).
        head_lo: first head.
        codes: contiguous uint8 [rows, heads, c], written.
        params: contiguous float16 [rows, heads, p], written.

    Raises:
        SpectrumKVError: a tensor has another type or stride.
    """
    check_rows(buffer, pool_rows, codes, params)
    rows, heads = codes.shape[:2]
    dim = buffer.shape[2]
    pool = as_kernel_pool(buffer)
    launch(
        _KERNELS[precision],
        rows * heads,
        dim,
        buffer.device,
        pool,
        pool_rows,
        codes.view(pool.dtype) if precision is Precision.NATIVE else codes,
        params,
        rows * heads,
        heads,
        head_lo,
        dim,
        buffer.stride(0),
        buffer.stride(1),
        BFLOAT16=buffer.dtype == torch.bfloat16,
    )
