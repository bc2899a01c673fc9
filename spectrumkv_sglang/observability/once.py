"""Log lines that repeat are shown once, then counted.

A chunk that cannot be tiered says so. A server that cannot tier any chunk would say so thousands of times a second, so
each cause is logged when it first occurs and then at most once per interval, with the number of repeats in between.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

_OVERFLOW_KEY = ("", "(other causes)")


@dataclass(slots=True)
class _Cause:
    logger: logging.Logger
    level: int
    message: str
    logged_at: float
    suppressed: int = 0


class OnceLog:
    """Rate limiter of log lines by cause, safe to call from any thread.

    interval_s: seconds between two lines of one cause.
    max_causes: causes remembered; while all of them were logged within the interval, new ones share one line.
    """

    def __init__(
        self, interval_s: float = 60.0, max_causes: int = 256, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval_s = interval_s
        self._max_causes = max_causes
        self._clock = clock
        self._causes: OrderedDict[tuple[str, str], _Cause] = OrderedDict()
        self._lock = threading.Lock()

    def log(self, logger: logging.Logger, level: int, cause_key: str, message: str) -> bool:
        """Logs `message`, or counts it when `cause_key` was logged within the interval. True when it was logged."""
        now = self._clock()
        lines: list[tuple[logging.Logger, int, str]] = []
        with self._lock:
            key = self._key_with_room((logger.name, cause_key), now, lines)
            cause = self._causes.get(key)
            written = cause is None or now - cause.logged_at >= self._interval_s
            if cause is None:
                cause = self._causes[key] = _Cause(logger, level, message, now)
            cause.logger, cause.level, cause.message = logger, level, message
            if written:
                lines.append((logger, level, _with_repeats(cause, now)))
                cause.logged_at, cause.suppressed = now, 0
                self._causes.move_to_end(key)
            else:
                cause.suppressed += 1
        for line_logger, line_level, line in lines:
            line_logger.log(line_level, "%s", line)
        return written

    def flush(self) -> None:
        """Writes one line for each cause that has unreported repeats. Called once at shutdown."""
        now = self._clock()
        with self._lock:
            pending = [
                (cause.logger, cause.level, _with_repeats(cause, now))
                for cause in self._causes.values()
                if cause.suppressed
            ]
            self._causes.clear()
        for logger, level, line in pending:
            logger.log(level, "%s", line)

    def _key_with_room(
        self, key: tuple[str, str], now: float, lines: list[tuple[logging.Logger, int, str]]
    ) -> tuple[str, str]:
        """The key to count under: `key`, or the overflow's while no older cause may be forgotten for it."""
        if key in self._causes or len(self._causes) < self._max_causes:
            return key
        oldest_key, oldest = next(iter(self._causes.items()))
        if now - oldest.logged_at < self._interval_s:
            return _OVERFLOW_KEY
        if oldest.suppressed:
            lines.append((oldest.logger, oldest.level, _with_repeats(oldest, now)))
        del self._causes[oldest_key]
        return key


def _with_repeats(cause: _Cause, now: float) -> str:
    if not cause.suppressed:
        return cause.message
    return f"{cause.message} ({cause.suppressed} more in the last {now - cause.logged_at:.0f} s)"


_process_log = OnceLog()


def log_once(logger: logging.Logger, level: int, cause_key: str, message: str) -> bool:
    """`OnceLog.log` on the log shared by the whole process: one line per (logger, cause) a minute."""
    return _process_log.log(logger, level, cause_key, message)


def flush_log_once() -> None:
    """Reports the repeats that no later line has reported yet; for the end of a process."""
    _process_log.flush()
