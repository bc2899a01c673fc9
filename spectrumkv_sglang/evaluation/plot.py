"""One picture of an evaluation: bytes on the wire against KL divergence, and its growth with the prefix."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

from spectrumkv_sglang.evaluation.result import EvaluationResult, Row
from spectrumkv_sglang.loopback.plan import NATIVE

_FLOOR = 1e-6
"""Smallest KL drawn: the axis is logarithmic."""
_MARKERS = "os^D"


def draw(result: EvaluationResult, path: Path) -> bytes:
    """The picture in the format that the ending of ``path`` names (see ``probe.plot.check_plot_format``)."""
    from matplotlib.figure import Figure

    several = len(result.by_prefix_tokens) > 1
    # A line of the legend takes .19 inches.
    height = max(6.0, 1.0 + 0.19 * len(result.results))
    figure = Figure(figsize=(20 if several else 10, height), layout="constrained")
    axes = figure.subplots(1, 2 if several else 1, squeeze=False)[0]
    _rate_distortion(axes[0], result)
    if several:
        _growth(axes[1], result)
    figure.suptitle(f"{Path(result.model).name}: {result.texts} texts, {result.continuation_tokens} tokens scored each")
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix.lower().lstrip("."), dpi=120)
    return picture.getvalue()


def _rate_distortion(axes: Any, result: EvaluationResult) -> None:
    for index, (label, row) in enumerate(_drawn(result.results).items()):
        errors = None
        if row.intervals is not None:
            low, high = row.intervals.kl
            errors = [[max(0.0, row.kl - max(low, _FLOOR))], [max(0.0, high - row.kl)]]
        marker = _MARKERS[index // 10 % len(_MARKERS)]
        axes.errorbar(row.wire_ratio, row.kl, yerr=errors, fmt=marker, capsize=2, markersize=6, label=label)
    axes.set_yscale("log")
    axes.set_xlabel("wire / native bytes, all counted")
    axes.set_ylabel("KL from native, nats a token")
    axes.set_title(f"prefix of {max(result.prefix_tokens):,} tokens", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _drawn(rows: dict[str, Row]) -> dict[str, Row]:
    """Rows that a logarithmic axis can show: those that lose something."""
    return {label: row for label, row in rows.items() if label != NATIVE and row.kl > _FLOOR}


def _growth(axes: Any, result: EvaluationResult) -> None:
    by_length: dict[str, dict[str, Row]] = result.by_prefix_tokens
    lengths = sorted(by_length, key=int)
    for index, label in enumerate(_drawn(result.results)):
        kl = [max(by_length[length][label].kl, _FLOOR) for length in lengths]
        marker = _MARKERS[index // 10 % len(_MARKERS)]
        (line,) = axes.plot([int(length) for length in lengths], kl, ":", marker=marker, markersize=4)
        if label in result.growth:
            _fitted(axes, [int(length) for length in lengths], kl, result.growth[label].exponent, line, label)
    axes.set_yscale("log")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("prefix, tokens")
    axes.set_ylabel("KL from native, nats a token")
    axes.set_title("KL ~ length^a", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _fitted(axes: Any, lengths: list[int], kl: list[float], exponent: float, line: Any, label: str) -> None:
    """The fitted power law through the points' middle, in their colour."""
    middle = sum(map(math.log, kl)) / len(kl), sum(map(math.log, lengths)) / len(lengths)
    ends = lengths[0], lengths[-1]
    fitted = [math.exp(middle[0] + exponent * (math.log(length) - middle[1])) for length in ends]
    axes.plot(ends, fitted, color=line.get_color(), label=f"{label}, a = {exponent:+.2f}")
