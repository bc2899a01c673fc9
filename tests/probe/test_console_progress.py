"""What a probe says of how far it is, where nobody sees bars."""

from __future__ import annotations

import io
import time

from rich.console import Console

from spectrumkv_sglang.probe.console_progress import ConsoleProgress

PATIENCE_SECONDS = 30.0


def _wait_for(text: str, file: io.StringIO) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while text not in file.getvalue():
        assert time.monotonic() < deadline, file.getvalue()
        time.sleep(0.005)


def test_without_a_terminal_lines_come_while_a_step_is_under_way() -> None:
    file = io.StringIO()
    progress = ConsoleProgress(Console(file=file, width=80), every_seconds=0.01)
    advance = progress.begin("needles", 2)
    _wait_for("needles 0 of 2, 0 s so far\n", file)
    advance()
    _wait_for("needles 1 of 2, ", file)
    advance()
    assert "needles done: 2 in " in file.getvalue()
    progress.begin("text", 4)
    _wait_for("text 0 of 4, ", file)
    progress.close()
    said = file.getvalue()
    time.sleep(0.05)
    assert file.getvalue() == said
    assert "\x1b" not in said
    assert "━" not in said


def test_a_terminal_shows_bars_and_no_lines() -> None:
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system=None)
    progress = ConsoleProgress(console, every_seconds=0.01)
    advance = progress.begin("needles", 1)
    advance()
    progress.close()
    assert "1/1" in file.getvalue()
    assert "so far" not in file.getvalue()
    assert "done:" not in file.getvalue()
