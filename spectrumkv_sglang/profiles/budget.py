"""Token tiers under a byte budget.

Minimise sum(importance x distortion of the tier) subject to sum(bytes of the tier) <= budget. On the lower convex hull
of (bytes, distortion) the optimum is greedy: take upgrade steps by importance x distortion saved per byte, one Lagrange
multiplier, until the next one does not fit. All assignments for one chunk form one chain, the ``UpgradeLadder``: a
larger budget only ever moves tokens up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spectrumkv_sglang.profiles.tier import TIER_COUNT, Tier, TierArray


@dataclass(frozen=True)
class TierAssignment:
    """Result of :func:`assign_tiers`."""

    tiers: TierArray
    cost_bytes: int
    """Sum of the tiers' bytes over all rows."""
    reachable: bool
    """False: even the cheapest assignment exceeds the budget, and this is that assignment."""


def assign_tiers(
    importance: ArrayLike,
    cost_bytes: ArrayLike,
    distortion: ArrayLike,
    budget_bytes: int,
    forced_high: ArrayLike,
    usable_tiers: Iterable[Tier],
) -> TierAssignment:
    """Best tiers for the rows of a chunk within ``budget_bytes``.

    Args:
        importance: ``[rows]``; what is negative or not finite counts as 0.
        cost_bytes: integers ``[tiers]``, bytes of one row in each tier.
        distortion: ``[tiers]``, expected error of a row in each tier.
        budget_bytes: upper bound of the summed cost.
        forced_high: bool ``[rows]``; these rows are HIGH whatever the budget.
        usable_tiers: tiers that may be given, HIGH among them.

    Monotone: with a larger budget no row gets a lower tier. A more important row never gets a lower tier than a less
    important one that is not forced; among equals the earlier row comes first.
    """
    ladder = UpgradeLadder(importance, cost_bytes, distortion, forced_high, usable_tiers)
    steps = ladder.steps_within(budget_bytes)
    return TierAssignment(ladder.tiers(steps), ladder.cost(steps), reachable=ladder.cost(0) <= budget_bytes)


class UpgradeLadder:
    """All budget-optimal assignments of one chunk, from the cheapest (0 steps) to the best (``steps`` steps).

    One step moves one row to the next tier of the hull. Arguments as for :func:`assign_tiers`; rows in
    ``preferred`` (bool ``[rows]``) take their first step before all others, and their last ones, by their own
    importance, among the others'.
    """

    def __init__(
        self,
        importance: ArrayLike,
        cost_bytes: ArrayLike,
        distortion: ArrayLike,
        forced_high: ArrayLike,
        usable_tiers: Iterable[Tier],
        preferred: ArrayLike | None = None,
    ) -> None:
        weights = np.asarray(importance, dtype=np.float64)
        self._tier_cost = np.asarray(cost_bytes, dtype=np.int64)
        tier_distortion = np.asarray(distortion, dtype=np.float64)
        forced = np.asarray(forced_high, dtype=bool)
        preferred_rows = np.zeros(weights.shape, bool) if preferred is None else np.asarray(preferred, dtype=bool)
        if weights.ndim != 1 or forced.shape != weights.shape or preferred_rows.shape != weights.shape:
            raise ValueError(
                f"importance, forced and preferred rows must be [rows], got shapes {weights.shape}, {forced.shape} "
                f"and {preferred_rows.shape}"
            )
        if self._tier_cost.shape != (TIER_COUNT,) or tier_distortion.shape != (TIER_COUNT,):
            raise ValueError(f"cost and distortion must have {TIER_COUNT} entries, one a tier")
        usable = sorted(set(usable_tiers))
        if Tier.HIGH not in usable:
            raise ValueError("usable tiers must contain HIGH")

        weights = np.where(np.isfinite(weights) & (weights > 0), weights, 0.0)
        self._hull = _lower_hull(usable, self._tier_cost, tier_distortion)
        hull_cost = self._tier_cost[self._hull]
        step_bytes = np.diff(hull_cost)
        gain_per_byte = -np.diff(tier_distortion[self._hull]) / step_bytes

        self._forced = forced
        free = np.flatnonzero(~forced)
        free = free[_descending(weights[free])]
        is_preferred = preferred_rows[free]
        # Row-major [hull step, row by importance]: ties keep a row's own step order and the order of importance.
        value = gain_per_byte[:, None] * weights[free][None, :]
        if len(step_bytes):
            value[0, is_preferred] = np.inf
        order = np.argsort(-value, axis=None, kind="stable")
        self._step_rows = np.tile(free, len(step_bytes))[order]
        steps = np.repeat(step_bytes, len(free))[order]
        base = int(forced.sum()) * int(self._tier_cost[Tier.HIGH]) + len(free) * int(hull_cost[0])
        self._cost = np.concatenate([[base], base + np.cumsum(steps)])

    @property
    def rows(self) -> int:
        """Number of rows of the chunk."""
        return len(self._forced)

    @property
    def steps(self) -> int:
        """Number of upgrade steps up to the best assignment."""
        return len(self._step_rows)

    def cost(self, steps: int) -> int:
        """Bytes of the assignment after the first ``steps`` upgrades."""
        return int(self._cost[steps])

    def steps_within(self, budget_bytes: int) -> int:
        """Most upgrades whose assignment costs at most ``budget_bytes``; 0 also if even the cheapest costs more."""
        return max(0, int(np.searchsorted(self._cost, budget_bytes, side="right")) - 1)

    def tiers(self, steps: int) -> TierArray:
        """Tiers uint8 ``[rows]`` after the first ``steps`` upgrades."""
        climbed = np.bincount(self._step_rows[:steps], minlength=len(self._forced))
        return np.where(self._forced, np.uint8(Tier.HIGH), self._hull.astype(np.uint8)[climbed])

    def step(self, number: int) -> tuple[int, Tier]:
        """The row that upgrade ``number``, counted from 0, moves, and the tier that it moves to."""
        row = int(self._step_rows[number])
        climbed = int(np.count_nonzero(self._step_rows[:number] == row))
        return row, Tier(int(self._hull[climbed + 1]))


def _descending(weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """Order from the largest weight to the smallest, all >= 0; among equals the earlier row comes first.

    Observed importance is float32. Its bits and the row number make one integer that sorts as both do, and integers
    sort several times faster than an index does.
    """
    narrow = weights.astype(np.float32)
    if len(weights) >= 2**32 or not np.array_equal(narrow, weights):
        return np.argsort(-weights, kind="stable")
    keys = (~narrow.view(np.uint32)).astype(np.uint64) << np.uint64(32)
    keys |= np.arange(len(keys), dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _lower_hull(usable: list[Tier], cost: NDArray[np.int64], distortion: NDArray[np.float64]) -> NDArray[np.int64]:
    """Tiers on the lower convex hull of (cost, distortion), cheapest first: strictly dearer, better, and by ever less
    a byte. Of tiers with equal cost the better, then the higher one counts."""
    hull: list[Tier] = []
    for tier in sorted(usable, key=lambda tier: (cost[tier], distortion[tier], tier)):
        if hull and distortion[tier] >= distortion[hull[-1]]:
            continue
        while len(hull) >= 2 and _gain(hull[-2], hull[-1], cost, distortion) <= _gain(hull[-1], tier, cost, distortion):
            hull.pop()
        hull.append(tier)
    return np.array(hull, dtype=np.int64)


def _gain(low: Tier, high: Tier, cost: NDArray[np.int64], distortion: NDArray[np.float64]) -> float:
    """Distortion saved per byte by moving from ``low`` to the dearer ``high``."""
    return float((distortion[low] - distortion[high]) / (cost[high] - cost[low]))
