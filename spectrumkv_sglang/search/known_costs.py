"""What is known of every point before a text is judged: its bytes, exactly, and its speed, from the cells' speeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from spectrumkv_sglang.calibration.allocation import NominalChunk
from spectrumkv_sglang.search.codec_speeds import CodecSpeeds
from spectrumkv_sglang.search.pareto import Objectives
from spectrumkv_sglang.search.space import Point
from spectrumkv_sglang.search.wire_cost import WireCost, wire_cost


@dataclass(frozen=True)
class KnownCosts:
    """Costs of all points of a space, in the order of ``points``.

    Attributes:
        points: of the space, each once.
        wire: bytes of each.
        seconds_per_byte: 1 / S of each.
    """

    points: tuple[Point, ...]
    wire: tuple[WireCost, ...]
    seconds_per_byte: tuple[float, ...]

    def objectives(self, place: int, kl: float) -> Objectives:
        """Of the point at ``place`` if it loses ``kl``."""
        return Objectives(kl, self.wire[place].wire_ratio, self.seconds_per_byte[place])

    def coordinates(self, least_kl: float) -> NDArray[np.float64]:
        """float64 [points, 3] as `Objectives.coordinates`, as if no point lost anything."""
        return np.array([self.objectives(place, 0.0).coordinates(least_kl) for place in range(len(self.points))])


def known_costs(
    points: Sequence[Point],
    chunk: NominalChunk,
    speeds: CodecSpeeds,
    advance: Callable[[], None] = lambda: None,
) -> KnownCosts:
    """Costs of ``points`` in chunks like ``chunk``; ``advance`` is called after each."""
    bytes_of: dict[Point, WireCost] = {}
    wire, seconds = [], []
    for point in points:
        plain = replace(point, key_transform="identity", value_transform="identity")  # transforms take no bytes
        if plain not in bytes_of:
            bytes_of[plain] = wire_cost(plain, chunk)
        cost = bytes_of[plain]
        wire.append(cost)
        profile = point.profile(chunk.geometry.layers)
        seconds.append(speeds.seconds_per_byte(profile, chunk.geometry, cost.tier_shares))
        advance()
    return KnownCosts(tuple(points), tuple(wire), tuple(seconds))
