"""Resident memory of running servers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pairs import processes_of

from spectrumkv_sglang.launch.servers import SGLangServer


def peak_rss_bytes(servers: Sequence[SGLangServer]) -> int:
    """Sum of the largest resident sizes of the processes of ``servers`` since `reset_peak_rss` or their start."""
    return sum(_largest_resident_kib(process.pid) * 1024 for process in processes_of(servers))


def reset_peak_rss(servers: Sequence[SGLangServer]) -> bool:
    """Let `peak_rss_bytes` count from now on, so that loading a model does not hide what transfers need.

    Returns:
        False where the kernel does not allow it: then the largest size since the start stays.
    """
    try:
        for process in processes_of(servers):
            Path(f"/proc/{process.pid}/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _largest_resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status")
    try:
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):  # a child that has ended meanwhile
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
