"""What is done to the rows of K or V heads before they are quantised, and undone after they are decoded."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from typing import ClassVar, TypeAlias

import torch

from spectrumkv_sglang.kernels.quantisers.base import finite_or_zero

Angles: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, float32 [rows, rotated dims], that the keys of each row were turned by."""


class Transform(enum.IntEnum):
    """Wire values of the ``transforms`` of a precision table."""

    IDENTITY = 0
    """Nothing."""
    HADAMARD = 1
    """A signed Hadamard transform over each head, which spreads an outlier over its row."""
    DEROPE = 2
    """Keys without their rotary embedding, which leaves each channel more even along the rows."""


class HeadTransform(ABC):
    """A linear map of the elements of each (row, head), and its inverse.

    Attributes:
        near_normal: whether what `forward` returns is close to normally distributed along a row, as
            `Quantiser.quantise` asks.
    """

    near_normal: ClassVar[bool] = False

    def check_dim(self, head_dim: int) -> None:  # noqa: B027 (most transforms take any)
        """Raise ValueError unless the transform exists for heads of ``head_dim`` elements."""

    @abstractmethod
    def forward(self, x: torch.Tensor, angles: Angles | None = None) -> torch.Tensor:
        """Transform float32 [rows, heads, dim], as float32; elements that are not finite are taken as 0.

        Args:
            x: what to transform.
            angles: of the rows, for the transforms that need them; the others ignore them.

        Raises:
            ValueError: the transform does not exist for this dim, or needs other angles.
        """

    @abstractmethod
    def inverse(self, y: torch.Tensor, angles: Angles | None = None) -> torch.Tensor:
        """Undo `forward` but for float32 rounding; float32 [rows, heads, dim], the same angles."""


def finite(x: torch.Tensor) -> torch.Tensor:
    """``x``, with NaN and infinities replaced by 0 where there are any: a map would spread them over their row."""
    # A sum is the quickest test: it is finite only if all elements are.
    return x if torch.isfinite(x.sum()) else finite_or_zero(x)
