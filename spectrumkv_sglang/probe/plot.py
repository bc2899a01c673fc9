"""One picture of a probe: what each policy costs on text against the limits, and which needles were found."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from spectrumkv_sglang.probe.errors import ProbeError
from spectrumkv_sglang.probe.result import ProbeResult

_FOUND, _LOST, _LIMIT = "#2a7f62", "#c0392b", "#555555"


FORMATS = (".png", ".svg", ".pdf")


def check_plot_format(path: Path) -> None:
    """Raise ProbeError unless the ending of ``path`` names a format that can be drawn."""
    if path.suffix.lower() not in FORMATS:
        raise ProbeError(f"--plot {path}: expected a name that ends in {', '.join(FORMATS)}")


def draw(result: ProbeResult, path: Path) -> bytes:
    """The picture of ``result`` in the format that the ending of ``path`` names."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 3.6), layout="constrained")
    draw_on(figure, result)
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix.lower().lstrip("."), dpi=120)
    return picture.getvalue()


def draw_on(figure: Any, result: ProbeResult) -> None:
    """The picture of ``result`` on an empty matplotlib figure."""
    names = [name for name in result.kl if name != "native"]
    kl_axes, ppl_axes, top1_axes, needle_axes = figure.subplots(1, 4)
    limits = result.thresholds
    _bars(kl_axes, names, result.kl, limits["max_kl"], "KL from native, nats a token")
    _bars(ppl_axes, names, result.dppl_pct, limits["max_dppl_pct"], "perplexity against native, %")
    missed = {name: 1 - share for name, share in result.top1.items()}
    _bars(top1_axes, names, missed, 1 - limits["min_top1"], "most likely token differs, share")
    policies = list(result.niah.passed_by_policy)
    for row, trial in enumerate(result.niah.results):
        for column, policy in enumerate(policies):
            passed = trial.answers[policy].passed
            needle_axes.scatter(column, row, s=160, marker="o" if passed else "X", color=_FOUND if passed else _LOST)
    needle_axes.set_xticks(range(len(policies)), policies)
    needle_axes.set_yticks(
        range(len(result.niah.results)), [f"{t.prompt_tokens} tokens,\ndepth {t.depth:g}" for t in result.niah.results]
    )
    needle_axes.margins(0.3)
    needle_axes.set_title("needles: circle found, cross lost", fontsize=10)
    verdict = result.verdict.replace("_", " ")
    figure.suptitle(f"{Path(result.model).name}, profile {result.profile}: {verdict} (dashed: limit)")


def _bars(axes: Any, names: list[str], values: dict[str, float], limit: float, title: str) -> None:
    heights = [values[name] for name in names]
    axes.barh(names, heights, color=[_FOUND if value <= limit else _LOST for value in heights])
    axes.axvline(limit, color=_LIMIT, linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=10)
