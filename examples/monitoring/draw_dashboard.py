"""A picture of the dashboard without Grafana: its panels, drawn from what Prometheus answers to its queries.

    python examples/monitoring/draw_dashboard.py --prometheus http://127.0.0.1:9090 --minutes 15 --out dashboard.png

Panels, queries, names and units are those of grafana/dashboards/spectrumkv.json; colours and fonts are not Grafana's.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import DateFormatter

DASHBOARD = Path(__file__).resolve().parent / "grafana" / "dashboards" / "spectrumkv.json"
NOTE = "drawn by examples/monitoring/draw_dashboard.py from Prometheus' answers to the dashboard's queries; not Grafana"
COLUMNS = 24  # of Grafana's grid
WIDTH, ROW, HEAD = 17.0, 0.36, 0.6
"""Inches: of the picture, of a row of the grid, of the picture's title."""
POINTS = 120
SHORT = 600  # seconds: shorter ones have times with seconds
LONG_MS = 10_000  # from here on times are drawn in seconds
MOST_ROWS = 7  # of a table
Ask = Callable[..., Any]
"""(path of Prometheus' HTTP API, parameters) -> ``data`` of the answer."""
_UNITS = {"s": (1e3, " ms"), "percentunit": (100, " %"), "Bps": (1e-6, " MB/s"), "cps": (1, " /s"), "short": (1, "")}


def prometheus(base: str) -> Ask:
    """Asks the Prometheus at ``base``."""

    def ask(path: str, **parameters: str) -> Any:
        url = f"{base.rstrip('/')}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]

    return ask


def name_of(labels: dict[str, str], legend: str | None) -> str:
    """A series' name as the dashboard's legend makes it of its labels."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), legend or "")


def unit_of(panel: dict[str, Any]) -> tuple[float, str]:
    """(factor, unit to write behind) of a panel's values.

    Raises:
        ValueError: a unit that is not known here.
    """
    unit = panel["fieldConfig"]["defaults"]["unit"]
    if unit not in _UNITS:
        raise ValueError(f"panel {panel['title']!r} has the unit {unit!r}; known are {', '.join(_UNITS)}")
    return _UNITS[unit]


class Drawing:
    """Panels of one dashboard over the last ``seconds`` before ``now`` (seconds since 1970)."""

    def __init__(self, ask: Ask, *, now: float, seconds: float, window: str) -> None:
        self._ask, self._now, self._seconds, self._window = ask, now, seconds, window
        self._draw = {"stat": self._stat, "timeseries": self._series, "table": self._table}

    def draw(self, dashboard: dict[str, Any], out: Path) -> int:
        """Write the picture; returns how many panels have anything in them.

        Raises:
            ValueError: a panel of a kind or unit that is not known here.
        """
        panels = dashboard["panels"]
        rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
        width, height = WIDTH, HEAD + rows * ROW
        figure = plt.figure(figsize=(width, height), dpi=80, facecolor="#f4f5f5")
        figure.text(0.3 / width, 1 - 0.4 / height, dashboard["title"], fontsize=17, weight="bold")
        when = datetime.fromtimestamp(self._now, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        figure.text(1 - 0.2 / width, 1 - 0.35 / height, f"{when}; {NOTE}", fontsize=9, ha="right", color="#555555")
        filled = 0
        for panel in panels:
            place = panel["gridPos"]
            left, bottom = place["x"] * width / COLUMNS, height - HEAD - (place["y"] + place["h"]) * ROW
            size = (place["w"] * width / COLUMNS, place["h"] * ROW)
            inches = (left + 0.75, bottom + 0.3, size[0] - 1.1, size[1] - 0.75)
            axes = figure.add_axes(
                (inches[0] / width, inches[1] / height, inches[2] / width, inches[3] / height), facecolor="white"
            )
            axes.set_title(panel["title"], fontsize=11, loc="left", weight="bold")
            if panel["type"] not in self._draw:
                raise ValueError(f"panel {panel['title']!r} is a {panel['type']!r}; known are {', '.join(self._draw)}")
            if self._draw[panel["type"]](axes, panel):
                filled += 1
            else:
                axes.set(xticks=[], yticks=[])
                axes.text(0.5, 0.5, "no data", ha="center", va="center", color="#888888", transform=axes.transAxes)
        figure.savefig(out)
        plt.close(figure)
        return filled

    def _query(self, expression: str) -> str:
        filled = expression.replace("$__rate_interval", self._window).replace("$model", ".*")
        if "$" in filled:
            raise ValueError(f"{expression}: a variable that is not known here")
        return filled

    def _instant(self, target: dict[str, Any]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ask("query", query=self._query(target["expr"]), time=str(self._now))[
            "result"
        ]
        return found

    def _stat(self, axes: Axes, panel: dict[str, Any]) -> bool:
        axes.set_axis_off()
        factor, unit = unit_of(panel)
        texts = []
        for target in panel["targets"]:
            for one in self._instant(target):
                value = float(one["value"][1])
                named = panel.get("options", {}).get("textMode") == "name"
                if named:
                    texts.append(name_of(one["metric"], target.get("legendFormat")))
                elif np.isfinite(value):
                    texts.append(f"{value * factor:.4g}{unit}")
        size = 26 if len(texts) == 1 and len(texts[0]) < 12 else 15
        axes.text(0.5, 0.45, "\n".join(texts), ha="center", va="center", fontsize=size, transform=axes.transAxes)
        return bool(texts)

    def _series(self, axes: Axes, panel: dict[str, Any]) -> bool:
        factor, unit = unit_of(panel)
        step = self._seconds / POINTS
        times = np.arange(POINTS + 1) * step + self._now - self._seconds
        lines: dict[str, np.ndarray] = {}
        for target in panel["targets"]:
            answer = self._ask(
                "query_range",
                query=self._query(target["expr"]),
                start=f"{times[0]:.3f}",
                end=f"{times[-1]:.3f}",
                step=f"{step:.3f}",
            )
            for one in answer["result"]:
                values = np.full(len(times), np.nan)
                for moment, value in one["values"]:
                    values[int(np.clip(round((moment - times[0]) / step), 0, POINTS))] = float(value)
                if np.isfinite(values).any():
                    lines[name_of(one["metric"], target.get("legendFormat"))] = values * factor
        if not lines:
            return False
        if unit == " ms" and max(np.nanmax(values) for values in lines.values()) >= LONG_MS:
            lines, unit = {name: values / 1e3 for name, values in lines.items()}, " s"
        dates = [datetime.fromtimestamp(moment, timezone.utc) for moment in times]
        custom = panel["fieldConfig"]["defaults"].get("custom", {})
        if custom.get("stacking", {}).get("mode") == "normal":
            axes.stackplot(dates, *(np.nan_to_num(one) for one in lines.values()), labels=list(lines), alpha=0.6)
        else:
            for name, values in lines.items():
                axes.plot(dates, values, label=name, linewidth=1.6)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(unit.strip(), fontsize=9)
        axes.tick_params(labelsize=8)
        axes.set_xlim(dates[0], dates[-1])
        axes.set_xticks(dates[:: POINTS // 6])
        axes.xaxis.set_major_formatter(DateFormatter("%H:%M" if self._seconds >= SHORT else "%H:%M:%S"))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7.5, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, frameon=False, borderpad=0)
        return True

    def _table(self, axes: Axes, panel: dict[str, Any]) -> bool:
        axes.set_axis_off()
        found = [one["metric"] for target in panel["targets"] for one in self._instant(target)]
        if not found:
            return False
        columns = list(found[0])
        rows = sorted([one.get(column, "") for column in columns] for one in found)
        left_out = len(rows) - MOST_ROWS
        if left_out > 0:
            rows = [*rows[: MOST_ROWS - 1], [f"{left_out + 1} more", *[""] * (len(columns) - 1)]]
        widths = [max(len(row[index]) for row in [columns, *rows]) + 2 for index in range(len(columns))]
        table = axes.table(
            rows, colLabels=columns, loc="upper center", colWidths=[width / sum(widths) for width in widths]
        )
        table.auto_set_font_size(False)
        table.set_fontsize(8)
        return True


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--prometheus", required=True, metavar="URL", help="such as http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=60.0, help="up to now (default: %(default)s)")
    parser.add_argument(
        "--window", default="1m", help="$__rate_interval, of four scrapes or more (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=".png")
    options = parser.parse_args()
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    drawing = Drawing(
        prometheus(options.prometheus), now=time.time(), seconds=options.minutes * 60, window=options.window
    )
    try:
        filled = drawing.draw(dashboard, options.out)
    except OSError as error:
        print(f"error: {options.prometheus}: {error}", file=sys.stderr)
        return 1
    print(f"{options.out}: {filled} of {len(dashboard['panels'])} panels have data")
    return 0


if __name__ == "__main__":
    sys.exit(main())
