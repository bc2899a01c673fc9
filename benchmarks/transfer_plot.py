"""Plot of the transfer benchmark: time to first token over that of plain Mooncake, against the link's rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from transfer_samples import PLAIN, TUNED, UNLIMITED, Case, Row

matplotlib.use("Agg")

import matplotlib.pyplot as plt

_BASES = ((PLAIN, "plain Mooncake at its defaults"), (TUNED, "plain Mooncake, tuned"))


def plot_ratios(cases: Sequence[Case], path: Path) -> None:
    """One column of axes a prompt length, one row a baseline; "none" on the x axis is a link without a limit."""
    prompts = sorted({case.prompt_tokens for case in cases})
    rates = sorted({case.rate_gbps for case in cases}, key=lambda rate: rate or float("inf"))
    names = list(dict.fromkeys(row.variant for case in cases for row in case.rows))
    size = (4.2 * len(prompts) + 1, 7)
    figure, axes = plt.subplots(2, len(prompts), figsize=size, sharex=True, sharey="row", squeeze=False)
    for row_of_axes, (base, label) in zip(axes, _BASES, strict=True):
        for axis, prompt in zip(row_of_axes, prompts, strict=True):
            by_rate = {case.rate_gbps: case for case in cases if case.prompt_tokens == prompt}
            for number, name in enumerate(names):
                points = [(rates.index(rate), _ratio(case.row(name), base)) for rate, case in by_rate.items()]
                known = sorted((x, y) for x, y in points if y is not None)
                if known and name != base:
                    axis.plot(*zip(*known, strict=True), marker="o", color=f"C{number}", label=name)
            axis.axhline(1.0, color="grey", linewidth=0.8)
            axis.set_title(f"{prompt:,} tokens", fontsize=10)
            axis.grid(alpha=0.3)
        row_of_axes[0].set_ylim(bottom=0)  # for the whole row, once everything is drawn
        row_of_axes[0].set_ylabel(f"TTFT / {label}")
    for axis in axes[-1]:
        axis.set_xticks(range(len(rates)), [f"{rate:g}" if rate != UNLIMITED else "none" for rate in rates])
        axis.set_xlabel("link, Gb/s")
    lines = {
        label: line
        for axis in axes.flat
        for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }  # fmt: skip
    figure.legend(lines.values(), lines.keys(), loc="lower center", ncols=max(1, len(lines)), fontsize=8)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _ratio(row: Row | None, base: str) -> float | None:
    if row is None:
        return None
    return row.of_plain if base == PLAIN else row.of_tuned
