"""What the command lines of the benchmarks share."""

from __future__ import annotations

from pathlib import Path


def numbers(text: str) -> list[float]:
    """Numbers with commas between them."""
    return [float(part) for part in text.split(",")]


def made(folder: Path) -> Path:
    """The folder, made where it is missing, as an absolute path: servers run in folders of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()
