"""Expected KL divergence of every cell in every precision, from a few measured ones."""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

from spectrumkv_sglang.calibration.candidates import Candidates
from spectrumkv_sglang.calibration.sensitivity import PartSensitivity, Sensitivity
from spectrumkv_sglang.kernels.precision import Precision


class Granularity(enum.Enum):
    """How finely a map may tell cells apart."""

    PARTS = "keys and values"
    LAYERS = "layers"
    HEADS = "heads"


class ExpectedCost:
    """``expected[kv][layer, head, candidate]``: KL of one head's keys or values in one candidate precision, nats.

    Costs are taken to add up, and to be shared among the cells as in the nearest measured precision:
    ``KL(cell, p) = share(cell) * curve(p)``, where a layer's share is its KL over the sum of all layers', and a head's
    share of its layer likewise. So a map of one precision is expected to cost what was measured for it.

    Args:
        sensitivity: the measurement.
        candidates: precisions to state; native costs nothing.
        granularity: which shares are used. Layers: a layer's heads share its cost alike. Parts: all cells alike.
    """

    def __init__(self, sensitivity: Sensitivity, candidates: Candidates, granularity: Granularity) -> None:
        self.granularity = granularity
        self._expected = [self._of_part(sensitivity, candidates, kv) for kv in (0, 1)]

    def of(self, kv: int) -> NDArray[np.float64]:
        """float64 [layers, kv_heads, candidates] of the keys (0) or values (1)."""
        return self._expected[kv]

    def _of_part(self, sensitivity: Sensitivity, candidates: Candidates, kv: int) -> NDArray[np.float64]:
        part, geometry = sensitivity.of(kv), sensitivity.geometry
        precisions = candidates.of(kv).precisions
        expected = np.zeros((geometry.layers, geometry.kv_heads, len(precisions)))
        within = np.full((geometry.layers, geometry.kv_heads), 1 / geometry.kv_heads)
        if self.granularity is Granularity.HEADS and part.heads is not None:
            within = _shares(np.array(part.heads))
        for place, precision in enumerate(precisions):
            if precision is Precision.NATIVE:
                continue
            layers = np.ones(geometry.layers)
            if self.granularity is not Granularity.PARTS:
                layers = np.array(part.layers[_nearest(part, precision)])
            shares = _shares(layers)[:, None] * within
            expected[..., place] = shares * max(0.0, part.curve[precision.name.lower()])
        return expected


def _nearest(part: PartSensitivity, precision: Precision) -> str:
    """The measured precision whose bits are nearest, of two the finer."""
    measured = {label: Precision[label.upper()].bits for label in part.layers}
    return min(measured, key=lambda label: (abs(measured[label] - precision.bits), -measured[label]))


def _shares(costs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each cost over the sum along the last axis; equal shares where there is none."""
    positive = np.maximum(costs, 0.0)
    total = positive.sum(axis=-1, keepdims=True)
    return np.where(total > 0, positive / np.where(total > 0, total, 1.0), 1 / costs.shape[-1])
