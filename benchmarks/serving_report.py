"""Table and plot of `serving`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from serving_result import Percentiles, ServingRow

_BASE = "plain-tuned"


def serving_table(rows: Sequence[ServingRow]) -> Table:
    """One line a variant and load; "of tuned" is the median TTFT against the tuned plain pair's under the same load."""
    table = Table(title="Serving: p50 / p90 / p99 in ms, of all requests")
    columns = ["Gb/s", "req/s", "variant", "TTFT", "of tuned", "ITL", "out tok/s", "done/s", "link MB", "CPU s"]
    for column in [*columns, "RSS GB", "GPU GB", "failed"]:
        table.add_column(column, justify="left" if column == "variant" else "right")
    bases = {(row.link_gbps, row.request_rate): row.ttft_ms.p50 for row in rows if row.variant == _BASE}
    previous = None
    for row in rows:
        load = (row.link_gbps, row.request_rate)
        if previous not in (None, load):
            table.add_section()
        previous = load
        base = bases.get(load)
        table.add_row(
            f"{row.link_gbps:g}" if row.link_gbps else "no limit",
            f"{row.request_rate:g}",
            row.variant,
            _spread(row.ttft_ms, 0),
            f"{row.ttft_ms.p50 / base:.2f}" if base else "",
            _spread(row.itl_ms, 1),
            f"{row.output_tokens_per_second:.1f}",
            f"{row.requests_per_second:.2f}",
            f"{row.link_bytes / 1e6:.0f}",
            f"{row.cpu_seconds:.1f}",
            f"{row.rss_peak_bytes / 1e9:.1f}",
            f"{row.gpu_peak_bytes / 1e9:.1f}" if row.gpu_peak_bytes else "",
            f"[bold red]{row.failures} of {row.requests}[/]" if row.failures else "0",
        )
    return table


def failure_lines(rows: Sequence[ServingRow], first_failures: dict[str, str], not_started: dict[str, str]) -> list[str]:
    """What must be said aloud: failed requests and variants that did not run. Empty when all went well."""
    lines = []
    for variant in dict.fromkeys(row.variant for row in rows):
        failed = sum(row.failures for row in rows if row.variant == variant)
        if failed:
            sent = sum(row.requests for row in rows if row.variant == variant)
            lines.append(
                f"FAILED: {failed} of {sent} requests of {variant}; the first: {first_failures.get(variant, '')}"
            )
    return lines + [f"NOT MEASURED: {variant}: {reason}" for variant, reason in not_started.items()]


def draw_serving(rows: Sequence[ServingRow], path: Path) -> None:
    """Plot TTFT, time between tokens and throughput over the request rate; a picture for each link in one row.

    Needs matplotlib.
    """
    from matplotlib.figure import Figure

    links = list(dict.fromkeys(row.link_gbps for row in rows))
    figure = Figure(figsize=(15, 3.8 * len(links)), layout="constrained")
    grid = figure.subplots(len(links), 3, squeeze=False)
    for line, link in zip(grid, links, strict=True):
        here = [row for row in rows if row.link_gbps == link]
        for i, variant in enumerate(dict.fromkeys(row.variant for row in here)):
            own = [row for row in here if row.variant == variant]
            rates = [row.request_rate for row in own]
            look: dict[str, Any] = {"color": f"C{i}", "marker": "o", "markersize": 4}
            line[0].plot(rates, [row.ttft_ms.p50 for row in own], label=variant, **look)
            line[0].plot(rates, [row.ttft_ms.p99 for row in own], linestyle=":", **look)
            line[1].plot(rates, [row.itl_ms.p50 for row in own], **look)
            line[1].plot(rates, [row.itl_ms.p99 for row in own], linestyle=":", **look)
            line[2].plot(rates, [row.output_tokens_per_second for row in own], **look)
        name = f"{link:g} Gb/s" if link else "no limit"
        for axes, title in zip(line, ("TTFT, ms", "time between tokens, ms", "output tokens a second"), strict=True):
            axes.set_title(f"{title} ({name})", fontsize=10)
            axes.set_xlabel("requests a second")
        line[0].set_yscale("log")
        line[1].set_yscale("log")
        line[0].legend(fontsize=8)
    figure.suptitle("solid: median, dotted: 99th percentile")
    figure.savefig(path, dpi=120)


def _spread(percentiles: Percentiles, digits: int) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in (percentiles.p50, percentiles.p90, percentiles.p99))
