"""Python code run in a process of its own.

SGLang and Mooncake load compiled code that can abort the whole interpreter when a library or driver is missing; the
doctor has to survive that and report it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """How a piece of Python ended. `last_line` is the most telling line of its error output."""

    succeeded: bool
    output: str
    last_line: str


def run_python(code: str, timeout_s: float = 300.0) -> Outcome:
    """Runs `code` in a new interpreter with this one's environment. Never raises for what the code does."""
    # `-c` puts the current directory first; a file there must not stand in for a package.
    environ = {**os.environ, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Outcome(False, "", f"no answer within {timeout_s:.0f} s")
    if done.returncode == 0:
        return Outcome(True, done.stdout, "")
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    ending = f"ended with exit code {done.returncode}"
    if done.returncode < 0:
        ending = f"killed by {signal.Signals(-done.returncode).name}"
    return Outcome(False, done.stdout, lines[-1] if lines else ending)
