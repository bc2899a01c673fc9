"""How much a point is expected to add to what the frontier dominates, when only its KL is uncertain.

A point's bytes and speed are known, so that the gain is an integral over one normal variable: with A(z) the area that
the point alone would dominate among points of at most KL z, the expected gain is the integral of A(z) P(KL <= z) dz.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_LEAST_DEVIATION = 1e-6


def expected_gain(
    mean: NDArray[np.float64],
    deviation: NDArray[np.float64],
    known: NDArray[np.float64],
    frontier: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Expected gain of each point, as a share of the unit cube, float64 [points].

    Args:
        mean, deviation: of the first coordinate of each point, [points]; what is below 0 counts as 0.
        known: the other two coordinates, [points, 2].
        frontier: points that none of the others dominates, [n, 3].

    All coordinates are scaled so that the box is the unit cube, less is better.
    """
    spread = np.maximum(deviation, _LEAST_DEVIATION)
    known = np.clip(known, 0.0, 1.0)
    ordered = np.clip(frontier[np.argsort(frontier[:, 0], kind="stable")], 0.0, 1.0)
    levels = np.concatenate([[0.0], ordered[:, 0], [1.0]])
    below = [_mass_below((level - mean) / spread) * spread for level in levels]
    total = np.zeros(len(mean))
    for count in range(len(ordered) + 1):
        if levels[count + 1] > levels[count]:
            total += _area_alone(known, ordered[:count, 1:]) * (below[count + 1] - below[count])
    return np.maximum(total, 0.0)


def _area_alone(corners: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.float64]:
    """Area of the unit square above each corner [points, 2] that no one of ``others`` [n, 2] dominates."""
    x, y = corners[:, :1], corners[:, 1:]
    whole = ((1 - x) * (1 - y))[:, 0]
    if len(others) == 0:
        return whole
    ordered = others[np.argsort(others[:, 0], kind="stable")]
    starts = np.maximum(ordered[:, 0][None], x)
    floors = np.minimum.accumulate(np.maximum(ordered[:, 1][None], y), axis=1)
    ends = np.concatenate([starts[:, 1:], np.ones_like(x)], axis=1)
    return whole - ((ends - starts) * (1 - floors)).sum(axis=1)


def _mass_below(t: NDArray[np.float64]) -> NDArray[np.float64]:
    """Integral of the normal distribution function up to ``t``."""
    from scipy.special import ndtr

    return t * ndtr(t) + np.exp(-0.5 * t * t) / np.sqrt(2 * np.pi)
