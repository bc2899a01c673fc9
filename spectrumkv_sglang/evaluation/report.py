"""The evaluation's result for people: tables on a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spectrumkv_sglang.evaluation.growth import in_words
from spectrumkv_sglang.evaluation.result import EvaluationResult, Interval, Row

_GROWTH_TITLE = "KL by tokens of prefix, and a of KL ~ length^a"


def print_result(result: EvaluationResult, console: Console) -> None:
    """One table a prefix length; intervals are left to the files."""
    for length, rows in result.by_prefix_tokens.items():
        table = Table(title=_title(result, length), title_justify="left")
        for index, header in enumerate(_headers(rows)):
            table.add_column(header, justify="right" if index else "left", overflow="fold")
        for cells in _cells(rows, intervals=False):
            table.add_row(*map(escape, cells))
        console.print(table)
    if result.growth:
        table = Table(title=_GROWTH_TITLE, title_justify="left")
        for index, header in enumerate(_growth_headers(result)):
            table.add_column(header, justify="right" if index else "left", overflow="fold")
        for cells in _growth_cells(result):
            table.add_row(*map(escape, cells))
        console.print(table)


def markdown(result: EvaluationResult) -> str:
    """The same tables in Markdown, and what was measured on what."""
    lines = [f"# {Path(result.model).name}: what each method costs", ""]
    lines += [
        f"Text `{result.text}`, {result.texts} windows, seed {result.seed}, scorer {result.scorer}; {result.dtype} on "
        f"{result.device}, KV pool in {result.kv_dtype} ({result.native_bytes_per_token:,} bytes a token); "
        f"{', '.join(f'{name} {version}' for name, version in result.versions.items())}; {result.date}.",
        "",
        "Brackets: 95 % bootstrap intervals over the windows. b: wire / native bytes.",
        "",
    ]
    for length, rows in result.by_prefix_tokens.items():
        lines += [f"## {_title(result, length)}", "", *table_lines(_headers(rows), _cells(rows, intervals=True)), ""]
    if result.growth:
        lines += [f"## {_GROWTH_TITLE}", "", *table_lines(_growth_headers(result), _growth_cells(result)), ""]
    lines += ["## Methods", ""]
    lines += [f"- **{label}**: {description}" for label, description in result.methods.items()]
    return "\n".join(lines) + "\n"


def table_lines(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table whose columns but the first are numbers."""
    rule = ["---", *["---:"] * (len(headers) - 1)]
    return [f"| {' | '.join(headers)} |", f"|{'|'.join(rule)}|", *(f"| {' | '.join(cells)} |" for cells in rows)]


def _growth_headers(result: EvaluationResult) -> list[str]:
    return ["method", *(f"{int(length):,}" for length in result.by_prefix_tokens), "a"]


def _growth_cells(result: EvaluationResult) -> list[list[str]]:
    return [
        [label, *(f"{rows[label].kl:.5f}" for rows in result.by_prefix_tokens.values()), in_words(growth)]
        for label, growth in result.growth.items()
    ]


def _title(result: EvaluationResult, length: str) -> str:
    return f"Prefix of {int(length):,} tokens, the next {result.continuation_tokens:,} scored"


def _headers(rows: dict[str, Row]) -> list[str]:
    headers = ["method", "b", "PPL", "change, %", "KL, nats", "top-1"]
    if any(row.generation is not None for row in rows.values()):
        headers.append("greedy agreement")
    if any(row.needles is not None for row in rows.values()):
        headers.append("needles")
    if any(row.multi_needles is not None for row in rows.values()):
        headers.append("several needles")
    return headers


def _cells(rows: dict[str, Row], *, intervals: bool) -> list[list[str]]:
    lines = []
    for label, row in rows.items():
        within = row.intervals if intervals else None
        cells = [
            label,
            f"{row.wire_ratio:.3f}{'' if row.budget_reached else ' (least)'}",
            f"{row.ppl:.3f}",
            _with_interval(f"{row.dppl_pct:+.2f}", within.dppl_pct if within else None, "+.2f"),
            _with_interval(f"{row.kl:.4f}", within.kl if within else None, ".4f"),
            _with_interval(f"{row.top1:.3f}", within.top1 if within else None, ".3f"),
        ]
        if row.generation is not None:
            cells.append(f"{row.generation.agreement:.3f}")
        if row.needles is not None:
            cells.append(f"{row.needles.passed}/{row.needles.trials}")
        if row.multi_needles is not None:
            cells.append(f"{row.multi_needles.passed}/{row.multi_needles.trials}")
        lines.append(cells)
    return lines


def _with_interval(text: str, interval: Interval | None, form: str) -> str:
    return text if interval is None else f"{text} [{interval[0]:{form}}, {interval[1]:{form}}]"
