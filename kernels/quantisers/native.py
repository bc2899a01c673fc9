"""The pool's own bytes, packed but not quantised."""

from __future__ import annotations

import torch

from spectrumkv_sglang.kernels.quantisers.base import RowQuantiser


class NativeQuantiser(RowQuantiser):
    """Exact, NaN payloads included."""

    params_per_row = 0
    relative_distortion = 0.0

    def code_width(self, head_dim: int, native_itemsize: int) -> int:
        return head_dim * native_itemsize

    def quantise(self, x: torch.Tensor, near_normal: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        return x.contiguous().view(torch.uint8), x.new_empty((*x.shape[:2], 0), dtype=torch.float16)

    def dequantise(self, codes: torch.Tensor, params: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return codes.view(dtype)

    def error_bound(self, x: torch.Tensor, near_normal: bool = False) -> torch.Tensor:
        return torch.zeros_like(x, dtype=torch.float32)
