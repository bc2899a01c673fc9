"""Evaluations: what each method costs in accuracy beside its bytes, as a table and as a frontier."""

from __future__ import annotations

from typing import Any

import msgspec

from spectrumkv_sglang.report.content import Picture, Section, Table, number
from spectrumkv_sglang.report.drawing import legend_height

NATIVE = "native"
SAME_BYTES = 0.005
_FLOOR = 1e-6
_MARKERS = "osDPX"
_BASELINE_MARKERS = "^v<>"


class _Intervals(msgspec.Struct):
    kl: tuple[float | None, float | None] | None = None


class _Row(msgspec.Struct):
    wire_ratio: float
    ppl: float | None
    dppl_pct: float | None
    kl: float | None
    top1: float | None
    intervals: _Intervals | None = None
    budget: float | None = None
    budget_reached: bool = True


class _Evaluation(msgspec.Struct):
    model: str
    text: str
    prefix_tokens: list[int]
    continuation_tokens: int
    texts: int
    results: dict[str, _Row]
    kinds: dict[str, str] = {}


def quality_sections(document: dict[str, Any]) -> list[Section]:
    """One section an evaluation: of `spectrumkv eval --json`, or of docs/results/quality.json."""
    found = msgspec.convert(document.get("evaluations", [document]), list[_Evaluation])
    return [_section(evaluation) for evaluation in found]


def _section(evaluation: _Evaluation) -> Section:
    on_frontier = _frontier(evaluation.results)
    rows = []
    for name, row in evaluation.results.items():
        interval = row.intervals.kl if row.intervals else None
        between = f"{number(interval[0])} to {number(interval[1])}" if interval else ""
        top1 = "" if row.top1 is None else f"{row.top1:.3f}"
        mark = "yes" if name in on_frontier else ""
        missed = "" if row.budget_reached else " (budget missed)"
        rows.append([name + missed, f"{row.wire_ratio:.3f}", number(row.kl), between, number(row.dppl_pct), top1, mark])
    lengths = ", ".join(map(str, evaluation.prefix_tokens))
    text = [
        f"{evaluation.texts} windows of {evaluation.text}: {lengths} tokens whose KV travels, "
        f"{evaluation.continuation_tokens} tokens judged after them. KL under about .003 is noise of bfloat16."
    ]
    columns = ["method", "b", "KL, nats a token", "95 %", "perplexity, %", "top-1", "on the frontier"]
    shown: list[Table | Picture] = [Table("Quality beside bytes", columns, rows)]
    if len(evaluation.results) > 1:
        shown.append(
            Picture(
                f"frontier {evaluation.model}",
                "Wire bytes over native bytes against KL; the line joins what nothing beats in both.",
                lambda figure: _draw(figure, evaluation, on_frontier),
                (8.0, max(4.2, legend_height(len(evaluation.results)))),
            )
        )
    return Section(f"Quality: {evaluation.model}, {evaluation.text}, {lengths} tokens", text, shown)


def _frontier(results: dict[str, _Row]) -> list[str]:
    """Methods that none beats by losing less at as many bytes (within `SAME_BYTES`) or fewer, few bytes first."""
    known = [(row.wire_ratio, row.kl, name) for name, row in results.items() if name != NATIVE and row.kl is not None]
    return [
        name
        for wire, kl, name in sorted(known)
        if not any(other_wire <= wire * (1 + SAME_BYTES) and other_kl < kl for other_wire, other_kl, _ in known)
    ]


def _draw(figure: Any, evaluation: _Evaluation, on_frontier: list[str]) -> None:
    axes = figure.add_subplot()
    results = evaluation.results
    drawn: dict[str, int] = {}
    for name, row in results.items():
        if name == NATIVE or row.kl is None:
            continue
        markers = _BASELINE_MARKERS if evaluation.kinds.get(name) == "baseline" else _MARKERS
        # Ten colours of each shape before the next one: no two methods look alike.
        number = drawn[markers] = drawn.get(markers, 0) + 1
        marker = markers[(number - 1) // 10 % len(markers)]
        style = {"marker": marker, "color": f"C{(number - 1) % 10}", "label": name, "zorder": 3}
        axes.scatter(row.wire_ratio, max(row.kl, _FLOOR), **style)
    line = [(results[name].wire_ratio, max(results[name].kl or 0.0, _FLOOR)) for name in on_frontier]
    if line:
        axes.plot(*zip(*line, strict=True), color="#adb5bd", zorder=1)
    axes.axhspan(_FLOOR / 10, 0.003, color="#e9ecef", zorder=0)
    axes.set_yscale("log")
    axes.set_xlabel("wire bytes / native bytes")
    axes.set_ylabel("KL from native, nats a token")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
