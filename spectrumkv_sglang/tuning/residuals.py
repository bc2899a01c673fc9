"""What measured transfers took beyond the straight lines, and which candidates broke their targets (KVServe's bandit).

T = V / S + V b / B knows neither fixed costs nor that stages overlap. Both depend on the candidate and on the size of
the transfer, so the difference is kept for each of these, in seconds a native byte.
"""

from __future__ import annotations

import math
from collections import deque

RESIDUAL_WEIGHT = 0.3
FADING = 0.98
"""Factor, a decision, of what is held against candidates that were not taken: they get another chance."""
VIOLATION_WINDOW = 10
MOST_VIOLATIONS = 3
COOLDOWN_DECISIONS = 8


def size_class(native_bytes: float) -> int:
    """Transfers within a factor of 4 of each other fall into one class or two neighbouring ones."""
    return math.floor(math.log(max(1.0, native_bytes), 4))


class Residuals:
    """Measured minus predicted seconds a native byte, by (candidate name, size class). Not thread-safe."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, int], float] = {}

    def add(self, name: str, native_bytes: float, seconds: float, *, predicted: float = math.inf) -> None:
        """Take in that ``native_bytes`` took ``seconds`` longer than ``predicted``, or shorter: negative.

        The first time counts as at most twice what was predicted: one stall must not keep a candidate from a second.
        """
        key = (name, size_class(native_bytes))
        before = self._values.get(key)
        if before is None:
            self._values[key] = min(seconds, predicted) / native_bytes
        else:
            self._values[key] = before + RESIDUAL_WEIGHT * (seconds / native_bytes - before)

    def seconds(self, name: str, native_bytes: float) -> float:
        """Expected difference for a transfer of ``native_bytes``; 0 where none was measured."""
        return self._values.get((name, size_class(native_bytes)), 0.0) * native_bytes

    def fade(self, taken: str) -> None:
        """A decision took ``taken``."""
        for key in self._values:
            if key[0] != taken:
                self._values[key] *= FADING

    def clear(self) -> None:
        """The link has another rate: what overlapped before may not overlap now."""
        self._values.clear()


class Cooldowns:
    """Candidates that missed their target too often rest for some decisions. Not thread-safe."""

    def __init__(self) -> None:
        self._recent: dict[str, deque[bool]] = {}
        self._left: dict[str, int] = {}

    def add(self, name: str, violated: bool) -> None:
        """Take in whether a transfer took longer than it might have."""
        recent = self._recent.setdefault(name, deque(maxlen=VIOLATION_WINDOW))
        recent.append(violated)
        if len(recent) == VIOLATION_WINDOW and sum(recent) >= MOST_VIOLATIONS:
            self._left[name] = COOLDOWN_DECISIONS
            recent.clear()

    def cooling(self, name: str) -> bool:
        """Whether ``name`` rests in the decision at hand."""
        return self._left.get(name, 0) > 0

    def decided(self) -> None:
        """A decision was made."""
        self._left = {name: left - 1 for name, left in self._left.items() if left > 1}

    def clear(self) -> None:
        """The link has another rate: targets that were missed may be met now."""
        self._recent.clear()
        self._left.clear()
