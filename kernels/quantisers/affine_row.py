"""Asymmetric integers of n bits with one scale and one zero per (row, head)."""

from __future__ import annotations

import torch

from spectrumkv_sglang.kernels.quantisers import affine, code_planes
from spectrumkv_sglang.kernels.quantisers.base import RowQuantiser
from spectrumkv_sglang.kernels.quantisers.cut_ranges import NORMAL_STEPS, normal_range

_DISTORTION = {2: 0.251, 3: 4.58e-2, 4: 1.0e-2, 5: 2.33e-3, 6: 5.64e-4}
_NEAR_NORMAL_DISTORTION = {2: 0.1165, 3: 3.63e-2}


class AffineRowQuantiser(RowQuantiser):
    """`affine.encode` along the head dimension: the asymmetric per-token quantisation of KIVI (arXiv 2402.02750) with
    the whole head as one group. Parameters: scale, then zero. Codes lie in `code_planes`.

    With ``near_normal`` codes of 2 and 3 bits cut the tails of the row (`cut_ranges.normal_range`).

    Args:
        bits: of a code: 2, 3, 4, 5 or 6.
    """

    params_per_row = 2

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.dim_multiple = code_planes.dim_multiple(bits)
        self.relative_distortion = _DISTORTION[bits]

    def distortion(self, near_normal: bool = False) -> float:
        plain = self.relative_distortion
        return _NEAR_NORMAL_DISTORTION.get(self.bits, plain) if near_normal else plain

    def code_width(self, head_dim: int, native_itemsize: int) -> int:
        return head_dim * self.bits // 8

    def quantise(self, x: torch.Tensor, near_normal: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        self.check_dim(x.shape[-1])
        codes, parameters = affine.encode(x, -1, self.bits, self._rule(near_normal))
        return code_planes.pack(codes, self.bits), torch.cat(parameters, dim=-1)

    def dequantise(self, codes: torch.Tensor, params: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scale, zero = params.split(1, dim=-1)
        return affine.decode(code_planes.unpack(codes, self.bits), affine.Parameters(scale, zero), dtype)

    def error_bound(self, x: torch.Tensor, near_normal: bool = False) -> torch.Tensor:
        rule = self._rule(near_normal)
        if rule is affine.full_range:
            return affine.error_bound(x, -1, self.bits)
        return affine.cut_error_bound(x, -1, self.bits, rule)

    def _rule(self, near_normal: bool) -> affine.ParameterRule:
        return normal_range if near_normal and self.bits in NORMAL_STEPS else affine.full_range
