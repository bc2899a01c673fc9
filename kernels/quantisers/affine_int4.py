"""The arithmetic of asymmetric 4-bit integers, whatever the elements are that share a scale and a zero."""

from __future__ import annotations

import torch

from spectrumkv_sglang.kernels.quantisers.base import (
    HALF_STEP_FLOAT16,
    HALF_ULP_FLOAT16,
    LARGEST_SCALE,
    finite_or_zero,
    nan_to_zero,
    round_scale,
    to_pool_dtype,
    with_rounding,
)

_LARGEST_CODE = 15.0


def encode(x: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``code = round((x - zero) * (1 / scale))`` in 0..15; the elements along ``axis`` share scale and zero.

    ``x - zero`` and ``1 / scale`` are float32, their product is rounded once, to an integer, ties to even.
    ``zero = float16(min x)`` and ``scale = float16((max x - zero) / 15)``. Zeros beyond +-65504 and scales above 65504
    saturate.

    Args:
        x: float32, float16 or bfloat16, an even number of elements in the last dimension.
        axis: dimension that minimum and maximum are taken over.

    Returns:
        uint8 codes, two a byte: element 2j of the last dimension in the low, element 2j + 1 in the high nibble;
        float16 scale and zero, of the shape of ``x`` with ``axis`` of length 1.
    """
    values = x.float()
    low, high = values.amin(axis, keepdim=True), values.amax(axis, keepdim=True)
    if not (torch.isfinite(low) & torch.isfinite(high)).all():
        finite = finite_or_zero(values)
        low, high = finite.amin(axis, keepdim=True), finite.amax(axis, keepdim=True)
        values = nan_to_zero(values)
    # Adding 0 turns -0 into +0: which of the two a minimum or maximum returns is not the same everywhere.
    zero = (low.clamp(-LARGEST_SCALE, LARGEST_SCALE) + 0.0).half()
    scale, divisor = round_scale(((high - zero.float()) / _LARGEST_CODE).clamp_(min=0.0).add_(0.0))
    # In float64 the product is exact, so this rounds once, as a fused multiply-add does.
    codes = (values - zero.float()).double().mul_(divisor.reciprocal().double()).round_().clamp_(0.0, _LARGEST_CODE)
    # As 16-bit words a pair is low + 256 * high, whatever the strides of the other dimensions.
    pairs = codes.to(torch.int8).view(torch.int16)
    return pairs.bitwise_or_(pairs >> 4).to(torch.int8).view(torch.uint8), scale, zero


def decode(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``code * scale + zero`` in float32, rounded to ``dtype``; takes what `encode` returns."""
    pairs = codes.to(torch.int16)
    pairs = (pairs << 4).bitwise_or_(pairs).bitwise_and_(0x0F0F)
    return to_pool_dtype(pairs.view(torch.int8).float().mul_(scale.float()).add_(zero.float()), dtype)


def error_bound(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Largest possible error of each finite element, float32, of the shape of ``x`` with ``axis`` of length 1.

    Half a step, ``(max x - min x) / 30``, or the float16 rounding of the zero where that is larger.
    """
    finite = finite_or_zero(x.float())
    low, high = finite.amin(axis, keepdim=True), finite.amax(axis, keepdim=True)
    zero_error = torch.maximum(low.abs() * HALF_ULP_FLOAT16 + HALF_STEP_FLOAT16, low.abs() - LARGEST_SCALE)
    reach = high - low.clamp(-LARGEST_SCALE, LARGEST_SCALE) + low.abs() * HALF_ULP_FLOAT16 + HALF_STEP_FLOAT16
    reach = reach.clamp(min=0.0)
    half_step = (reach / _LARGEST_CODE * (1 + HALF_ULP_FLOAT16) + HALF_STEP_FLOAT16) / 2
    beyond_last_code = reach * HALF_ULP_FLOAT16 + _LARGEST_CODE * HALF_STEP_FLOAT16
    beyond_last_code = torch.maximum(beyond_last_code, reach - _LARGEST_CODE * LARGEST_SCALE)
    bound = torch.maximum(torch.maximum(half_step, zero_error), beyond_last_code)
    return with_rounding(bound, torch.maximum(low.abs(), high.abs()), x.dtype)
