"""Which point is judged next: the one that is expected to add most to the frontier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spectrumkv_sglang.search.acquisition import expected_gain
from spectrumkv_sglang.search.known_costs import KnownCosts
from spectrumkv_sglang.search.pareto import Box, frontier
from spectrumkv_sglang.search.space import Point
from spectrumkv_sglang.search.surrogate import Surrogate

STARTING_POINTS = 4
"""Points that are judged before the first prediction: three known good shapes, the others drawn."""
_KNOWN_SHAPES = ((8, 6), (5, 3), (3, 2))
"""Bits of keys and values of the shipped profiles: what served well on other models."""


@dataclass(frozen=True)
class Proposal:
    """A point to judge, and the gain that is expected of it, as a share of the box (None for a starting point)."""

    place: int
    expected: float | None


class Proposer:
    """Proposes points of a space. Proposals depend on the seed and on what was judged alone, so that a search that is
    taken up again goes on as if it had not been interrupted.

    Args:
        costs: of all points.
        least_kl: KL below it counts as equal.
        most_kl: KL above it counts as equal: such a point is of no use to anybody.
        seed: of the starting points.
    """

    def __init__(self, costs: KnownCosts, least_kl: float, most_kl: float, seed: int) -> None:
        self._seed = seed
        self.costs = costs.coordinates(least_kl)
        low, high = self.costs.min(axis=0), self.costs.max(axis=0)
        self.box = Box((float(np.log10(least_kl)), *low[1:].tolist()), (float(np.log10(most_kl)), *high[1:].tolist()))
        self._surrogate = Surrogate(costs.points)
        self._starting = _starting_points(costs.points, seed)

    def next(
        self, judged: Mapping[int, float], measured: Sequence[Sequence[float]], excluded: NDArray[np.bool_]
    ) -> Proposal | None:
        """The next point; None when none is left.

        Args:
            judged: logarithm of the KL of every point that was judged, as far as it was.
            measured: coordinates of those that were judged to the end.
            excluded: mask [points] of others that need not be.
        """
        free = ~excluded
        free[list(judged)] = False
        if not free.any():
            return None
        if len(judged) < STARTING_POINTS:
            for place in self._starting:
                if free[place]:
                    return Proposal(place, None)
        kl, deviation = self._surrogate.predict(list(judged), list(judged.values()))
        scale = self._scale
        best = np.asarray(measured, dtype=float).reshape(-1, 3)
        gain = expected_gain(
            (kl - self.box.ideal[0]) / scale[0],
            deviation / scale[0],
            (self.costs[:, 1:] - np.asarray(self.box.ideal[1:])) / scale[1:],
            (best[frontier(best.tolist())] - np.asarray(self.box.ideal)) / scale,
        )
        gain[~free] = -1.0
        place = int(gain.argmax())
        return Proposal(place, float(gain[place]))

    @property
    def _scale(self) -> NDArray[np.float64]:
        span = np.asarray(self.box.worst) - np.asarray(self.box.ideal)
        return np.where(span > 0, span, 1.0)


def _starting_points(points: Sequence[Point], seed: int) -> list[int]:
    """All places in the order in which they would be started with."""
    shapes = []
    for keys, values in _KNOWN_SHAPES:
        alike = [place for place, point in enumerate(points) if (point.key_bits, point.value_bits) == (keys, values)]
        shapes += alike[:1]
    drawn = np.random.default_rng(seed).permutation(len(points)).tolist()
    return list(dict.fromkeys([*shapes, *drawn]))
