"""Picture of rate and distortion: a panel a model and text, KL on a logarithmic axis over bytes on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from quality_points import Panel, Point

matplotlib.use("Agg")

import matplotlib.pyplot as plt

OURS, OTHERS, FRONTIER = "#1f5fa8", "#8a8a8a", "#c0392b"
_COLUMNS = 3
_LINE_PIXELS = 11
"""Height of a label."""


def plot_panels(panels: Sequence[Panel], path: Path) -> None:
    """Draw all panels into ``path``, in the format that its ending names."""
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(8 * columns, 6.5 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw(axis, panel)
    figure.canvas.draw()
    for axis, panel in zip(axes.flat, panels, strict=False):
        _label(axis, panel)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw(axis: Any, panel: Panel) -> None:
    for point in panel.points:
        row = point.row
        errors = None
        if row.intervals is not None:
            low, high = row.intervals.kl
            errors = [[max(0.0, row.kl - max(low, row.kl / 10))], [max(0.0, high - row.kl)]]
        axis.errorbar(
            row.wire_ratio,
            row.kl,
            yerr=errors,
            fmt="o" if point.ours else "x",
            color=OURS if point.ours else OTHERS,
            markersize=5,
            elinewidth=0.6,
        )
    _line(axis, panel.our_line(), color=OURS, linewidth=1.5, label="profiles")
    axis.step(*_coordinates(panel.frontier()), where="post", color=FRONTIER, linewidth=0.9, ls="--", label="frontier")
    axis.set_yscale("log")
    axis.set_xlabel("wire / native bytes, all counted")
    axis.set_ylabel("KL from native, nats a token")
    axis.set_title(panel.title, fontsize=10)
    axis.grid(alpha=0.3)
    axis.margins(x=0.12)
    axis.legend(fontsize=8, loc="upper right")


def _line(axis: Any, points: Sequence[Point], **style: Any) -> None:
    axis.plot(*_coordinates(points), **style)


def _coordinates(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [point.row.wire_ratio for point in points], [point.row.kl for point in points]


def _label(axis: Any, panel: Panel) -> None:
    """A name right of each point, pushed up where it would cover another."""
    placed: list[tuple[float, float, float]] = []  # left, right and height of the labels that are there, pixels
    for point in sorted(panel.points, key=lambda one: one.row.kl):
        x, y = axis.transData.transform((point.row.wire_ratio, point.row.kl))
        width = 6.0 * len(point.label) * axis.figure.dpi / 100
        at = y
        while any(left < x + width and x < right and abs(height - at) < _LINE_PIXELS for left, right, height in placed):
            at += _LINE_PIXELS / 4
        placed.append((x, x + width, at))
        axis.annotate(
            point.label,
            (point.row.wire_ratio, point.row.kl),
            xytext=(6, (at - y) * 72 / axis.figure.dpi + 2),
            textcoords="offset points",
            fontsize=6.5,
            color=OURS if point.ours else "#444444",
        )
