"""Fixed-size slots with generations: which are free, lent, or in quarantine. No memory, no threads of its own.

The same bookkeeping serves decode's landing slots and prefill's staging slots. A slot's generation grows each time
its content stops being valid, so bytes or messages that speak of an older generation are recognised and refused.
After a failed or timed-out write the engine may still write into (or read from) a slot ("ghost write"), so the
slot is kept out of use for a while before it is lent again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """One lent slot: its index and the generation under which it was lent."""

    index: int
    generation: int


@dataclass(frozen=True)
class SlotCounts:
    """How many slots are in each state."""

    free: int
    in_use: int
    quarantined: int


class SlotPool:
    """Thread-safe pool of ``count`` slots.

    Args:
        count: number of slots (>= 1).
        quarantine_seconds: how long a quarantined slot stays out of use.
        clock: monotonic seconds; injectable for tests.
    """

    def __init__(self, count: int, quarantine_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        if count < 1:
            raise ValueError(f"a slot pool needs at least 1 slot, got {count}")
        self._generations = [1] * count
        self._free: deque[int] = deque(range(count))
        self._lent: dict[int, int] = {}
        self._quarantine: deque[tuple[float, int]] = deque()
        self._quarantine_seconds = quarantine_seconds
        self._clock = clock
        self._available = threading.Condition()

    def lend(self, wanted: int, timeout: float = 0.0) -> list[Slot]:
        """Lend up to ``wanted`` slots; waits up to ``timeout`` seconds for the first one. May return an empty list.

        Returns early when all slots rest in quarantine until after ``timeout``: nobody can give one back.
        """
        deadline = self._clock() + timeout
        with self._available:
            while True:
                self._end_quarantines()
                if self._free:
                    break
                remaining = deadline - self._clock()
                if remaining <= 0 or (not self._lent and self._quarantine[0][0] > deadline):
                    return []
                self._available.wait(min(remaining, 0.05))
            lent: list[Slot] = []
            while self._free and len(lent) < wanted:
                index = self._free.popleft()
                self._lent[index] = self._generations[index]
                lent.append(Slot(index, self._generations[index]))
            return lent

    def is_current(self, slot: Slot) -> bool:
        """Whether ``slot`` is lent under exactly this generation."""
        with self._available:
            return self._lent.get(slot.index) == slot.generation

    def renew(self, slot: Slot) -> Slot:
        """Keep the slot lent but under a new generation (its content has been consumed).

        Raises:
            KeyError: the slot is not lent under this generation.
        """
        with self._available:
            self._require(slot)
            self._generations[slot.index] += 1
            self._lent[slot.index] = self._generations[slot.index]
            return Slot(slot.index, self._generations[slot.index])

    def give_back(self, slot: Slot) -> None:
        """Return a slot whose last write is known to have ended. Raises KeyError like :meth:`renew`."""
        with self._available:
            self._require(slot)
            del self._lent[slot.index]
            self._generations[slot.index] += 1
            self._free.append(slot.index)
            self._available.notify_all()

    def quarantine(self, slot: Slot) -> None:
        """Take a slot out of use whose last write may still be going on. Raises KeyError like :meth:`renew`."""
        with self._available:
            self._require(slot)
            del self._lent[slot.index]
            self._generations[slot.index] += 1
            self._quarantine.append((self._clock() + self._quarantine_seconds, slot.index))

    def counts(self) -> SlotCounts:
        with self._available:
            self._end_quarantines()
            return SlotCounts(len(self._free), len(self._lent), len(self._quarantine))

    def _end_quarantines(self) -> None:
        now = self._clock()
        while self._quarantine and self._quarantine[0][0] <= now:
            self._free.append(self._quarantine.popleft()[1])

    def _require(self, slot: Slot) -> None:
        if self._lent.get(slot.index) != slot.generation:
            raise KeyError(f"slot {slot.index} is not lent under generation {slot.generation}")
