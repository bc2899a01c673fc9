"""How far an evaluation is and how long it will still take, on a terminal and in a log file."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Advance = Callable[[float], None]
"""Called with the work that has been done since the last call, in the units of the total."""

_LINE_EVERY_SECONDS = 60.0
_SPEED_OVER_SECONDS = 600.0


class RunProgress:
    """One bar over the whole run. A console that is no terminal gets a line a minute instead. Close it at the end.

    Args:
        console: where it is shown.
        clock: seconds that only grow.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            speed_estimate_period=_SPEED_OVER_SECONDS,
            disable=not console.is_terminal,
        )
        self._phase = ""
        self._total, self._done = 0.0, 0.0
        self._started, self._last_line = 0.0, 0.0
        self._bars.start()
        self._task = self._bars.add_task("", total=None)

    def note(self, text: str) -> None:
        """Say something in between."""
        self._bars.console.print(f"[dim]{escape(text)}[/]", highlight=False)

    def expect(self, total: float) -> None:
        """The work begins, ``total`` units of it."""
        self._total = total
        self._started = self._last_line = self._clock()
        self._bars.reset(self._task, total=total)

    def phase(self, name: str) -> None:
        """What follows is called ``name``."""
        self._phase = name
        self._bars.update(self._task, description=escape(name))

    def advance(self, work: float) -> None:
        """``work`` units more are done."""
        self._done += work
        self._bars.advance(self._task, work)
        now = self._clock()
        if not self._console.is_terminal and now - self._last_line >= _LINE_EVERY_SECONDS:
            self._last_line = now
            self.note(f"{self._phase}: {self._share():.0%} of the run, {self._left(now)} left")

    def close(self) -> None:
        """Leave the bar on the screen."""
        self._bars.stop()

    def _share(self) -> float:
        return min(1.0, self._done / self._total) if self._total else 0.0

    def _left(self, now: float) -> str:
        share = self._share()
        if share == 0:
            return "unknown time"
        seconds = (now - self._started) * (1 - share) / share
        return f"about {seconds / 60:.0f} min" if seconds >= 90 else f"about {seconds:.0f} s"
