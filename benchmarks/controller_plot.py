"""Plot of a controller.json: what each request's transfer took on each arm, phase after phase."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from controller_samples import CONTROLLER, WARM_UP, read_samples

matplotlib.use("Agg")

import matplotlib.pyplot as plt


def plot_phases(document: Mapping[str, Any], path: Path) -> None:
    """Transfer time against the number of the request; phases are bands, the controller is the thick line."""
    phases, samples = read_samples(document)
    starts = [sum(phase.requests for phase in phases[:index]) for index in range(len(phases) + 1)]
    arms = list(dict.fromkeys(sample.arm for sample in samples))
    figure, axis = plt.subplots(figsize=(11, 4.6))
    for color, arm in enumerate(sorted(arms, key=lambda name: name == CONTROLLER)):
        own = sorted((starts[s.phase] + s.number, s.transfer_s) for s in samples if s.arm == arm and s.phase != WARM_UP)
        thick = arm == CONTROLLER
        axis.plot(
            *zip(*own, strict=True),
            color="black" if thick else f"C{color}",
            linewidth=2.2 if thick else 1.1,
            marker="o" if thick else None,
            markersize=3.5,
            label=arm,
        )
    for index, phase in enumerate(phases):
        if index % 2:
            axis.axvspan(starts[index] - 0.5, starts[index + 1] - 0.5, color="grey", alpha=0.12, linewidth=0)
        middle = (starts[index] + starts[index + 1] - 1) / 2
        axis.text(middle, 1.01, phase.label, ha="center", va="bottom", fontsize=9, transform=axis.get_xaxis_transform())
    axis.set_yscale("log")
    axis.set_xlabel("request")
    axis.set_ylabel("transfer, seconds")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, ncols=3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
