"""What a page is made of: sections with text, tables and pictures. No HTML and no drawing in here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    Draw = Callable[[Figure], None]


@dataclass(frozen=True)
class Table:
    """Rows of text; the first column names its row, the others are set right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """One picture: ``draw`` fills an empty figure of ``size`` inches; ``name`` is that of its PNG file."""

    name: str
    caption: str
    draw: Draw
    size: tuple[float, float] = (8.0, 3.6)


@dataclass(frozen=True)
class Section:
    """A heading, lines of text, and what is shown under them, in order."""

    title: str
    text: Sequence[str]
    shown: Sequence[Table | Picture]


def number(value: float | None, digits: int = 3) -> str:
    """For a table: so many significant digits, thousands apart; nothing for None."""
    if value is None:
        return ""
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def megabytes(value: float | None) -> str:
    """Bytes in MB."""
    return "" if value is None else number(value / 1e6)


def milliseconds(value: float | None) -> str:
    """Seconds in ms."""
    return "" if value is None else number(value * 1e3)
