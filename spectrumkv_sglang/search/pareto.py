"""Which points no other one beats, and how much of the box between best and worst they rule out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Objectives:
    """What a profile costs; less is better everywhere.

    Attributes:
        kl: KL divergence from native, nats a token.
        wire_ratio: b, wire / native bytes: 1 / the compression ratio.
        seconds_per_byte: 1 / S, packing and unpacking a native byte.
    """

    kl: float
    wire_ratio: float
    seconds_per_byte: float

    def coordinates(self, least_kl: float) -> tuple[float, float, float]:
        """What points are compared by: logarithms of KL and of time, since both matter by factors, and b.

        A KL below ``least_kl`` counts as ``least_kl``: differences down there are nobody's gain.
        """
        return math.log10(max(self.kl, least_kl)), self.wire_ratio, math.log10(self.seconds_per_byte)


def dominates(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether ``a`` is nowhere worse than ``b`` and better somewhere."""
    return all(x <= y for x, y in zip(a, b, strict=True)) and tuple(a) != tuple(b)


def frontier(coordinates: Sequence[Sequence[float]]) -> list[int]:
    """Positions of the points that none dominates, in order; of equal points the first."""
    points = np.asarray(coordinates, dtype=float)
    kept = []
    for place, point in enumerate(points):
        as_good = (points <= point).all(axis=1)
        better = (points[as_good] < point).any(axis=1)
        if not better.any() and np.flatnonzero(as_good)[0] == place:
            kept.append(place)
    return kept


@dataclass(frozen=True)
class Box:
    """Best and worst coordinates that count.

    Attributes:
        ideal: least value of each coordinate.
        worst: largest value; points at it or beyond count nothing.
    """

    ideal: tuple[float, ...]
    worst: tuple[float, ...]

    @classmethod
    def around(cls, coordinates: Sequence[Sequence[float]]) -> Box:
        """The smallest box with all points in it."""
        points = np.asarray(coordinates, dtype=float)
        return cls(tuple(points.min(axis=0).tolist()), tuple(points.max(axis=0).tolist()))

    def hypervolume(self, coordinates: Sequence[Sequence[float]]) -> float:
        """Share of the box that the points dominate, 0 to 1. Axes without extent do not count."""
        span = np.asarray(self.worst) - np.asarray(self.ideal)
        axes = span > 0
        if not coordinates or not axes.any():
            return 0.0
        scaled = (np.asarray(coordinates, dtype=float) - np.asarray(self.ideal))[:, axes] / span[axes]
        return _dominated(np.clip(scaled, 0.0, 1.0))


def _dominated(points: NDArray[np.float64]) -> float:
    """Volume of the unit cube's part that ``points`` [n, axes] dominate."""
    if points.shape[1] == 1:
        return float(1.0 - points.min())
    points = points[np.argsort(points[:, -1], kind="stable")]
    heights = np.append(points[:, -1], 1.0)
    total, area = 0.0, 0.0
    # Slabs along the last axis: in each, what the points up to there dominate on the others.
    for count in range(1, len(points) + 1):
        thickness = heights[count] - heights[count - 1]
        if thickness > 0:
            area = _dominated(points[:count, :-1]) if points.shape[1] > 3 else _area(points[:count, :-1])
            total += area * float(thickness)
    return total


def _area(points: NDArray[np.float64]) -> float:
    """As `_dominated`, of points [n, 1 or 2]: the steps of a staircase."""
    if points.shape[1] == 1:
        return float(1.0 - points.min())
    ordered = points[np.argsort(points[:, 0], kind="stable")]
    widths = np.diff(np.append(ordered[:, 0], 1.0))
    return float((widths * (1.0 - np.minimum.accumulate(ordered[:, 1]))).sum())


def choose_spread(coordinates: Sequence[Sequence[float]], count: int, box: Box) -> list[int]:
    """At most ``count`` positions that together dominate most of the box, taken one after the other, in order."""
    chosen: list[int] = []
    left = list(range(len(coordinates)))
    while left and len(chosen) < count:
        taken = [coordinates[place] for place in chosen]
        best = max(left, key=lambda place: box.hypervolume([*taken, coordinates[place]]))
        chosen.append(best)
        left.remove(best)
    return sorted(chosen)


def as_points(values: ArrayLike) -> list[tuple[float, ...]]:
    """Rows of an array as tuples."""
    return [tuple(row) for row in np.asarray(values, dtype=float).tolist()]
