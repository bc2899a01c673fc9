"""Goodput of a link, from the writes that went over it anyway.

Writes overlap, within a chunk and between rooms: what counts is the time in which at least one was under way, and the
bytes that all of them moved in it. ``LinkClock`` measures that, ``LinkBandwidth`` makes an estimate of it that forgets
a former rate quickly and refuses what no link can do.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

MOST_BYTES_PER_SECOND = 10e12 / 8
"""10 Tb/s: no link that a transfer engine writes over is faster."""
LEAST_BYTES_PER_SECOND = 1.0
"""No write ends in time on a slower one."""
SAMPLE_BYTES = 1024 * 1024
SAMPLE_SECONDS = 0.02
"""Smaller and shorter windows are added up until they come to one of these: they show latency, not the rate."""
SAMPLE_WEIGHT = 0.4
CHANGE_FACTOR = 2.0
"""Two samples in a row that are off by this much, to the same side, are a change of rate and not noise."""
MOST_REFUSED = 3
"""Refused samples in a row after which an estimate counts for nothing: its source is broken."""
MOST_PEERS = 1024

_LATE_SECONDS = 0.002
_LATE_SHARE = 0.1
_CUT_FACTOR = 4


class _Off(NamedTuple):
    """A last sample that was off, and the estimate that it was off from."""

    size: float
    seconds: float
    rate: float
    upwards: bool


class LinkBandwidth:
    """Estimated goodput of one link, bytes a second. Not thread-safe.

    Args:
        max_age_s: seconds after which the last sample says nothing any more.
    """

    def __init__(self, max_age_s: float) -> None:
        self._max_age_s = max_age_s
        self._rate: float | None = None
        self._sampled_at = -math.inf
        self._bytes, self._seconds = 0.0, 0.0  # not yet a sample
        self._off: _Off | None = None
        self._refused = 0
        self.regime = 0
        """Grows whenever the rate is a new one: what was learnt at the former does not hold."""

    def add(self, size: float, seconds: float, now: float) -> bool:
        """Take in that ``size`` bytes took ``seconds``; False: refused as absurd. ``now``: monotonic seconds."""
        if now < self._sampled_at or not math.isfinite(now):
            self._forget()  # the clock went back: nobody knows how old the estimate is
            return False
        if not (math.isfinite(size) and math.isfinite(seconds) and size > 0 and seconds > 0):
            return self._refuse()
        if not LEAST_BYTES_PER_SECOND <= size / seconds <= MOST_BYTES_PER_SECOND:
            return self._refuse()
        self._refused = 0
        unknown = self.estimate(now) is None
        if unknown and self._rate is not None:
            self._forget()  # too old
        self._bytes += size
        self._seconds += seconds
        if not unknown:
            self._sampled_at = now
        if self._bytes >= SAMPLE_BYTES or self._seconds >= SAMPLE_SECONDS:
            size, seconds, self._bytes, self._seconds = self._bytes, self._seconds, 0.0, 0.0
            if unknown:
                self._start(size, seconds, now)
            else:
                self._take(size, seconds)
        return True

    def estimate(self, now: float) -> float | None:
        """Bytes a second; None: no sample yet, only old ones, or a source that cannot be trusted."""
        if self._rate is None or not 0 <= now - self._sampled_at <= self._max_age_s:
            return None
        return self._rate

    def _start(self, size: float, seconds: float, now: float) -> None:
        self._rate, self._sampled_at, self._off = size / seconds, now, None
        self._bytes, self._seconds = 0.0, 0.0
        self.regime += 1

    def _take(self, size: float, seconds: float) -> None:
        rate = self._rate or size / seconds
        # The second one is held against the rate before the first, which has moved the estimate by now.
        off_from = self._off.rate if self._off is not None else rate
        ratio = size / seconds / off_from
        off = not 1 / CHANGE_FACTOR < ratio < CHANGE_FACTOR
        if off and self._off is not None and self._off.upwards == (ratio > 1):
            self._start(size + self._off.size, seconds + self._off.seconds, self._sampled_at)
            return
        self._off = _Off(size, seconds, rate, ratio > 1) if off else None
        self._rate = rate * (size / seconds / rate) ** SAMPLE_WEIGHT

    def _refuse(self) -> bool:
        self._refused += 1
        if self._refused >= MOST_REFUSED:
            self._forget()
        return False

    def _forget(self) -> None:
        self._rate, self._sampled_at, self._off, self._refused = None, -math.inf, None, 0
        self._bytes, self._seconds = 0.0, 0.0


WindowSink = Callable[[str, float, float, bool], None]
"""Told of (peer, bytes, seconds, whether SGLang's own path was part of it)."""


@dataclass
class _Window:
    opened: float
    active: int = 0
    under_way: float = 0.0  # bytes of active writes
    before: float = 0.0  # bytes of the writes that were active when the window opened
    done: float = 0.0
    native: bool = False
    spoiled: bool = False


class LinkClock:
    """Measures how long each peer's link was busy and what it moved meanwhile. Thread-safe.

    A window opens with the first write and closes when none is under way. Where its last end was noticed late, because
    the sender was packing, the link may have rested in it, and it says nothing.
    """

    def __init__(self, sink: WindowSink) -> None:
        self._sink = sink
        self._windows: OrderedDict[str, _Window] = OrderedDict()
        self._lock = threading.Lock()

    def started(self, peer: str, size: float, now: float, *, native: bool = False) -> None:
        """A write of ``size`` bytes begins at ``now``, monotonic seconds; ``native``: SGLang's own, of many pieces."""
        with self._lock:
            window = self._windows.get(peer)
            if window is None or window.active == 0:
                window = self._windows[peer] = _Window(now)
                self._windows.move_to_end(peer)
                while len(self._windows) > MOST_PEERS:
                    self._windows.popitem(last=False)
            window.active += 1
            window.under_way += size
            window.native = window.native or native

    def ended(self, peer: str, size: float, now: float, seen_going: float) -> None:
        """A write has ended by ``now``; at ``seen_going`` it was still under way."""
        with self._lock:
            window = self._closing(peer, size)
            if window is None:
                return
            window.done += size
            seconds = now - window.opened
            late = now - seen_going > max(_LATE_SECONDS, _LATE_SHARE * seconds)
            if window.active and (late or window.done < _CUT_FACTOR * window.under_way):
                return
            # Writes that go on at a cut, or went on at the last, are half done on average.
            moved = window.done + (window.under_way - window.before) / 2
            told = not late and not window.spoiled
            if window.active:  # a link that never rests: cut here
                self._windows[peer] = _Window(
                    now, window.active, window.under_way, window.under_way, native=window.native
                )
        if told:
            self._sink(peer, moved, seconds, window.native)

    def failed(self, peer: str, size: float) -> None:
        """A write has failed: how much of it went over the link is not known."""
        with self._lock:
            window = self._closing(peer, size)
            if window is not None:
                window.spoiled = True

    def _closing(self, peer: str, size: float) -> _Window | None:
        window = self._windows.get(peer)
        if window is None or window.active == 0:
            return None
        window.active -= 1
        window.under_way = max(0.0, window.under_way - size) if window.active else 0.0
        return window
