"""Rate and distortion over several models: who lies on the frontier, and who beats a profile that does not.

    python benchmarks/quality_frontier.py RESULT.json [RESULT.json ...] --plot FILE.png --markdown FILE.md

Takes what ``spectrumkv eval --json`` wrote. Each model and text is a panel: every method a point, bytes on the wire
against KL. Files of the same model, text and windows are put together, so that methods may be added by another run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from quality_plot import plot_panels
from quality_points import Beaten, Panel, Point, panels_of

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.evaluation.report import table_lines
from spectrumkv_sglang.evaluation.result import Interval, read_result

_HEADERS = ("method", "b", "PPL, %", "KL, nats", "top-1", "frontier")
_SHOWN = 3
"""Methods named of those that beat a profile."""


def markdown(panels: Sequence[Panel]) -> str:
    """What each profile comes to, and a table a panel."""
    lines = ["# Rate and distortion", "", f"{_legend()}", "", "## Profiles", ""]
    labels = dict.fromkeys(point.label for panel in panels for point in panel.points if point.ours)
    for label in labels:
        lines += [f"- **{label}**"]
        lines += [f"  - {panel.title}: {verdict(panel, point)}" for panel, point in _places(panels, label)]
    for panel in panels:
        frontier = panel.frontier()
        ordered = sorted(panel.points, key=lambda point: (-point.row.wire_ratio, point.row.kl))
        rows = [_cells(point, on_frontier=point in frontier) for point in ordered]
        lines += ["", f"## {panel.title}", "", *table_lines(_HEADERS, rows)]
    return "\n".join(lines) + "\n"


def verdict(panel: Panel, point: Point) -> str:
    """Whether a point lies on the frontier, and who beats it otherwise."""
    place = f"b {point.row.wire_ratio:.3f}, KL {point.row.kl:.4f}: "
    beaten = panel.beaten(point)
    if not beaten:
        return f"{place}on the frontier"
    certain = [one for one in beaten if one.certain]
    if not certain:
        return f"{place}tied with the frontier: {_named(beaten)}; the intervals include 1"
    return f"{place}beaten by {_named(certain)}"


def _legend() -> str:
    return (
        "Brackets: 95 % bootstrap intervals over the windows. b: wire / native bytes. A method is beaten by one that "
        "loses less at the same bytes (within half a percent) or fewer; x: its KL over the other's, window by window. "
        "**Bold: profiles.** KL below about .003 is the noise of bfloat16."
    )


def _places(panels: Sequence[Panel], label: str) -> list[tuple[Panel, Point]]:
    return [(panel, point) for panel in panels for point in panel.points if point.label == label]


def _named(beaten: Sequence[Beaten]) -> str:
    """The first of each scheme: a profile's rows with other scorers are one scheme."""
    schemes: dict[str, Beaten] = {}
    for one in beaten:
        schemes.setdefault(one.by.label.partition(":")[0], one)
    named = [_one(one) for one in list(schemes.values())[:_SHOWN]]
    if len(schemes) > _SHOWN:
        named.append(f"{len(schemes) - _SHOWN} more")
    return ", ".join(named)


def _one(beaten: Beaten) -> str:
    row, times = beaten.by.row, beaten.times
    within = "" if times.interval is None else f" [{times.interval[0]:.2f}, {times.interval[1]:.2f}]"
    return f"{beaten.by.label} (b {row.wire_ratio:.3f}, KL {row.kl:.4f}, {times.value:.2f}x{within})"


def _cells(point: Point, *, on_frontier: bool) -> list[str]:
    row, within = point.row, point.row.intervals
    return [
        f"**{point.label}**" if point.ours else point.label,
        f"{row.wire_ratio:.3f}",
        f"{row.dppl_pct:+.2f}{_interval(within.dppl_pct if within else None, '+.2f')}",
        f"{row.kl:.4f}{_interval(within.kl if within else None, '.4f')}",
        f"{row.top1:.3f}{_interval(within.top1 if within else None, '.3f')}",
        "yes" if on_frontier else "",
    ]


def _interval(interval: Interval | None, form: str) -> str:
    return "" if interval is None else f" [{interval[0]:{form}}, {interval[1]:{form}}]"


def main(arguments: list[str] | None = None) -> int:
    """Command line: read results, write what was asked for, say what each profile comes to."""
    parser = argparse.ArgumentParser(prog="python benchmarks/quality_frontier.py", description="The quality frontier.")
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json", help="files of spectrumkv eval --json")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="picture: .png, .svg or .pdf")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="tables with intervals")
    parser.add_argument("--prefix-tokens", type=int, metavar="N", help="length to show; default: each file's longest")
    options = parser.parse_args(arguments)
    try:
        panels = panels_of([read_result(path) for path in options.results], options.prefix_tokens)
    except SpectrumKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.plot is not None:
        plot_panels(panels, options.plot)
    if options.markdown is not None:
        options.markdown.write_text(markdown(panels), encoding="utf-8")
    for panel in panels:
        print(panel.title)
        for point in panel.points:
            if point.ours:
                print(f"  {point.label}: {verdict(panel, point)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
