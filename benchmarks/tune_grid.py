"""Judges every point of a space on a text, with what many points have in common done once.

The keys of a point's KV depend on its keys' precision and on the tokens' tiers alone, and so do its values: each half
is packed and unpacked once, by the code that serves, and points are judged several in a forward. What comes out is
compared with the harness that the search uses (`spectrumkv_sglang.search.judge`) on some of the points.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from spectrumkv_sglang.calibration.allocation import NominalChunk
from spectrumkv_sglang.evaluation.judging import NativeReference
from spectrumkv_sglang.evaluation.model import EvalModel
from spectrumkv_sglang.evaluation.prefix import MovedKV
from spectrumkv_sglang.evaluation.scorers import observation
from spectrumkv_sglang.evaluation.windows import TextWindow
from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.payload.codec import pack_payload, unpack_payload
from spectrumkv_sglang.payload.layout import plan_layout
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.profiles.chunk_plan import plan_chunk, protected_rows
from spectrumkv_sglang.profiles.tier import TIER_COUNT
from spectrumkv_sglang.search.judge import SCORER
from spectrumkv_sglang.search.space import Point
from spectrumkv_sglang.search.wire_cost import budget_of
from spectrumkv_sglang.transfer.chunk_planner import CHUNK_MESSAGE_BYTES, SUBCHUNK_MESSAGE_BYTES

RECENT_TOKENS = 64
AT_ONCE = 8
HALVES_KEPT = 160


class GridJudge:
    """All points on one text.

    Args:
        model: on a CPU.
        window: the text.
        prefix_tokens: tokens whose KV travels; few enough for one payload.
        sink_tokens: first tokens, which stay native.
    """

    def __init__(self, model: EvalModel, window: TextWindow, prefix_tokens: int, sink_tokens: int) -> None:
        observed = observation(SCORER)
        assert observed is not None
        self._model: Any = model
        self._prefix = model.prefill(window.name, window.prefix(prefix_tokens), {SCORER: observed}).prefix
        self._fed = [window.first, *window.continuation[:-1]]
        native = MovedKV(self._prefix.view.buffers, self._prefix.native_bytes)
        self._reference = NativeReference(model.logits_after(native, self._fed), window.continuation)
        self._chunk = NominalChunk(self._prefix.geometry, prefix_tokens, sink_tokens)
        self._importance = self._prefix.scores[SCORER].fetch(np.arange(prefix_tokens))
        self._half = lru_cache(maxsize=HALVES_KEPT)(self._moved_half)

    def kl(self, points: Sequence[Point]) -> Iterator[tuple[Point, float]]:
        """KL divergence of each point, nats a token, in an order of its own."""
        ordered = sorted(points, key=lambda p: (p.key_scales, p.key_transform, p.upgrade, p.edges, p.key_bits))
        for start in range(0, len(ordered), AT_ONCE):
            batch = ordered[start : start + AT_ONCE]
            yield from zip(batch, self._judged([self._halves(point) for point in batch]), strict=True)

    @torch.inference_mode()
    def _judged(self, moved: Sequence[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> list[float]:
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer in range(self._prefix.geometry.layers):
            k, v = (torch.stack([halves[kv][layer].transpose(0, 1).float() for halves in moved]) for kv in (0, 1))
            cache.update(k, v, layer)
        ids = torch.tensor([self._fed] * len(moved))
        logits = self._model._model(input_ids=ids, past_key_values=cache, use_cache=True).logits
        return [max(0.0, self._reference.judge(one).kl) for one in logits]

    def _halves(self, point: Point) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        profile = point.profile(self._prefix.geometry.layers)
        table = profile.table(self._prefix.geometry)
        rows = self._prefix.tokens
        sinks, recent = protected_rows(0, rows, rows, self._chunk.sink_tokens, RECENT_TOKENS)
        plan = plan_chunk(
            self._importance,
            self._prefix.geometry,
            table,
            budget_of(point, self._chunk),
            self._chunk.slot_bytes,
            sinks,
            profile.tiers_defined,
            SUBCHUNK_MESSAGE_BYTES + CHUNK_MESSAGE_BYTES + len(table.to_bytes()),
            preferred=recent,
        )
        assert len(plan.subchunks) == 1
        tiers = plan.tiers.tobytes()
        return tuple(  # type: ignore[return-value]
            self._half(kv, table.values[:, :, kv].tobytes(), int(table.transforms[0, kv]), tiers) for kv in (0, 1)
        )

    def _moved_half(self, kv: int, cells: bytes, transform: int, tiers: bytes) -> list[torch.Tensor]:
        geometry = self._prefix.geometry
        values = np.full((TIER_COUNT, geometry.layers, 2, geometry.kv_heads), Precision.NATIVE, dtype=np.uint8)
        values[:, :, kv] = np.frombuffer(cells, np.uint8).reshape(TIER_COUNT, geometry.layers, geometry.kv_heads)
        transforms = np.zeros((geometry.layers, 2), dtype=np.uint8)
        transforms[:, kv] = transform
        table = PrecisionTable(values, transforms)
        row_tiers = np.frombuffer(tiers, np.uint8)
        layout = plan_layout(geometry, table, np.bincount(row_tiers, minlength=TIER_COUNT).tolist())
        view = self._prefix.copied_view()
        slots = torch.arange(len(row_tiers))
        rotated = view.rotated(table, 0, len(row_tiers))
        payload = torch.zeros(layout.total_bytes, dtype=torch.uint8)
        pack_payload(view.buffers, slots, row_tiers, layout, payload, rotated=rotated)
        unpack_payload(payload, view.buffers, slots, row_tiers, layout, rotated=rotated)
        return [view.buffers.of(layer, kv) for layer in range(geometry.layers)]
