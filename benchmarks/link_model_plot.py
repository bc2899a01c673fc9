"""Plot of the link model: time over native against the link's rate, one axis a shape, one line a form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from link_model_forecast import FORMS, GOAL_RATIO, GOAL_VARIANT, PROMPTS, RATES, SHAPES, Forecast

matplotlib.use("Agg")

import matplotlib.pyplot as plt


def plot_forecasts(forecasts: Sequence[Forecast], path: Path) -> None:
    """The goal's variant with the longest prompt."""
    figure, axes = plt.subplots(1, len(SHAPES), figsize=(4.2 * len(SHAPES), 3.8), sharey=True, squeeze=False)
    for axis, shape in zip(axes[0], SHAPES, strict=True):
        for form in FORMS:
            chosen = [
                (f.rate_gbps, f.ratio)
                for f in forecasts
                if (f.shape, f.tokens, f.variant, f.form) == (shape, PROMPTS[-1], GOAL_VARIANT, form)
            ]
            axis.plot(*zip(*sorted(chosen), strict=True), marker="o", label=form)
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.axhline(GOAL_RATIO, color="grey", linewidth=0.8, linestyle=":")
        axis.set_xscale("log")
        axis.set_xticks(RATES, [str(rate) for rate in RATES])
        axis.minorticks_off()
        axis.set_ylim(0, 2)
        axis.set_title(shape)
        axis.set_xlabel("link, Gb/s")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(f"transfer time / native ({GOAL_VARIANT})")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
