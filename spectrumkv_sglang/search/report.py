"""The frontier as a table and as a picture."""

from __future__ import annotations

import io
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from spectrumkv_sglang.search.result import FrontierFile

_FLOOR = 1e-7
"""Smallest KL drawn: the axis is logarithmic."""


def print_result(result: FrontierFile, console: Console) -> None:
    """The frontier, fewest bytes first; a star for what the controller gets."""
    table = Table(title=f"Frontier of {result.model}", box=SIMPLE_HEAD, padding=(0, 1))
    for column in ("", "profile", "b", "ratio", "KL, nats", f"GB/s ({result.speeds_of})", "high/mid/low %"):
        table.add_column(column, justify="left" if column in ("", "profile") else "right", no_wrap=True)
    for entry in result.frontier:
        table.add_row(
            "*" if entry.candidate else "",
            entry.profile,
            f"{entry.wire_ratio:.3f}",
            f"{entry.compression_ratio:.2f}",
            f"{entry.kl:.2g}",
            f"{entry.speed / 1e9:.3g}",
            "/".join(f"{share * 100:.0f}" for share in entry.tier_shares),
        )
    console.print(table)
    console.print(
        f"{result.judged} of {result.points_of_space} points were judged, {result.judged_in_part} of them in part; "
        f"{result.ruled_out_by_bytes_and_speed} ruled out by bytes and speed alone; {result.stopped_by}. "
        f"{result.hypervolume:.1%} of the space's box is dominated. *: in controller.yaml",
        highlight=False,
    )


def draw(result: FrontierFile, path: Path) -> bytes:
    """Bytes against KL, the speed as colour, in the format that the ending of ``path`` names."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    speeds = [entry.speed / 1e9 for entry in (*result.frontier, *result.others)]
    scale = LogNorm(min(speeds), max(speeds)) if min(speeds) < max(speeds) else None
    for entries, style in ((result.others, {"alpha": 0.35, "s": 14}), (result.frontier, {"s": 40, "edgecolors": "k"})):
        if entries:
            drawn = axes.scatter(
                [entry.wire_ratio for entry in entries],
                [max(entry.kl, _FLOOR) for entry in entries],
                c=[entry.speed / 1e9 for entry in entries],
                norm=scale,
                **style,
            )
    for entry in result.frontier:
        if entry.candidate:
            axes.annotate(
                entry.profile,
                (entry.wire_ratio, max(entry.kl, _FLOOR)),
                fontsize=7,
                xytext=(4, 4),
                textcoords="offset points",
            )
    axes.set_yscale("log")
    axes.set_xlabel("wire / native bytes, all counted")
    axes.set_ylabel("KL from native, nats a token")
    axes.set_title(f"{result.model}: {len(result.frontier)} profiles that none of {result.judged} beats")
    axes.grid(alpha=0.3)
    figure.colorbar(drawn, ax=axes, label=f"GB/s through pack and unpack ({result.speeds_of})")
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix.lower().lstrip("."), dpi=120)
    return picture.getvalue()
