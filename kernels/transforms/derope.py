"""Keys without their rotary embedding, for rotary embeddings that turn halves as GPT-NeoX does."""

from __future__ import annotations

import torch

from spectrumkv_sglang.kernels.transforms.base import Angles, HeadTransform, finite


class DeropeTransform(HeadTransform):
    """`rotate_back` before quantising, `rotate` after: keys as KVQuant (arXiv 2401.18079) quantises them.

    Dimensions behind the rotated ones stay. cos and sin may carry the same factor, as YaRN's do (arXiv 2309.00071).
    """

    def forward(self, x: torch.Tensor, angles: Angles | None = None) -> torch.Tensor:
        return rotate_back(finite(x), *_checked(angles, x))

    def inverse(self, y: torch.Tensor, angles: Angles | None = None) -> torch.Tensor:
        return rotate(y, *_checked(angles, y))


def _checked(angles: Angles | None, x: torch.Tensor) -> Angles:
    rows, _, dim = x.shape
    if angles is None:
        raise ValueError(f"transform DEROPE: expected cos and sin of {rows} rows, got none; give the model's rotation")
    cos, sin = angles
    if cos.shape != sin.shape or cos.dim() != 2 or len(cos) != rows:
        raise ValueError(
            f"transform DEROPE: expected cos and sin [{rows}, rotated dims], got {list(cos.shape)} and "
            f"{list(sin.shape)}; give the angles of the rows' own positions"
        )
    if cos.shape[1] % 2 or cos.shape[1] > dim:
        raise ValueError(
            f"transform DEROPE: expected an even number of rotated dims, at most the head dimension {dim}, "
            f"got {cos.shape[1]}; cos and sin are of another model"
        )
    return angles


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply a rotary embedding to ``x`` float32 [rows, heads, dim].

    cos and sin are [rows, rotated dims]; dimensions behind the rotated ones stay. They may carry a factor, as YaRN's
    do (``attention_scaling``).
    """
    cos, sin = cos[:, None], sin[:, None]
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)


def rotate_back(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Undo `rotate`, its factor included."""
    squared = cos.square() + sin.square()
    return rotate(x, cos / squared, -sin / squared)
