"""Asymmetric INT4 with one scale and one zero per (row, head)."""

from __future__ import annotations

import torch

from spectrumkv_sglang.kernels.quantisers.base import (
    HALF_STEP_FLOAT16,
    HALF_ULP_FLOAT16,
    LARGEST_SCALE,
    Quantiser,
    finite_or_zero,
    nan_to_zero,
    round_scale,
    to_pool_dtype,
    with_rounding,
)

_LARGEST_CODE = 15.0


class Int4Quantiser(Quantiser):
    """``code = round((x - zero) * (1 / scale))`` in 0..15.

    ``x - zero`` and ``1 / scale`` are float32, their product is rounded once, to an integer, ties to even.
    ``zero = float16(min x)`` and ``scale = float16((max x - zero) / 15)``. This is the asymmetric per-token
    quantisation of KIVI (arXiv 2402.02750) with the whole head as one group. Two codes a byte: element 2j in the
    low, element 2j + 1 in the high nibble. Parameters: scale, then zero.
    Error: half a step, ``(max x - min x) / 30``, or the float16 rounding of the zero where that is larger. Zeros
    beyond +-65504 and scales above 65504 saturate.
    """

    params_per_row = 2
    relative_distortion = 1.0e-2

    def code_width(self, head_dim: int, native_itemsize: int) -> int:
        return head_dim // 2

    def quantise(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = x.float()
        low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
        if not (torch.isfinite(low) & torch.isfinite(high)).all():
            finite = finite_or_zero(values)
            low, high = finite.amin(-1, keepdim=True), finite.amax(-1, keepdim=True)
            values = nan_to_zero(values)
        # Adding 0 turns -0 into +0: which of the two a minimum or maximum returns is not the same everywhere.
        zero = (low.clamp(-LARGEST_SCALE, LARGEST_SCALE) + 0.0).half()
        scale, divisor = round_scale(((high - zero.float()) / _LARGEST_CODE).clamp_(min=0.0).add_(0.0))
        # In float64 the product is exact, so this rounds once, as a fused multiply-add does.
        codes = (values - zero.float()).double().mul_(divisor.reciprocal().double()).round_().clamp_(0.0, _LARGEST_CODE)
        # As 16-bit words a pair is low + 256 * high, whatever the row and head strides.
        pairs = codes.to(torch.int8).view(torch.int16)
        packed = pairs.bitwise_or_(pairs >> 4).to(torch.int8).view(torch.uint8)
        return packed, torch.cat((scale, zero), dim=-1)

    def dequantise(self, codes: torch.Tensor, params: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        pairs = codes.to(torch.int16)
        pairs = (pairs << 4).bitwise_or_(pairs).bitwise_and_(0x0F0F)
        scale, zero = params.float().split(1, dim=-1)
        return to_pool_dtype(pairs.view(torch.int8).float().mul_(scale).add_(zero), dtype)

    def error_bound(self, x: torch.Tensor) -> torch.Tensor:
        finite = finite_or_zero(x.float())
        low, high = finite.amin(-1, keepdim=True), finite.amax(-1, keepdim=True)
        zero_error = torch.maximum(low.abs() * HALF_ULP_FLOAT16 + HALF_STEP_FLOAT16, low.abs() - LARGEST_SCALE)
        reach = high - low.clamp(-LARGEST_SCALE, LARGEST_SCALE) + low.abs() * HALF_ULP_FLOAT16 + HALF_STEP_FLOAT16
        reach = reach.clamp(min=0.0)
        half_step = (reach / _LARGEST_CODE * (1 + HALF_ULP_FLOAT16) + HALF_STEP_FLOAT16) / 2
        beyond_last_code = reach * HALF_ULP_FLOAT16 + _LARGEST_CODE * HALF_STEP_FLOAT16
        beyond_last_code = torch.maximum(beyond_last_code, reach - _LARGEST_CODE * LARGEST_SCALE)
        bound = torch.maximum(torch.maximum(half_step, zero_error), beyond_last_code)
        return with_rounding(bound, torch.maximum(low.abs(), high.abs()), x.dtype)
