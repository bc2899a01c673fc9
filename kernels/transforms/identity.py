"""No transform."""

from __future__ import annotations

import torch

from spectrumkv_sglang.kernels.transforms.base import Angles, HeadTransform


class IdentityTransform(HeadTransform):
    """Hands its argument on, elements that are not finite included."""

    def forward(self, x: torch.Tensor, angles: Angles | None = None) -> torch.Tensor:
        return x

    def inverse(self, y: torch.Tensor, angles: Angles | None = None) -> torch.Tensor:
        return y
