"""What a quantiser is, and the arithmetic that all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod

import torch

LARGEST_SCALE = 65504.0
"""Largest finite float16: scales and zeros saturate here."""
HALF_STEP_FLOAT16 = 2.0**-25
"""Largest rounding error of a float16 in the subnormal range."""
HALF_ULP_FLOAT16 = 2.0**-11
"""Largest relative rounding error of a float16 above the subnormal range."""
_FLOAT32_SLACK = 2.0**-21


class Quantiser(ABC):
    """Codes and float16 parameters for rows of K or V heads.

    Parameters are rounded to float16 before the codes are computed, so that a decoder sees exactly the numbers that
    the encoder used. Arithmetic is float32, rounding is to nearest, ties to even.

    Non-finite input (uninitialised page tails) never raises and touches no other row: NaN travels as 0, an infinity
    saturates, and neither counts when the parameters of its row (or channel) are computed.

    Attributes:
        block_rows: consecutive rows that share parameters: 1 where each row decodes by itself.
        relative_distortion: expected mean squared error over the variance of 128 independent Gaussian elements that
            share parameters, measured. Close to step^2 / 12 (Bennett, "Spectra of quantized signals", 1948).
        dim_multiple: what head dimensions must be a multiple of, so that codes fill whole bytes.
    """

    block_rows: int
    relative_distortion: float
    dim_multiple: int = 1

    def distortion(self, near_normal: bool = False) -> float:
        """`relative_distortion`, of rows that are quantised with ``near_normal`` where it is set."""
        return self.relative_distortion

    @abstractmethod
    def code_width(self, head_dim: int, native_itemsize: int) -> int:
        """Bytes of the codes of one (row, head)."""

    def code_bytes(self, rows: int, heads: int, head_dim: int, native_itemsize: int) -> int:
        """Bytes of the codes of ``rows`` rows of ``heads`` heads; ``native_itemsize`` is the pool's element size."""
        return rows * heads * self.code_width(head_dim, native_itemsize)

    @abstractmethod
    def param_shape(self, rows: int, heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of the float16 parameters of ``rows`` rows of ``heads`` heads."""

    def param_bytes(self, rows: int, heads: int, head_dim: int) -> int:
        """Bytes of the parameters of ``rows`` rows of ``heads`` heads."""
        return prod(self.param_shape(rows, heads, head_dim)) * 2

    @abstractmethod
    def quantise(self, x: torch.Tensor, near_normal: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode float32, float16 or bfloat16 [rows, heads, dim].

        Args:
            x: what to encode.
            near_normal: whether the elements of a row are close to normally distributed, as after a Hadamard
                transform. Quantisers of few bits by row then cut the tails; the others ignore it. `dequantise` needs
                not know.

        Returns:
            uint8 codes [rows, heads, code_width] and float16 parameters of `param_shape`.

        Raises:
            ValueError: dim is not a multiple of `dim_multiple`.
        """

    @abstractmethod
    def dequantise(self, codes: torch.Tensor, params: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Decode `quantise` output to float32, float16 or bfloat16 [rows, heads, dim]; values beyond it saturate."""

    @abstractmethod
    def error_bound(self, x: torch.Tensor, near_normal: bool = False) -> torch.Tensor:
        """Largest possible ``|x - dequantise(quantise(x))|`` of each finite element, float32, broadcastable to x.

        Rounding of the parameters, float32 arithmetic, the rounding to ``x.dtype`` and cut tails are included.
        """

    def check_dim(self, head_dim: int) -> None:
        """Raise ValueError unless codes of ``head_dim`` elements fill whole bytes."""
        if head_dim % self.dim_multiple:
            raise ValueError(
                f"head dimension: expected a multiple of {self.dim_multiple} for this precision, got {head_dim}; "
                "INT8, FP8_E4M3 and INT8_CHANNEL take any"
            )


class RowQuantiser(Quantiser):
    """A quantiser whose rows decode by themselves.

    Attributes:
        params_per_row: float16 parameters per (row, head).
    """

    block_rows = 1
    params_per_row: int

    def param_shape(self, rows: int, heads: int, head_dim: int) -> tuple[int, ...]:
        return rows, heads, self.params_per_row


def finite_or_zero(values: torch.Tensor) -> torch.Tensor:
    """Replace NaN and infinities by 0."""
    return torch.where(torch.isfinite(values), values, 0.0)


def nan_to_zero(values: torch.Tensor) -> torch.Tensor:
    """Replace NaN by 0 and keep infinities."""
    return torch.where(torch.isnan(values), 0.0, values)


def round_scale(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a float32 scale >= 0 to float16.

    Returns:
        The float16 scale, and the float32 number to divide by: the scale itself, or 1 where it is 0.
    """
    rounded = scale.clamp(max=LARGEST_SCALE).half()
    divisor = rounded.float()
    return rounded, torch.where(divisor == 0.0, 1.0, divisor)


def to_pool_dtype(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float32 values to the pool's dtype, saturating where float16 would overflow."""
    if dtype == torch.float16:
        values = values.clamp(-LARGEST_SCALE, LARGEST_SCALE)
    return values.to(dtype)


def with_rounding(bound: torch.Tensor, magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Add float32 arithmetic on numbers up to ``magnitude`` and the rounding to ``dtype`` to an error bound."""
    info = torch.finfo(dtype)
    bound = bound + magnitude * _FLOAT32_SLACK
    return bound + (magnitude + bound) * (info.eps / 2) + info.smallest_normal * info.eps
