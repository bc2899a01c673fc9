"""Pictures in one style: bars, stacks and scatters on matplotlib's axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COLOURS = {
    "high": "#1b4965", "mid": "#5fa8d3", "low": "#cae9ff", "native": "#adb5bd",
    "prefill and the rest": "#adb5bd", "prefill": "#adb5bd", "transfer": "#2a7f62", "pack": "#e09f3e",
    "wait": "#d9d9d9", "write": "#2a7f62", "unpack": "#9e2a2b",
}  # fmt: skip
_OTHER = "#5fa8d3"


def stacked(axes: Any, names: Sequence[str], parts: Mapping[str, Sequence[float]], unit: str) -> None:
    """Horizontal bars, one a name, of parts one behind the other."""
    left = [0.0] * len(names)
    for part, values in parts.items():
        axes.barh(names, values, left=left, label=part, color=COLOURS.get(part, _OTHER), edgecolor="white")
        left = [start + value for start, value in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.legend(fontsize=8, ncols=len(parts), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def bars(axes: Any, names: Sequence[str], values: Sequence[float], unit: str) -> None:
    """Horizontal bars with their values."""
    drawn = axes.barh(names, values, color=[COLOURS.get(name, _OTHER) for name in names])
    labels = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values]
    axes.bar_label(drawn, labels, padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(unit)


def legend_height(entries: int) -> float:
    """Inches that a picture needs for a legend of so many lines beside it, letters of 8 points."""
    return 0.4 + 0.18 * entries
