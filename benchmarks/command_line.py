"""What the command lines of the benchmarks share."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil


def numbers(text: str) -> list[float]:
    """Numbers with commas between them."""
    return [float(part) for part in text.split(",")]


def made(folder: Path) -> Path:
    """The folder, made where it is missing, as an absolute path: servers run in folders of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def this_machine() -> dict[str, str]:
    """What a result says of the machine that it was taken on."""
    machine = {"cpu cores": str(os.cpu_count()), "memory GB": f"{psutil.virtual_memory().total / 1e9:.0f}"}
    return machine | {"system": platform.platform(), "load at start": f"{os.getloadavg()[0]:.1f}"}
