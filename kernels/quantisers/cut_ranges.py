"""Rules that spend the few codes of 2 and 3 bits on the bulk of the elements and cut the ends of their range.

Elements beyond the first or last code take that code. The decoder does not know: scale and zero say it all. Means and
squared errors are summed in float64, so that the order of the sums does not show in the float16 parameters.
"""

from __future__ import annotations

import torch

from spectrumkv_sglang.kernels.quantisers.affine import (
    Groups,
    Parameters,
    codes_of,
    full_range,
    largest_code,
    round_zero,
    step_of,
)
from spectrumkv_sglang.kernels.quantisers.base import round_scale

NORMAL_STEPS = {2: 0.9957, 3: 0.5860}
"""Steps, in standard deviations, of the best uniform quantiser of a normal variable by bits (Max, "Quantizing for
minimum distortion", 1960, table II). With 4 bits there is nothing to gain: the full range of 128 normal elements has
nearly the same step."""

SHRINK_FACTORS = (1.0, 0.84, 0.68, 0.52)
"""Of the full range."""


def normal_range(groups: Groups, bits: int) -> Parameters:
    """The best steps for a normal variable, where they are shorter than those of `full_range`.

    ``scale = float16(c * sigma)``, sigma the population standard deviation, where ``c * sigma`` is below the float32
    scale of `full_range`; then ``zero = float16(min(max(mean - scale * last / 2, min x), max x - scale * last))`` with
    ``last = 2^bits - 1``. Mean and sigma are rounded to float32 from float64, the rest is float32.
    """
    last = largest_code(bits)
    zero = round_zero(groups.low)
    full = step_of(zero, groups.high, bits)
    wide = groups.values.double()
    mean = wide.mean(groups.axis, keepdim=True)
    sigma = (wide - mean).square_().mean(groups.axis, keepdim=True).sqrt_().float()
    step = sigma * NORMAL_STEPS[bits]
    cut = step < full
    scale, _ = round_scale(torch.where(cut, step, full))
    span = scale.float() * last
    centred = torch.minimum(torch.maximum(mean.float() - span / 2, groups.low), groups.high - span)
    return Parameters(scale, torch.where(cut, round_zero(centred), zero))


def least_error_range(groups: Groups, bits: int) -> Parameters:
    """The range of `full_range`, or the part around its middle that leaves the least squared error.

    For a factor f of `SHRINK_FACTORS`: ``scale = float16(f * (max x - float16(min x)) / last)`` and
    ``zero = float16((min x / 2 + max x / 2) - scale * last / 2)``; f = 1 is `full_range` itself. The first factor of
    the least sum of ``(x - (code * scale + zero))^2``, in float64, is taken.
    """
    last = largest_code(bits)
    best = full_range(groups, bits)
    full = step_of(best.zero, groups.high, bits)
    middle = groups.low / 2 + groups.high / 2
    least = _squared_error(groups, bits, best)
    for factor in SHRINK_FACTORS[1:]:
        scale, _ = round_scale(full * factor)
        candidate = Parameters(scale, round_zero(middle - scale.float() * last / 2))
        error = _squared_error(groups, bits, candidate)
        better = error < least
        least = torch.where(better, error, least)
        best = Parameters(
            torch.where(better, candidate.scale, best.scale), torch.where(better, candidate.zero, best.zero)
        )
    return best


def _squared_error(groups: Groups, bits: int, parameters: Parameters) -> torch.Tensor:
    """Sum over each group, float64."""
    decoded = codes_of(groups.values, parameters, bits).double().mul_(parameters.scale.double())
    decoded = decoded.add_(parameters.zero.double())
    return decoded.sub_(groups.values.double()).square_().sum(groups.axis, keepdim=True)
