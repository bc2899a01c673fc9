"""What a profile costs on each text: its KV moved by the code that serves, the continuation judged after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spectrumkv_sglang.calibration.allocated_profile import profile_yaml
from spectrumkv_sglang.calibration.allocation import NominalChunk
from spectrumkv_sglang.calibration.measurement import ContinuationCost
from spectrumkv_sglang.config import SpectrumKVConfig, load_config
from spectrumkv_sglang.evaluation.model import EvalModel
from spectrumkv_sglang.evaluation.prefix import PrefixKV
from spectrumkv_sglang.evaluation.progress import Advance
from spectrumkv_sglang.evaluation.scorers import observation
from spectrumkv_sglang.evaluation.served_path import ProfileMethod
from spectrumkv_sglang.evaluation.windows import TextWindow
from spectrumkv_sglang.evaluation.work import judged_work
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.search.space import Point
from spectrumkv_sglang.search.wire_cost import budget_of
from spectrumkv_sglang.transfer.pool_view import PoolView

SCORER = "window"
"""The scorer that serves by default."""


@dataclass(frozen=True)
class _Text:
    prefix: PrefixKV
    cost: ContinuationCost


class Judge:
    """Prefills each text once and judges any number of points on it.

    Args:
        model: to judge by.
        windows: texts; at least one.
        prefix_tokens: tokens whose KV travels.
        sink_tokens: first tokens, which stay native.
        folder: for profiles while this is used.
        advance: told of `judge_work`'s first part.
    """

    def __init__(
        self,
        model: EvalModel,
        windows: Sequence[TextWindow],
        prefix_tokens: int,
        sink_tokens: int,
        folder: Path,
        advance: Advance,
    ) -> None:
        self._model, self._folder = model, folder
        self._sink_tokens, self._prefix_tokens = sink_tokens, prefix_tokens
        observed = observation(SCORER)
        assert observed is not None  # a scorer that observes, named above
        self._texts = []
        for window in windows:
            prefix = model.prefill(window.name, window.prefix(prefix_tokens), {SCORER: observed}).prefix
            self._texts.append(_Text(prefix, ContinuationCost(model, window, prefix)))
            advance(prefix_tokens + judged_work(len(window.continuation)))

    @property
    def texts(self) -> int:
        """Number of texts."""
        return len(self._texts)

    @property
    def geometry(self) -> KVGeometry:
        """Of the model's KV."""
        return self._texts[0].prefix.geometry

    def pool(self) -> PoolView:
        """A pool of its own with one text's KV, to measure speeds on."""
        return self._texts[0].prefix.copied_view()

    def kl(self, point: Point, text: int) -> float:
        """KL divergence of the text's continuation from the native one, nats a token, at least 0."""
        prefix = self._texts[text].prefix
        moved = ProfileMethod(self._config(point), point.description).move(prefix)
        return self._texts[text].cost.kl(moved)

    def _config(self, point: Point) -> SpectrumKVConfig:
        """What would serve the point's profile, and upgrade the same share of these short prefixes as of long ones."""
        path = self._folder / f"{point.name}.yaml"
        if not path.exists():
            path.write_text(profile_yaml(point.profile(self.geometry.layers), []), encoding="utf-8")
        here = NominalChunk(self.geometry, self._prefix_tokens, self._sink_tokens)
        config = load_config(
            None, {}, {"profile": ("profile", str(path)), "min_tokens": ("min_tokens", 0), "scorer": ("scorer", SCORER)}
        )
        return config.with_policy(str(path), budget_of(point, here))


def judge_work(windows: Sequence[TextWindow], prefix_tokens: int, points: int) -> float:
    """What prefilling the texts and judging ``points`` on all of them takes, in tokens of prefill."""
    return sum(prefix_tokens + (points + 1) * judged_work(len(window.continuation)) for window in windows)
