"""A long run says how far it is and how long it will still take."""

from __future__ import annotations

import io

from rich.console import Console

from spectrumkv_sglang.evaluation.progress import RunProgress


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_log_gets_a_line_a_minute_with_the_time_left() -> None:
    out, clock = io.StringIO(), Clock()
    progress = RunProgress(Console(file=out, width=100), clock)
    clock.now = 500.0  # loading the model is no part of the work
    progress.expect(1000.0)
    progress.phase("text, 512 tokens")
    for second in range(100):
        clock.now = 500.0 + second
        progress.advance(1.0)
    progress.close()
    lines = [line for line in out.getvalue().splitlines() if line.strip()]
    assert lines == ["text, 512 tokens: 6% of the run, about 15 min left"]


def test_a_terminal_gets_one_bar() -> None:
    out = io.StringIO()
    progress = RunProgress(Console(file=out, width=100, force_terminal=True, color_system=None))
    progress.expect(10.0)
    progress.phase("needles, 512 tokens")
    progress.advance(4.0)
    progress.note("a note")
    progress.close()
    assert "a note" in out.getvalue()
    bar = out.getvalue().splitlines()[-2]
    assert "needles, 512 tokens" in bar
    assert "40%" in bar
