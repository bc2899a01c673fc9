"""Dequantise a segment of a payload and scatter its rows into a pool buffer by slot id, one launch per segment.

The torch references are the quantisers' `dequantise` methods; results are equal bit for bit.
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
    launch,
    pool_addresses,
    store_float32,
)


@triton.jit
def _unpack_native(
    codes_ptr,
    params_ptr,
    pool_ptr,
    slots_ptr,
    pairs,
    heads,
    head_lo,
    dim,
    slot_stride,
    head_stride,
    BFLOAT16: tl.constexpr,
    FLOAT16: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    pair = tl.program_id(0) * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    element = tl.arange(0, BLOCK_DIM)
    mask = (pair < pairs)[:, None] & (element < dim)[None, :]
    values = tl.load(codes_ptr + pair.to(tl.int64)[:, None] * dim + element[None, :], mask=mask, other=0)
    target = pool_addresses(slots_ptr, pair, element, pairs, heads, head_lo, slot_stride, head_stride)
    tl.store(pool_ptr + target, values, mask=mask)


@triton.jit
def _unpack_int8(
    codes_ptr,
    params_ptr,
    pool_ptr,
    slots_ptr,
    pairs,
    heads,
    head_lo,
    dim,
    slot_stride,
    head_stride,
    BFLOAT16: tl.constexpr,
    FLOAT16: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    pair = tl.program_id(0) * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    element = tl.arange(0, BLOCK_DIM)
    mask = (pair < pairs)[:, None] & (element < dim)[None, :]
    codes = tl.load(codes_ptr + pair.to(tl.int64)[:, None] * dim + element[None, :], mask=mask, other=0)
    scale = tl.load(params_ptr + pair, mask=pair < pairs, other=0.0).to(tl.float32)
    values = codes.to(tl.int8, bitcast=True).to(tl.float32) * scale[:, None]
    target = pool_addresses(slots_ptr, pair, element, pairs, heads, head_lo, slot_stride, head_stride)
    store_float32(pool_ptr + target, values, mask, BFLOAT16, FLOAT16)


@triton.jit
def _unpack_fp8_e4m3(
    codes_ptr,
    params_ptr,
    pool_ptr,
    slots_ptr,
    pairs,
    heads,
    head_lo,
    dim,
    slot_stride,
    head_stride,
    BFLOAT16: tl.constexpr,
    FLOAT16: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    pair = tl.program_id(0) * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    element = tl.arange(0, BLOCK_DIM)
    mask = (pair < pairs)[:, None] & (element < dim)[None, :]
    codes = tl.load(codes_ptr + pair.to(tl.int64)[:, None] * dim + element[None, :], mask=mask, other=0).to(tl.int32)
    scale = tl.load(params_ptr + pair, mask=pair < pairs, other=0.0).to(tl.float32) * 256.0
    # An E4M3 number moved up by 7 bits is the float16 of 2^-8 times its value, subnormals included.
    bits = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
    values = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * scale[:, None]
    target = pool_addresses(slots_ptr, pair, element, pairs, heads, head_lo, slot_stride, head_stride)
    store_float32(pool_ptr + target, values, mask, BFLOAT16, FLOAT16)


@triton.jit
def _unpack_int4(
    codes_ptr,
    params_ptr,
    pool_ptr,
    slots_ptr,
    pairs,
    heads,
    head_lo,
    dim,
    slot_stride,
    head_stride,
    BFLOAT16: tl.constexpr,
    FLOAT16: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    pair = tl.program_id(0) * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    element = tl.arange(0, BLOCK_DIM)
    mask = (pair < pairs)[:, None] & (element < dim)[None, :]
    # Both elements of a byte load it: the second load is a cache hit, and the store stays contiguous.
    source = codes_ptr + pair.to(tl.int64)[:, None] * (dim // 2) + (element // 2)[None, :]
    bytes_of_pairs = tl.load(source, mask=mask, other=0).to(tl.int32)
    codes = (bytes_of_pairs >> ((element % 2) * 4)[None, :]) & 0xF
    scale = tl.load(params_ptr + pair * 2, mask=pair < pairs, other=0.0).to(tl.float32)
    zero = tl.load(params_ptr + pair * 2 + 1, mask=pair < pairs, other=0.0).to(tl.float32)
    values = codes.to(tl.float32) * scale[:, None] + zero[:, None]
    target = pool_addresses(slots_ptr, pair, element, pairs, heads, head_lo, slot_stride, head_stride)
    store_float32(pool_ptr + target, values, mask, BFLOAT16, FLOAT16)


_KERNELS = {
    Precision.NATIVE: _unpack_native,
    Precision.INT8: _unpack_int8,
    Precision.FP8_E4M3: _unpack_fp8_e4m3,
    Precision.INT4: _unpack_int4,
}


def unpack_rows(
    precision: Precision,
    codes: torch.Tensor,
    params: torch.Tensor,
    buffer: torch.Tensor,
    pool_rows: torch.Tensor,
    head_lo: int,
) -> None:
    """Decode into ``buffer[pool_rows, head_lo : head_lo + heads]`` on the current stream.

    Args:
        precision: how the codes are encoded.
        codes: contiguous uint8 [rows, heads, c].
        params: contiguous float16 [rows, heads, p].
        buffer: pool buffer [slots, heads, dim], float32, float16 or bfloat16, any slot and head stride; written.
        pool_rows: contiguous int64 [rows], distinct valid slots (not checked here).
        head_lo: first head.

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
        codes.view(pool.dtype) if precision is Precision.NATIVE else codes,
        params,
        pool,
        pool_rows,
        rows * heads,
        heads,
        head_lo,
        dim,
        buffer.stride(0),
        buffer.stride(1),
        BFLOAT16=buffer.dtype == torch.bfloat16,
        FLOAT16=buffer.dtype == torch.float16,
    )
