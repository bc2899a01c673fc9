"""Runs `spectrumkv probe` as a program of its own, as an operator does."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from spectrumkv_sglang.launch.processes import signals_held

# Exit codes of `spectrumkv probe` after which the launch config is there.
PROBE_EXIT_CODES = (0, 10, 11)
_GRACE_SECONDS = 30.0


def run_to_end(command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> int:
    """Exit code of a command. On a signal to this program it gets the time to end its server and remove its files."""
    process: subprocess.Popen[bytes] | None = None
    try:
        with signals_held():  # one that comes while the process starts must not lose it
            process = subprocess.Popen(command, env=env, cwd=cwd)
        return process.wait()
    except BaseException:
        if process is not None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SECONDS)
        raise
    finally:
        if process is not None:
            process.kill()
            process.wait()
