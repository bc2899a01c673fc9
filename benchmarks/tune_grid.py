"""Judges every point of a space on a text, with what many points have in common done once.

The keys of a point's KV depend on its keys' precision and on the tokens' tiers alone, and so do its values: each half
is packed and unpacked once, by the code that serves, and points are judged several in a forward. What comes out is
compared with the harness that the search uses (`spectrumkv_sglang.search.judge`) on some of the points.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Half:
    """Keys (0) or values (1) of a point: what they are rounded to, and the tokens' tiers."""

    kv: int
    cells: bytes
    transform: int
    tiers: bytes


class GridJudge:
    """All points on one text.

    Args:
        model: on any device.
        window: the text.
        prefix_tokens: tokens whose KV travels; few enough for one payload.
        sink_tokens: first tokens, which stay native.
        at_once: points in one forward.
        kept_bytes: of halves that are kept for points to come.
        budgets: that are known already, by a point without its transforms; filled here, so that texts share them.
    """

    def __init__(
        self,
        model: EvalModel,
        window: TextWindow,
        prefix_tokens: int,
        sink_tokens: int,
        at_once: int,
        kept_bytes: int,
        budgets: dict[str, float],
    ) -> None:
        observed = observation(SCORER)
        assert observed is not None
        self._model: Any = model
        self._prefix = model.prefill(window.name, window.prefix(prefix_tokens), {SCORER: observed}).prefix
        self._fed = [window.first, *window.continuation[:-1]]
        native = MovedKV(self._prefix.view.buffers, self._prefix.native_bytes)
        self._reference = NativeReference(model.logits_after(native, self._fed), window.continuation)
        self._chunk = NominalChunk(self._prefix.geometry, prefix_tokens, sink_tokens)
        self._importance = self._prefix.scores[SCORER].fetch(np.arange(prefix_tokens))
        self._at_once, self._budgets = at_once, budgets
        self._halves_kept = max(2 * at_once, 2 * kept_bytes // self._prefix.native_bytes)
        self._halves: OrderedDict[_Half, list[torch.Tensor]] = OrderedDict()
        self.halves_made = 0
        """Halves that were packed and unpacked."""

    def kl(self, points: Sequence[Point]) -> Iterator[tuple[Point, float]]:
        """KL divergence of each point, nats a token, in an order of its own: points with a half in common meet."""
        ordered = sorted(points, key=lambda p: (p.key_scales, p.key_transform, p.upgrade, p.edges, p.key_bits))
        for start in range(0, len(ordered), self._at_once):
            batch = ordered[start : start + self._at_once]
            yield from zip(batch, self._judged([self._halves_of(point) for point in batch]), strict=True)

    @torch.inference_mode()
    def _judged(self, points: Sequence[tuple[_Half, _Half]]) -> list[float]:
        from transformers import DynamicCache

        cache = DynamicCache()
        model = self._model._model
        moved = [tuple(self._moved(half) for half in halves) for halves in points]
        for layer in range(self._prefix.geometry.layers):
            k, v = (
                torch.stack([halves[kv][layer].transpose(0, 1).to(model.dtype) for halves in moved]) for kv in (0, 1)
            )
            cache.update(k, v, layer)
        ids = torch.tensor([self._fed] * len(moved), device=self._prefix.view.device)
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
        return [max(0.0, self._reference.judge(one).kl) for one in logits]

    def _halves_of(self, point: Point) -> tuple[_Half, _Half]:
        profile = point.profile(self._prefix.geometry.layers)
        table = profile.table(self._prefix.geometry)
        rows = self._prefix.tokens
        sinks, recent = protected_rows(0, rows, rows, self._chunk.sink_tokens, RECENT_TOKENS)
        plan = plan_chunk(
            self._importance,
            self._prefix.geometry,
            table,
            self._budget_of(point),
            self._chunk.slot_bytes,
            sinks,
            profile.tiers_defined,
            SUBCHUNK_MESSAGE_BYTES + CHUNK_MESSAGE_BYTES + len(table.to_bytes()),
            preferred=recent,
        )
        if len(plan.subchunks) != 1:
            raise SystemExit(f"{point.name}: {rows} tokens take {len(plan.subchunks)} payloads; give fewer")
        tiers = plan.tiers.tobytes()
        keys, values = (
            _Half(kv, table.values[:, :, kv].tobytes(), int(table.transforms[0, kv]), tiers) for kv in (0, 1)
        )
        return keys, values

    def _budget_of(self, point: Point) -> float:
        plain = f"{point.key_bits}{point.key_scales}{point.value_bits}{point.value_scales}{point.edges}{point.upgrade}"
        if plain not in self._budgets:
            self._budgets[plain] = budget_of(point, self._chunk)
        return self._budgets[plain]

    def _moved(self, half: _Half) -> list[torch.Tensor]:
        """[tokens, heads, dim] of each layer, as decode would hold them; the last ones used are kept."""
        if half in self._halves:
            self._halves.move_to_end(half)
            return self._halves[half]
        geometry = self._prefix.geometry
        values = np.full((TIER_COUNT, geometry.layers, 2, geometry.kv_heads), Precision.NATIVE, dtype=np.uint8)
        cells = np.frombuffer(half.cells, np.uint8).reshape(TIER_COUNT, geometry.layers, geometry.kv_heads)
        values[:, :, half.kv] = cells
        transforms = np.zeros((geometry.layers, 2), dtype=np.uint8)
        transforms[:, half.kv] = half.transform
        table = PrecisionTable(values, transforms)
        row_tiers = np.frombuffer(half.tiers, np.uint8)
        layout = plan_layout(geometry, table, np.bincount(row_tiers, minlength=TIER_COUNT).tolist())
        view = self._prefix.copied_view()
        device = self._prefix.view.device
        slots = torch.arange(len(row_tiers), device=device)
        rotated = view.rotated(table, 0, len(row_tiers))
        payload = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=device)
        # By torch on a GPU too: nearly every half has a table of its own, whose kernels would be compiled for it alone.
        pack_payload(view.buffers, slots, row_tiers, layout, payload, backend="torch", rotated=rotated)
        unpack_payload(payload, view.buffers, slots, row_tiers, layout, backend="torch", rotated=rotated)
        self.halves_made += 1
        self._halves[half] = [view.buffers.of(layer, half.kv) for layer in range(geometry.layers)]
        if len(self._halves) > self._halves_kept:
            self._halves.popitem(last=False)
        return self._halves[half]
