"""What the online controller chooses from, and which choice is fastest at a bandwidth.

A candidate moves V native bytes in T = V / S + V b / B. Over x = 1 / B that is a straight line, a + b x seconds a byte
with a = 1 / S: the fastest candidates of all bandwidths are the lower envelope of a few lines, a choice one bisection.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """One way to send a room's KV.

    Attributes:
        name: of metrics and logs.
        b: wire bytes over native bytes that it is expected to take.
        kl: expected KL divergence from native, nats a token; what it costs in accuracy.
        speed: S that is assumed before any was measured, native bytes a second through pack and unpack; None: as fast
            as what was measured of the others.
    """

    name: str
    b: float
    kl: float
    speed: float | None = None


NATIVE = Candidate("native", b=1.0, kl=0.0, speed=float("inf"))
"""SGLang's own path: no codec, every byte. Always possible, and never less accurate than a request asks for."""


class Envelope:
    """Lower envelope of the lines a + b x, x > 0, of some candidates.

    Args:
        lines: (a, b) of each candidate: seconds a native byte that no bandwidth changes, wire over native bytes.
    """

    def __init__(self, lines: Sequence[tuple[float, float]]) -> None:
        if not lines:
            raise ValueError("an envelope needs at least one line")
        self._members: list[int] = []
        self._from: list[float] = []  # x from which on each member but the first is lowest
        # From fast links (small x: the least a) to slow ones (the least b); of equal a the lower b is always better.
        for index in sorted(range(len(lines)), key=lambda i: (lines[i][0], lines[i][1], i)):
            a, b = lines[index]
            while self._members:
                last_a, last_b = lines[self._members[-1]]
                if b >= last_b:
                    break
                crossing = (a - last_a) / (last_b - b)
                if crossing <= (self._from[-1] if self._from else 0.0):
                    self._members.pop()
                    if self._from:
                        self._from.pop()
                    continue
                self._members.append(index)
                self._from.append(crossing)
                break
            else:
                self._members.append(index)

    @property
    def members(self) -> tuple[int, ...]:
        """Positions of the candidates that are fastest at some bandwidth, for the fastest links first."""
        return tuple(self._members)

    @property
    def breakpoints(self) -> tuple[float, ...]:
        """x at which each member hands over to the next."""
        return tuple(self._from)

    def fastest(self, x: float) -> int:
        """Position of the candidate with the lowest line at ``x`` = 1 / B."""
        return self._members[bisect_right(self._from, x)]

    def neighbours(self, x: float) -> tuple[int, ...]:
        """The fastest at ``x`` and those beside it on the envelope: two or three, or the only one."""
        at = bisect_right(self._from, x)
        return tuple(self._members[max(0, at - 1) : at + 2])
