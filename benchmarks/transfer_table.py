"""Tables and plot of transfer.json files; several are put together, as if one run had measured them.

python benchmarks/transfer_table.py FILE... [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from transfer_samples import Case, Row, ServerCost, cases_of, samples_of

WIDTH = 160
_LETTERS = 150


def ttft_table(cases: Iterable[Case]) -> Table:
    """Time to first token, its ratios, and packing and quantisation gain apart."""
    table = _table(
        "Time to first token (medians)", "of plain", "of tuned", "packing gain", "quantisation gain", "CPU s"
    )
    for case, row in _rows(cases):
        table.add_row(
            *_case(case, row),
            _milliseconds(row.ttft_seconds) or "-",
            *(_number(value) for value in (row.of_plain, row.of_tuned, row.packing_gain, row.quantisation_gain)),
            _number(row.cpu_seconds),
        )
    return table


def transfer_table(cases: Iterable[Case]) -> Table:
    """Transfer time and what it is made of."""
    columns = ("of plain", "of tuned", "packing gain", "quantisation gain", "wire MB", "b", "writes")
    table = _table("Transfer (medians)", *columns, "pack ms", "write ms", "wait ms")
    for case, row in _rows(cases):
        gains = (
            row.transfer_of_plain,
            row.transfer_of_tuned,
            row.transfer_packing_gain,
            row.transfer_quantisation_gain,
        )
        table.add_row(
            *_case(case, row),
            _milliseconds(row.transfer_seconds) or "-",
            *(_number(value) for value in gains),
            _number(row.wire_bytes and row.wire_bytes / 1e6, 1),
            _number(row.b, 3),
            _number(row.writes, 0),
            *(_milliseconds(value) for value in (row.pack_seconds, row.write_seconds, row.wait_seconds)),
        )
    return table


def server_table(costs: Iterable[ServerCost]) -> Table:
    """Memory of the servers."""
    table = Table(title="Servers", box=box.MARKDOWN)
    for column in ("variant", "prefill peak RSS GB", "decode peak RSS GB", "prefill GPU GB", "decode GPU GB"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for cost in costs:
        sizes = (cost.prefill_peak_rss_bytes, cost.decode_peak_rss_bytes, cost.prefill_gpu_bytes, cost.decode_gpu_bytes)
        table.add_row(cost.variant, *(_number(None if size is None else size / 1e9) for size in sizes))
    return table


def print_results(console: Console, documents: Sequence[dict[str, Any]]) -> list[Case]:
    """Print everything that the documents hold; returns the cases."""
    samples = [sample for document in documents for sample in samples_of(document)]
    costs = [ServerCost(**cost) for document in documents for cost in document.get("servers", [])]
    cases = cases_of(samples)
    goodput = {rate: gbps for document in documents for rate, gbps in document.get("goodput_gbps", {}).items()}
    if goodput:
        texts = (f"{float(rate):g} Gb/s: {gbps:.2f}" if float(rate) else f"no limit: {gbps:.1f}"
                 for rate, gbps in goodput.items())  # fmt: skip
        console.print(f"A plain socket got: {', '.join(texts)} Gb/s")
    console.print(ttft_table(cases), transfer_table(cases))
    if costs:
        console.print(server_table(costs))
    failures: dict[tuple[str, str], list[str]] = {}
    for case, row in _rows(cases):
        for failure in row.failures:
            failures.setdefault((row.variant, failure), []).append(f"{_rate(case)} Gb/s {case.prompt_tokens:,} tokens")
    for (variant, failure), where in failures.items():
        console.print(f"{variant} ({', '.join(where)}): {shortened(failure)}", markup=False, highlight=False)
    return cases


def shortened(error: str) -> str:
    """Beginning and end of a long message: what happened, and the last words of a log."""
    return error if len(error) <= 2 * _LETTERS else f"{error[:_LETTERS]} ... {error[-_LETTERS:]}"


def _rows(cases: Iterable[Case]) -> Iterable[tuple[Case, Row]]:
    return ((case, row) for case in cases for row in case.rows)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.MARKDOWN)
    for column in ("Gb/s", "prompt", "variant", "ms", *columns):
        table.add_column(column, justify="left" if column == "variant" else "right", no_wrap=True)
    return table


def _case(case: Case, row: Row) -> tuple[str, str, str]:
    return _rate(case), f"{case.prompt_tokens:,}", row.variant


def _rate(case: Case) -> str:
    return f"{case.rate_gbps:g}" if case.rate_gbps else "none"


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.1f}"


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def console() -> Console:
    """A console that is wide enough when the output goes to a file."""
    return Console(width=None if sys.stdout.isatty() else WIDTH)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python benchmarks/transfer_table.py", description="Tables of transfer.json")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also plot the ratios (needs matplotlib)")
    options = parser.parse_args()
    cases = print_results(console(), [json.loads(path.read_text(encoding="utf-8")) for path in options.files])
    if options.plot is not None:
        from transfer_plot import plot_ratios

        plot_ratios(cases, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
