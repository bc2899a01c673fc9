"""Addresses and number formats that the pack and unpack kernels share.

A tile is ``BLOCK_PAIRS`` (row, head) pairs by ``BLOCK_DIM`` elements. Rounding to integers and to bfloat16 is spelled
out in integer and float32 arithmetic, so that compiled and interpreted kernels and the torch reference give the same
bits; launches switch multiply-add fusion off for the same reason.
"""

# Triton reads the annotations of kernels, so only what it knows can stand there.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from spectrumkv_sglang.errors import SpectrumKVError

_TILE_ELEMENTS = 2048


@triton.jit
def pool_addresses(
    slots_ptr,
    pair,
    element,
    pairs,
    heads,
    head_lo,
    slot_stride,
    head_stride,
):
    """Offsets [pairs, elements] of a tile in a pool buffer; strides are in elements, `slots_ptr` in row order."""
    slot = tl.load(slots_ptr + pair // heads, mask=pair < pairs, other=0)
    head = (head_lo + pair % heads).to(tl.int64)
    return (slot * slot_stride + head * head_stride)[:, None] + element[None, :]


@triton.jit
def load_float32(pointers, mask, BFLOAT16: tl.constexpr):
    """Load pool elements as float32; bfloat16 pools are passed as int16."""
    values = tl.load(pointers, mask=mask, other=0)
    if BFLOAT16:
        return (values.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return values.to(tl.float32)


@triton.jit
def store_float32(pointers, values, mask, BFLOAT16: tl.constexpr, FLOAT16: tl.constexpr):
    """Store finite float32 values in the pool's format, nearest even; float16 saturates, bfloat16 goes out as int16."""
    if BFLOAT16:
        bits = values.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(pointers, bits.to(tl.int16), mask=mask)
    elif FLOAT16:
        saturated = tl.minimum(tl.maximum(values, -65504.0), 65504.0)
        tl.store(pointers, saturated.to(tl.float16), mask=mask)
    else:
        tl.store(pointers, values, mask=mask)


@triton.jit
def round_to_even(values):
    """Nearest integer, ties to even, of float32 values below 2^22 in magnitude."""
    return (values + 12582912.0) - 12582912.0


@triton.jit
def is_finite(values):
    """False for NaN and infinities."""
    return tl.abs(values) < float("inf")


@triton.jit
def divisor_of(scale):
    """float32 number to divide by for a float16 scale: the scale, or 1 where it is 0."""
    wide = scale.to(tl.float32)
    return tl.where(wide == 0.0, 1.0, wide)


def tile_shape(dim: int) -> dict[str, int]:
    """Block sizes of a tile for heads of ``dim`` elements, as launch arguments."""
    block_dim = triton.next_power_of_2(dim)
    return {"BLOCK_PAIRS": max(1, _TILE_ELEMENTS // block_dim), "BLOCK_DIM": block_dim}


def as_kernel_pool(buffer: torch.Tensor) -> torch.Tensor:
    """Pool buffer in the element type that kernels take: int16 for bfloat16, unchanged otherwise."""
    return buffer.view(torch.int16) if buffer.dtype == torch.bfloat16 else buffer


def check_rows(buffer: torch.Tensor, pool_rows: torch.Tensor, codes: torch.Tensor, params: torch.Tensor) -> None:
    """Raise SpectrumKVError unless the tensors have the strides and types that the kernels take for granted."""
    if buffer.dim() != 3 or buffer.stride(2) != 1:
        raise SpectrumKVError(
            f"pack kernels: expected a pool buffer [slots, heads, dim] with contiguous heads, got shape "
            f"{tuple(buffer.shape)} with strides {buffer.stride()}"
        )
    if pool_rows.dtype != torch.int64 or not pool_rows.is_contiguous():
        raise SpectrumKVError(f"pack kernels: expected contiguous int64 pool slots, got {pool_rows.dtype}")
    if codes.dtype != torch.uint8 or params.dtype != torch.float16:
        raise SpectrumKVError(
            f"pack kernels: expected uint8 codes and float16 parameters, got {codes.dtype} and {params.dtype}"
        )
    if not (codes.is_contiguous() and params.is_contiguous()) or codes.shape[:2] != params.shape[:2]:
        raise SpectrumKVError(
            f"pack kernels: expected contiguous codes and parameters of the same rows and heads, "
            f"got {tuple(codes.shape)} and {tuple(params.shape)}"
        )


def launch(kernel: Any, pairs: int, dim: int, device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Launch over all (row, head) pairs on the current stream of ``device``."""
    shape = tile_shape(dim)
    grid = (triton.cdiv(pairs, shape["BLOCK_PAIRS"]),)
    if device.type == "cuda":
        with torch.cuda.device(device):
            kernel[grid](*arguments, **constants, **shape, enable_fp_fusion=False)
    else:
        kernel[grid](*arguments, **constants, **shape)
