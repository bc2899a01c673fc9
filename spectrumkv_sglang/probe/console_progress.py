"""How far a probe is: bars on a terminal, a line every 15 s in a file."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from spectrumkv_sglang.launch.processes import PROGRESS_SECONDS
from spectrumkv_sglang.probe.options import ProbeProgress


class ConsoleProgress(ProbeProgress):
    """Progress bars and notes on a console; close it at the end.

    A console that is no terminal shows no bars: there a thread says how many steps of a stage are done, however long
    a single step takes, and the last step says what the stage took.

    Args:
        console: where it is shown.
        every_seconds: between two lines where it is no terminal.
    """

    def __init__(self, console: Console, every_seconds: float = PROGRESS_SECONDS) -> None:
        self._console, self._every_seconds = console, every_seconds
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._bars.start()
        self._stage: _Stage | None = None
        self._closed = threading.Event()
        self._ticker: threading.Thread | None = None
        if not console.is_terminal:
            self._ticker = threading.Thread(target=self._tick, name="spectrumkv-probe-progress", daemon=True)
            self._ticker.start()

    def note(self, text: str) -> None:
        self._bars.console.print(f"[dim]{escape(text)}[/]", highlight=False)

    def begin(self, name: str, steps: int) -> Callable[[], None]:
        task = self._bars.add_task(name, total=steps)
        stage = self._stage = _Stage(name, steps)

        def advance() -> None:
            self._bars.advance(task)
            stage.done += 1
            if stage.done == steps:
                self._stage = None
                if self._ticker is not None:
                    self.note(f"{name} done: {steps} in {stage.seconds:.0f} s")

        return advance

    def close(self) -> None:
        """Leave the finished bars on the screen."""
        self._closed.set()
        if self._ticker is not None:
            self._ticker.join()
        self._bars.stop()

    def _tick(self) -> None:
        while not self._closed.wait(self._every_seconds):
            stage = self._stage
            if stage is not None:
                self.note(f"{stage.name} {stage.done} of {stage.steps}, {stage.seconds:.0f} s so far")


class _Stage:
    """One stage: ``done`` of ``steps`` steps, and the seconds since it began."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps, self.done = name, steps, 0
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started
