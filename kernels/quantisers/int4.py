"""Asymmetric INT4 with one scale and one zero per (row, head)."""

from __future__ import annotations

import torch

from spectrumkv_sglang.kernels.quantisers import affine_int4
from spectrumkv_sglang.kernels.quantisers.base import RowQuantiser


class Int4Quantiser(RowQuantiser):
    """`affine_int4.encode` along the head dimension: the asymmetric per-token quantisation of KIVI (arXiv 2402.02750)
    with the whole head as one group. Parameters: scale, then zero.
    """

    params_per_row = 2
    relative_distortion = 1.0e-2

    def code_width(self, head_dim: int, native_itemsize: int) -> int:
        return head_dim // 2

    def quantise(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scale, zero = affine_int4.encode(x, -1)
        return codes, torch.cat((scale, zero), dim=-1)

    def dequantise(self, codes: torch.Tensor, params: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scale, zero = params.split(1, dim=-1)
        return affine_int4.decode(codes, scale, zero, dtype)

    def error_bound(self, x: torch.Tensor) -> torch.Tensor:
        return affine_int4.error_bound(x, -1)
