"""The arithmetic of asymmetric integers of n bits, whatever the elements are that share a scale and a zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from spectrumkv_sglang.kernels.quantisers.base import (
    HALF_STEP_FLOAT16,
    HALF_ULP_FLOAT16,
    LARGEST_SCALE,
    finite_or_zero,
    nan_to_zero,
    round_scale,
    to_pool_dtype,
    with_rounding,
)


class Parameters(NamedTuple):
    """float16 scale and zero of groups of elements, of the elements' shape with the shared axis of length 1."""

    scale: torch.Tensor
    zero: torch.Tensor


class Groups(NamedTuple):
    """Finite float32 values, those along ``axis`` a group, and the least and largest of each, ``axis`` of length 1."""

    values: torch.Tensor
    axis: int
    low: torch.Tensor
    high: torch.Tensor

    @classmethod
    def along(cls, values: torch.Tensor, axis: int) -> Groups:
        """Group the values along ``axis``."""
        return cls(values, axis, values.amin(axis, keepdim=True), values.amax(axis, keepdim=True))


ParameterRule = Callable[[Groups, int], Parameters]
"""Chooses the parameters of each group for codes of some bits."""


def full_range(groups: Groups, bits: int) -> Parameters:
    """``zero = float16(min)``, ``scale = float16((max - zero) / (2^bits - 1))``; both saturate at float16's ends."""
    zero = round_zero(groups.low)
    scale, _ = round_scale(step_of(zero, groups.high, bits))
    return Parameters(scale, zero)


def round_zero(zero: torch.Tensor) -> torch.Tensor:
    """Round a float32 zero to float16."""
    # Adding 0 turns -0 into +0: which of the two a minimum or maximum returns is not the same everywhere.
    return (zero.clamp(-LARGEST_SCALE, LARGEST_SCALE) + 0.0).half()


def step_of(zero: torch.Tensor, high: torch.Tensor, bits: int) -> torch.Tensor:
    """float32 step that takes the last code from a float16 zero to ``high``."""
    return ((high - zero.float()) / largest_code(bits)).clamp_(min=0.0).add_(0.0)


def largest_code(bits: int) -> float:
    """The last code."""
    return float((1 << bits) - 1)


def encode(x: torch.Tensor, axis: int, bits: int, rule: ParameterRule = full_range) -> tuple[torch.Tensor, Parameters]:
    """``code = round((x - zero) * (1 / scale))`` in 0..2^bits - 1; the elements along ``axis`` share scale and zero.

    ``x - zero`` and ``1 / scale`` are float32, their product is rounded once, to an integer, ties to even.

    Args:
        x: float32, float16 or bfloat16.
        axis: dimension that ``rule`` takes as one group.
        bits: of a code, at most 8.
        rule: scale and zero of a group. Elements that are not finite count as 0 for it.

    Returns:
        uint8 codes of the shape of ``x``, and the parameters.
    """
    values = x.float()
    groups = Groups.along(values, axis)
    if not (torch.isfinite(groups.low) & torch.isfinite(groups.high)).all():
        groups = Groups.along(finite_or_zero(values), axis)
        values = nan_to_zero(values)
    parameters = rule(groups, bits)
    return codes_of(values, parameters, bits), parameters


def codes_of(values: torch.Tensor, parameters: Parameters, bits: int) -> torch.Tensor:
    """uint8 codes of float32 values without NaN."""
    divisor = parameters.scale.float()
    divisor = torch.where(divisor == 0.0, 1.0, divisor)
    # In float64 the product is exact, so this rounds once, as a fused multiply-add does.
    distance = (values - parameters.zero.float()).double()
    return distance.mul_(divisor.reciprocal().double()).round_().clamp_(0.0, largest_code(bits)).to(torch.uint8)


def decode(codes: torch.Tensor, parameters: Parameters, dtype: torch.dtype) -> torch.Tensor:
    """``code * scale + zero`` in float32, rounded to ``dtype``; takes what `encode` returns."""
    return to_pool_dtype(codes.float().mul_(parameters.scale.float()).add_(parameters.zero.float()), dtype)


def error_bound(x: torch.Tensor, axis: int, bits: int) -> torch.Tensor:
    """Largest possible error of each finite element under `full_range`, float32, with ``axis`` of length 1.

    Half a step, ``(max x - min x) / (2^bits - 1) / 2``, or the float16 rounding of the zero where that is larger.
    """
    finite = finite_or_zero(x.float())
    low, high = finite.amin(axis, keepdim=True), finite.amax(axis, keepdim=True)
    last = largest_code(bits)
    zero_error = torch.maximum(low.abs() * HALF_ULP_FLOAT16 + HALF_STEP_FLOAT16, low.abs() - LARGEST_SCALE)
    reach = high - low.clamp(-LARGEST_SCALE, LARGEST_SCALE) + low.abs() * HALF_ULP_FLOAT16 + HALF_STEP_FLOAT16
    reach = reach.clamp(min=0.0)
    half_step = (reach / last * (1 + HALF_ULP_FLOAT16) + HALF_STEP_FLOAT16) / 2
    beyond_last_code = reach * HALF_ULP_FLOAT16 + last * HALF_STEP_FLOAT16
    beyond_last_code = torch.maximum(beyond_last_code, reach - last * LARGEST_SCALE)
    bound = torch.maximum(torch.maximum(half_step, zero_error), beyond_last_code)
    return with_rounding(bound, torch.maximum(low.abs(), high.abs()), x.dtype)


def cut_error_bound(x: torch.Tensor, axis: int, bits: int, rule: ParameterRule) -> torch.Tensor:
    """Largest possible error of each finite element under a rule that cuts the range, float32, of the shape of ``x``.

    Half of the rule's step, or the distance to the first or last code of elements beyond them.
    """
    finite = finite_or_zero(x.float())
    scale, zero = (parameter.float() for parameter in rule(Groups.along(finite, axis), bits))
    beyond = torch.maximum(zero - finite, finite - (zero + largest_code(bits) * scale))
    magnitude = finite.abs().amax(axis, keepdim=True) + zero.abs()
    return with_rounding(torch.maximum(beyond, scale / 2), magnitude, x.dtype)
