"""One choice for each of several groups, so that summed cost is least and summed bytes keep to a limit.

For a Lagrange multiplier m each group takes the choice of least ``cost + m * bytes``, which lies on the lower convex
hull of its (bytes, cost) points (Everett, "Generalized Lagrange multiplier method", 1963). As m falls, groups move up
their hulls one step at a time, in the order of cost saved per byte. So all answers for all limits form one chain of
steps, and the answer for a limit is the longest part of the chain that keeps to it: no other choice of at most as many
bytes costs less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Group:
    """What one group may take.

    Attributes:
        size: bytes of each choice, integers [choices].
        cost: of each choice, >= 0, float64 [choices].
    """

    size: NDArray[np.int64]
    cost: NDArray[np.float64]

    def hull(self) -> list[int]:
        """Choices on the lower convex hull, smallest first: each larger, less costly, and by ever less a byte.

        Of choices of equal size and cost the first counts.
        """
        hull: list[int] = []
        for choice in sorted(range(len(self.size)), key=lambda choice: (self.size[choice], self.cost[choice], choice)):
            if hull and self.cost[choice] >= self.cost[hull[-1]]:
                continue
            while len(hull) >= 2 and self.saved(hull[-2], hull[-1]) <= self.saved(hull[-1], choice):
                hull.pop()
            hull.append(choice)
        return hull

    def saved(self, small: int, large: int) -> float:
        """Cost saved per byte by a larger choice."""
        return float((self.cost[small] - self.cost[large]) / (self.size[large] - self.size[small]))


@dataclass(frozen=True)
class _Step:
    saved: float
    group: int
    choice: int


class Chain:
    """All answers, from the smallest on. Groups and choices that save alike go in their order: the answer is unique."""

    def __init__(self, groups: Sequence[Group]) -> None:
        hulls = [group.hull() for group in groups]
        self._smallest = [hull[0] for hull in hulls]
        steps = [
            _Step(group.saved(hull[place], hull[place + 1]), number, hull[place + 1])
            for number, (group, hull) in enumerate(zip(groups, hulls, strict=True))
            for place in range(len(hull) - 1)
        ]
        self._steps = sorted(steps, key=lambda step: -step.saved)

    def smallest(self) -> list[int]:
        """The choice of each group that takes the fewest bytes."""
        return list(self._smallest)

    def best(self, fits: Callable[[list[int]], bool]) -> list[int]:
        """The longest part of the chain that fits, and then further steps, in order, that fit one by one.

        Args:
            fits: whether a choice for each group keeps to the limit. It must hold for `smallest`.
        """
        taken, too_many = 0, len(self._steps) + 1
        while too_many - taken > 1:
            middle = (taken + too_many) // 2
            if fits(self.after(middle)):
                taken = middle
            else:
                too_many = middle
        chosen = self.after(taken)
        # The step that did not fit leaves bytes. A group that stays behind takes no later step: its next one is larger.
        behind = set()
        for step in self._steps[taken:]:
            if step.group in behind:
                continue
            before, chosen[step.group] = chosen[step.group], step.choice
            if not fits(chosen):
                chosen[step.group] = before
                behind.add(step.group)
        return chosen

    def after(self, steps: int) -> list[int]:
        """The answer after the first ``steps`` steps."""
        chosen = self.smallest()
        for step in self._steps[:steps]:
            chosen[step.group] = step.choice
        return chosen
