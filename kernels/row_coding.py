"""How rows of one cell of a precision table become codes and parameters, and rows again: transform and quantiser."""

from __future__ import annotations

import torch

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.quantisers import quantiser_for
from spectrumkv_sglang.kernels.quantisers.base import to_pool_dtype
from spectrumkv_sglang.kernels.transforms import Angles, Transform, transform_for


def encode_rows(
    x: torch.Tensor, precision: Precision, transform: Transform, angles: Angles | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Transform and quantise float32, float16 or bfloat16 [rows, heads, dim].

    Args:
        x: what to encode.
        precision: any but NATIVE, whose rows stay as they are.
        transform: in front of it.
        angles: of the rows, for DEROPE.

    Returns:
        Codes and parameters of `Quantiser.quantise`.

    Raises:
        ValueError: precision or transform do not take such heads, or the angles do not fit.
    """
    before = transform_for(transform)
    return quantiser_for(precision).quantise(before.forward(x.float(), angles), before.near_normal)


def decode_rows(
    codes: torch.Tensor,
    params: torch.Tensor,
    dtype: torch.dtype,
    precision: Precision,
    transform: Transform,
    angles: Angles | None = None,
) -> torch.Tensor:
    """[rows, heads, dim] in ``dtype``, rounded to it once; takes what `encode_rows` returns, or native rows.

    Raises:
        ValueError: as `encode_rows`.
    """
    quantiser = quantiser_for(precision)
    if transform is Transform.IDENTITY or precision is Precision.NATIVE:
        return quantiser.dequantise(codes, params, dtype)
    values = quantiser.dequantise(codes, params, torch.float32)
    return to_pool_dtype(transform_for(transform).inverse(values, angles), dtype)
