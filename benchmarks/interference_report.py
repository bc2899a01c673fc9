"""Table and plot of `interference`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from interference_result import BASE, QUIET, InterferenceRow, Spread
from rich.table import Table

TARGET = 0.98
"""Decode keeps at least this share of the throughput that plain's keeps under the same transfers."""


def interference_table(rows: Sequence[InterferenceRow]) -> Table:
    """One line a variant and kind of arrivals; spreads are smallest to largest of the repetitions."""
    table = Table(title=f"Decode throughput while KV arrives ('of tuned': kept, against {BASE}; target {TARGET:g})")
    columns = ["arrivals", "variant", "tok/s", "loss %", "of tuned", "lost tok each", "ITL p50 / p99 ms"]
    for column in [*columns, "prompts", "late", "each s", "Gb/s", "cores"]:
        table.add_column(column, justify="left" if column in ("arrivals", "variant") else "right")
    previous = None
    for row in rows:
        if previous not in (None, row.kind):
            table.add_section()
        previous = row.kind
        missed = row.of_base is not None and row.of_base.median < TARGET
        of_base = _range(row.of_base, 1, 3) if row.variant != BASE else ""
        table.add_row(
            row.kind,
            row.variant,
            f"{row.tokens_per_second.median:.1f}",
            _range(row.loss, 100, 1),
            f"[bold red]{of_base}[/]" if missed else of_base,
            f"{row.lost_per_arrival:.1f}" if row.lost_per_arrival is not None else "",
            f"{row.itl_ms_p50:.1f} / {row.itl_ms_p99:.1f}",
            f"{row.arrivals:g}" if row.kind != QUIET else "",
            str(row.late) if row.late else "",
            f"{row.arrival_seconds:.2f}" if row.arrival_seconds is not None else "",
            f"{row.link_gbps:.2f}",
            f"{row.cpu_seconds_per_second:.2f}",
        )
    return table


def draw_interference(rows: Sequence[InterferenceRow], path: Path) -> None:
    """Plot what each variant loses for each kind of arrivals, with the spread. Needs matplotlib."""
    from matplotlib.figure import Figure

    kinds = [kind for kind in dict.fromkeys(row.kind for row in rows) if kind != QUIET]
    figure = Figure(figsize=(4.5 * max(len(kinds), 1), 3.8), layout="constrained")
    grid = figure.subplots(1, max(len(kinds), 1), squeeze=False, sharey=True)[0]
    for axes, kind in zip(grid, kinds, strict=False):
        for i, row in enumerate(row for row in rows if row.kind == kind):
            if row.loss is None:
                continue
            middle = row.loss.median * 100
            down, up = middle - row.loss.least * 100, row.loss.most * 100 - middle
            axes.bar(row.variant, middle, color=f"C{i}", yerr=[[down], [up]], capsize=4)
        axes.set_title(kind, fontsize=10)
        axes.tick_params(axis="x", rotation=20)
    grid[0].set_ylabel("decode throughput lost, %")
    figure.savefig(path, dpi=120)


def _range(spread: Spread | None, scale: float, digits: int) -> str:
    if spread is None:
        return ""
    middle, least, most = (f"{value * scale:.{digits}f}" for value in (spread.median, spread.least, spread.most))
    return f"{middle} ({least} to {most})"
