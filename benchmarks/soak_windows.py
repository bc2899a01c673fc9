"""When a fault was active, and which errors it explains: pure bookkeeping, for `soak.py`.

A window opens before its fault and closes when all is well again. An error of a request that lived at some time within
a window is expected, up to the window's allowance; every other error is not.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Window:
    """One fault. Times are seconds since the start of the load.

    Attributes:
        fault: its name.
        started: when it began.
        ended: when all was well again; None while it lasts.
        most_errors: errors that it explains; None for any number.
        recovery_seconds: from the end of the outage to the next right answer; None where none came.
        restart_seconds: of a killed server's start.
        note: how it went.
        errors: by kind, of the requests that it hit.
    """

    fault: str
    started: float
    most_errors: int | None = None
    ended: float | None = None
    recovery_seconds: float | None = 0.0
    restart_seconds: float = 0.0
    note: str = ""
    errors: Counter[str] = field(default_factory=Counter)

    def overlaps(self, started: float, ended: float) -> bool:
        """Whether something that lived from ``started`` to ``ended`` met the fault."""
        return self.started <= ended and (self.ended is None or started <= self.ended)

    @property
    def has_room(self) -> bool:
        """Whether it explains one more error."""
        return self.most_errors is None or self.errors.total() < self.most_errors


class Windows:
    """All windows of a run. Safe for use by several threads."""

    def __init__(self) -> None:
        self.all: list[Window] = []
        self._lock = threading.Lock()

    def open(self, window: Window) -> Window:
        """Begin one."""
        with self._lock:
            self.all.append(window)
        return window

    def touched(self, started: float, ended: float) -> bool:
        """Whether a request that lived so long met a fault."""
        with self._lock:
            return any(window.overlaps(started, ended) for window in self.all)

    def explain(self, kind: str, started: float, ended: float) -> Window | None:
        """Charge an error to a window that it fits; None: nothing explains it. Windows without allowance come first."""
        with self._lock:
            fitting = [window for window in self.all if window.overlaps(started, ended) and window.has_room]
            fitting.sort(key=lambda window: window.most_errors is not None)
            if fitting:
                fitting[0].errors[kind] += 1
            return fitting[0] if fitting else None


@dataclass(frozen=True)
class LatencyPart:
    """Time to the first token in one part of a run: seconds since the start, and of requests that met no fault."""

    begin: float
    end: float
    requests: int
    p50: float | None
    p99: float | None


def latency_parts(samples: Sequence[tuple[float, float, bool]], parts: int = 6) -> list[LatencyPart]:
    """p50 and p99 over equal parts of a run.

    Args:
        samples: seconds since the start, seconds to the first token, whether the request met a fault.
        parts: how many.
    """
    if not samples:
        return []
    length = max(when for when, _, _ in samples) / parts or 1.0
    rows = []
    for part in range(parts):
        taken = [ttft for when, ttft, hit in samples if not hit and min(int(when / length), parts - 1) == part]
        p50, p99 = (float(one) for one in np.percentile(taken, [50, 99])) if taken else (None, None)
        rows.append(LatencyPart(part * length, (part + 1) * length, len(taken), p50, p99))
    return rows


@dataclass(frozen=True)
class Growth:
    """Memory of one life of a server: mean of its first and last quarter, bytes."""

    server: str
    seconds: float
    first: float
    last: float

    @property
    def percent(self) -> float:
        """By how much the last quarter is above the first."""
        return 100 * (self.last / self.first - 1) if self.first else 0.0


def growth_of(server: str, samples: Sequence[tuple[float, float]]) -> Growth | None:
    """First against last quarter of ``samples``, seconds and bytes; None for fewer than 8."""
    if len(samples) < 8:
        return None
    quarter = len(samples) // 4
    first = sum(size for _, size in samples[:quarter]) / quarter
    last = sum(size for _, size in samples[-quarter:]) / quarter
    return Growth(server, samples[-1][0] - samples[0][0], first, last)
