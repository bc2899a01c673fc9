"""Symmetric INT8 with one scale per (row, head)."""

from __future__ import annotations

import torch

from spectrumkv_sglang.kernels.quantisers.base import (
    HALF_STEP_FLOAT16,
    HALF_ULP_FLOAT16,
    LARGEST_SCALE,
    RowQuantiser,
    finite_or_zero,
    nan_to_zero,
    round_scale,
    to_pool_dtype,
    with_rounding,
)

_LARGEST_CODE = 127.0


class Int8Quantiser(RowQuantiser):
    """``code = round(x / scale)`` in -127..127, ``scale = float16(max|x| / 127)``.

    Per-token symmetric absmax quantisation, as the SpectrumKV paper (arXiv 2606.08635) uses, with a scale per head.
    Error: half a step, ``max|x| / 254``, besides rounding. Magnitudes above 127 * 65504 saturate.
    """

    params_per_row = 1
    relative_distortion = 4.2e-5

    def code_width(self, head_dim: int, native_itemsize: int) -> int:
        return head_dim

    def quantise(self, x: torch.Tensor, near_normal: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        values = x.float()
        peak = values.abs().amax(-1, keepdim=True)
        if not torch.isfinite(peak).all():
            peak = finite_or_zero(values).abs().amax(-1, keepdim=True)
            values = nan_to_zero(values)
        scale, divisor = round_scale(peak / _LARGEST_CODE)
        codes = (values / divisor).clamp_(-_LARGEST_CODE, _LARGEST_CODE).round_()
        return codes.to(torch.int8).view(torch.uint8), scale

    def dequantise(self, codes: torch.Tensor, params: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return to_pool_dtype(codes.view(torch.int8).float().mul_(params.float()), dtype)

    def error_bound(self, x: torch.Tensor, near_normal: bool = False) -> torch.Tensor:
        magnitude = finite_or_zero(x.float()).abs()
        peak = magnitude.amax(-1, keepdim=True)
        half_step = (peak / _LARGEST_CODE * (1 + HALF_ULP_FLOAT16) + HALF_STEP_FLOAT16) / 2
        beyond_last_code = peak * HALF_ULP_FLOAT16 + _LARGEST_CODE * HALF_STEP_FLOAT16
        beyond_last_code = torch.maximum(beyond_last_code, peak - _LARGEST_CODE * LARGEST_SCALE)
        return with_rounding(torch.maximum(half_step, beyond_last_code.minimum(magnitude)), peak, x.dtype)
