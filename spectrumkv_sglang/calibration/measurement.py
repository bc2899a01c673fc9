"""Measures a `Sensitivity`: rounds one kind of cell at a time and judges the continuation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from spectrumkv_sglang.calibration.candidates import Candidates
from spectrumkv_sglang.calibration.head_cost import HeadCost
from spectrumkv_sglang.calibration.head_scores import head_scores
from spectrumkv_sglang.calibration.rounding import RoundedCells, round_cells
from spectrumkv_sglang.calibration.sensitivity import PartSensitivity
from spectrumkv_sglang.evaluation.judging import NativeReference
from spectrumkv_sglang.evaluation.model import EvalModel
from spectrumkv_sglang.evaluation.prefix import MovedKV, PrefixKV
from spectrumkv_sglang.evaluation.progress import Advance
from spectrumkv_sglang.evaluation.windows import TextWindow
from spectrumkv_sglang.evaluation.work import judged_work
from spectrumkv_sglang.kernels.precision import Precision


@dataclass(frozen=True)
class MeasurementPlan:
    """What is rounded, one after the other.

    Attributes:
        candidates: precisions and transforms.
        layers: of the model.
        kv_heads: of each layer.
        heads: whether single heads are told apart too, and by what.
    """

    candidates: Candidates
    layers: int
    kv_heads: int
    heads: HeadCost | None

    def cells(self) -> Iterator[RoundedCells]:
        """Curves of the keys and of the values, then single layers, then single heads."""
        parts = [(kv, self.candidates.of(kv)) for kv in (0, 1)]
        for kv, part in parts:
            for precision in part.precisions:
                if precision is not Precision.NATIVE:
                    yield RoundedCells(kv, precision, part.transform)
        for kv, part in parts:
            for precision in part.coarse:
                for layer in range(self.layers):
                    yield RoundedCells(kv, precision, part.transform, layer)
        if self.heads is HeadCost.MEASURED:
            for kv, part in parts:
                for layer in range(self.layers):
                    for head in range(self.kv_heads):
                        yield RoundedCells(kv, part.coarse[-1], part.transform, layer, head)


def measure(
    model: EvalModel,
    windows: Sequence[TextWindow],
    prefix_tokens: int,
    plan: MeasurementPlan,
    sink_tokens: int,
    advance: Advance,
) -> tuple[PartSensitivity, PartSensitivity]:
    """Sensitivity of the keys and of the values, mean over the windows.

    Args:
        advance: told of `measurement_work`.

    Raises:
        CalibrationError: keys are to be rotated back, and the model's rotation is not known.
    """
    asked = list(plan.cells())
    total = np.zeros(len(asked))
    for window in windows:
        prefix = model.prefill(window.name, window.prefix(prefix_tokens), {}).prefix
        advance(prefix_tokens)
        judge = ContinuationCost(model, window, prefix)
        advance(judged_work(len(window.continuation)))
        for place, cells in enumerate(asked):
            total[place] += judge.kl(MovedKV(round_cells(prefix, cells, sink_tokens), 0))
            advance(judged_work(len(window.continuation)))
    found = dict(zip(asked, (total / len(windows)).tolist(), strict=True))
    scores = None
    if plan.heads is HeadCost.ATTENTION:
        scores = head_scores(model, windows, prefix_tokens)
        advance(prefix_tokens * len(windows))
    return _part(found, plan, 0, scores), _part(found, plan, 1, scores)


def measurement_work(windows: Sequence[TextWindow], prefix_tokens: int, plan: MeasurementPlan) -> float:
    """What `measure` takes, in tokens of prefill."""
    judged = 1 + sum(1 for _ in plan.cells())
    prefills = 2 if plan.heads is HeadCost.ATTENTION else 1
    return sum(prefills * prefix_tokens + judged * judged_work(len(window.continuation)) for window in windows)


class ContinuationCost:
    """KL divergence of one window's continuation from the native one."""

    def __init__(self, model: EvalModel, window: TextWindow, prefix: PrefixKV) -> None:
        self._model = model
        self._fed = [window.first, *window.continuation[:-1]]
        native = MovedKV(prefix.view.buffers, prefix.native_bytes)
        self._reference = NativeReference(model.logits_after(native, self._fed), window.continuation)

    def kl(self, moved: MovedKV) -> float:
        """Nats a token, at least 0."""
        return max(0.0, self._reference.judge(self._model.logits_after(moved, self._fed)).kl)


def _part(
    found: dict[RoundedCells, float], plan: MeasurementPlan, kv: int, scores: list[list[float]] | None
) -> PartSensitivity:
    part = plan.candidates.of(kv)
    layers = range(plan.layers)

    def single(precision: Precision, layer: int, head: int | None = None) -> float:
        return found[RoundedCells(kv, precision, part.transform, layer, head)]

    heads = range(plan.kv_heads)
    if plan.heads is HeadCost.MEASURED:
        scores = [[single(part.coarse[-1], layer, head) for head in heads] for layer in layers]
    return PartSensitivity(
        transform=part.transform.name.lower(),
        curve={
            precision.name.lower(): found[RoundedCells(kv, precision, part.transform)]
            for precision in part.precisions
            if precision is not Precision.NATIVE
        },
        layers={precision.name.lower(): [single(precision, layer) for layer in layers] for precision in part.coarse},
        heads=scores,
    )
