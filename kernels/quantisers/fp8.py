"""FP8 E4M3 with one scale per (row, head)."""

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

_LARGEST_CODE = 448.0
_SMALLEST_STEP = 2.0**-9


class Fp8E4M3Quantiser(RowQuantiser):
    """``code = e4m3(x / scale)``, ``scale = float16(max|x| / 448)``.

    E4M3 is the finite-only format of "FP8 formats for deep learning" (arXiv 2209.05433): 448 is its largest number
    and codes 0x7f and 0xff (NaN) are never produced.
    Error: 1/16 of the element, or 2^-10 scales for elements below 2^-6 scales, besides rounding. Magnitudes above
    448 * 65504 saturate.
    """

    params_per_row = 1
    relative_distortion = 6.6e-4

    def code_width(self, head_dim: int, native_itemsize: int) -> int:
        return head_dim

    def quantise(self, x: torch.Tensor, near_normal: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        values = x.float()
        peak = values.abs().amax(-1, keepdim=True)
        if not torch.isfinite(peak).all():
            peak = finite_or_zero(values).abs().amax(-1, keepdim=True)
            values = nan_to_zero(values)
        scale, divisor = round_scale(peak / _LARGEST_CODE)
        codes = (values / divisor).clamp_(-_LARGEST_CODE, _LARGEST_CODE)
        return codes.to(torch.float8_e4m3fn).view(torch.uint8), scale

    def dequantise(self, codes: torch.Tensor, params: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        # An E4M3 number moved up by 7 bits is the float16 of 2^-8 times its value, subnormals included; the mask
        # clears the copy of the sign that sign extension leaves in the exponent.
        shifted = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4001)
        return to_pool_dtype(shifted.view(torch.float16).float().mul_(params.float() * 256.0), dtype)

    def error_bound(self, x: torch.Tensor, near_normal: bool = False) -> torch.Tensor:
        magnitude = finite_or_zero(x.float()).abs()
        peak = magnitude.amax(-1, keepdim=True)
        largest_scale = peak / _LARGEST_CODE * (1 + HALF_ULP_FLOAT16) + HALF_STEP_FLOAT16
        half_step = torch.maximum(magnitude / 16, largest_scale * _SMALLEST_STEP / 2)
        beyond_last_code = peak * HALF_ULP_FLOAT16 + _LARGEST_CODE * HALF_STEP_FLOAT16
        beyond_last_code = torch.maximum(beyond_last_code, peak - _LARGEST_CODE * LARGEST_SCALE)
        return with_rounding(torch.maximum(half_step, beyond_last_code.minimum(magnitude)), peak, x.dtype)
