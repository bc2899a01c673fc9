"""What need not be judged, or not to the end, because it cannot be on the frontier whatever the rest would say.

A KL divergence is at least 0. So before any text a point loses at least nothing, and after some of the texts at least
their sum over all texts' number: where a measured point takes no more bytes, is no slower and loses no more than that,
the point is dominated for sure. Nothing here is estimated, so no point of the true frontier is ever lost; of points
that are alike in all three, one is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spectrumkv_sglang.search.pareto import Objectives


@dataclass(frozen=True)
class Pruning:
    """The rules.

    Attributes:
        least_kl: KL below it counts as equal.
        max_kl: points that lose more are of no use; None: all are.
    """

    least_kl: float
    max_kl: float | None = None

    def cannot_reach(self, costs: NDArray[np.float64], measured: Sequence[Objectives]) -> NDArray[np.bool_]:
        """Mask [points]: points that a measured one beats even if they lose nothing.

        Args:
            costs: coordinates [points, 3] of all points with no loss.
            measured: points that were judged on all texts, those among ``costs`` too.
        """
        beaten = np.zeros(len(costs), dtype=bool)
        for other in measured:
            if other.kl <= self.least_kl:
                beaten |= (np.asarray(other.coordinates(self.least_kl)) <= costs).all(axis=1)
        return beaten

    def surely_worse(self, least: Objectives, measured: Sequence[Objectives]) -> str:
        """Why a point that loses at least ``least.kl`` need not be judged further; "" if it must."""
        if self.max_kl is not None and least.kl > self.max_kl:
            return f"loses more than {self.max_kl:g}"
        ours = least.coordinates(self.least_kl)
        for other in measured:
            theirs = other.coordinates(self.least_kl)
            if all(x <= y for x, y in zip(theirs, ours, strict=True)):
                return "dominated"
        return ""


def least_mean(judged: Sequence[float], texts: int) -> float:
    """The least that the mean over ``texts`` texts can still be."""
    return sum(judged) / texts
