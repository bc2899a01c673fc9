"""Token tiers: how much a token matters, decided per request."""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

TierArray = NDArray[np.uint8]
"""One tier a row (token slot of the chunk), uint8 [rows], values of :class:`Tier`."""


class Tier(enum.IntEnum):
    """Tier of a token. The number is the wire value and the first axis of a precision table."""

    HIGH = 0
    MID = 1
    LOW = 2

    @property
    def label(self) -> str:
        """Lower-case name, as profile files, configuration, metrics and logs spell it."""
        return self.name.lower()

    @classmethod
    def from_label(cls, label: str) -> Tier:
        """Tier named ``label`` ("high", "mid" or "low"); ``ValueError`` naming the choices otherwise."""
        try:
            return cls[label.upper()]
        except KeyError:
            raise ValueError(f"unknown tier {label!r}: choose from {', '.join(tier.label for tier in cls)}") from None


def require_high(tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
    """``tiers`` if HIGH is among them; ``ValueError`` otherwise."""
    if Tier.HIGH not in tiers:
        raise ValueError("must contain high: sink tokens always travel in it")
    return tiers


TIER_COUNT = len(Tier)
