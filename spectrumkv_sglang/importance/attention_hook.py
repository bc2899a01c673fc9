"""Observes SGLang's attention during prefill and keeps the scores by pool slot.

Called after each layer's attention of an extend (prefill) forward. It reads the queries that the layer was given
and the keys that the layer has just written to the pool; it never changes what the layer returns, and an error in
it is counted and logged, not raised.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from spectrumkv_sglang.importance.attention import observed_attention
from spectrumkv_sglang.importance.scorers import AttentionScorer
from spectrumkv_sglang.importance.scores import SlotScores
from spectrumkv_sglang.observability.once import log_once

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Observed:
    """One request of a forward: where its tokens and its sampled queries lie."""

    key_slots: torch.Tensor  # int64 [keys], pool slots of positions 0, 1, ...
    query_rows: torch.Tensor  # int64 [queries], rows of q
    query_positions: torch.Tensor  # int64 [queries], on the CPU


class AttentionObserver:
    """Scores the tokens of every prefill forward of one rank.

    Args:
        k_buffers: the pool's key tensors, one a layer, [pool slots, kv heads, head dim].
        req_to_token: SGLang's int32 [requests, positions] -> pool slot.
        scores: where the scores are kept.
        scorer: which queries to sample.
        on_error: called once for each forward whose observation failed.
    """

    def __init__(
        self,
        *,
        k_buffers: list[torch.Tensor],
        req_to_token: torch.Tensor,
        scores: SlotScores,
        scorer: AttentionScorer,
        on_error: Callable[[], None],
        first_layer: int = 0,
    ) -> None:
        self._k_buffers, self._req_to_token = k_buffers, req_to_token
        self._scores, self._scorer, self._on_error = scores, scorer, on_error
        self._first_layer = first_layer
        self._forward: weakref.ref[Any] | None = None
        self._requests: list[_Observed] = []
        self._failed_forward: weakref.ref[Any] | None = None

    def observe(self, q: torch.Tensor, layer: Any, forward_batch: Any) -> None:
        """Add what ``layer`` attended to. ``q`` is [tokens, q heads * head dim] or [tokens, q heads, head dim]."""
        try:
            if not forward_batch.forward_mode.is_extend_without_speculative():
                return
            if getattr(layer, "is_cross_attention", False):
                return
            index = layer.layer_id - self._first_layer
            if not 0 <= index < len(self._k_buffers):
                return
            if self._forward is None or self._forward() is not forward_batch:
                self._begin(forward_batch)
            q = q.view(-1, layer.tp_q_head_num, layer.head_dim)
            for request in self._requests:
                column_sums, could_attend = observed_attention(
                    q[request.query_rows],
                    self._k_buffers[index][request.key_slots],
                    request.query_positions,
                    layer.scaling,
                    sliding_window=getattr(layer, "sliding_window_size", None),
                    logit_cap=getattr(layer, "logit_cap", None),
                )
                self._scores.add(request.key_slots, column_sums, could_attend)
        except Exception as error:  # noqa: BLE001 (nothing in here may fail a forward)
            if self._failed_forward is None or self._failed_forward() is not forward_batch:
                self._failed_forward = weakref.ref(forward_batch)
                self._on_error()
            log_once(
                logger,
                logging.WARNING,
                "attention-observer",
                f"token importance could not be observed: {error!r}; affected tokens count as unimportant",
            )

    def _begin(self, forward_batch: Any) -> None:
        """A new forward: forget the scores of newly written slots and lay out its requests."""
        self._forward = weakref.ref(forward_batch)
        self._requests = []
        self._scores.reset(forward_batch.out_cache_loc)
        first_row = 0
        for request, prefix, extend in zip(
            forward_batch.req_pool_indices.tolist(),
            forward_batch.extend_prefix_lens_cpu,
            forward_batch.extend_seq_lens_cpu,
            strict=False,  # padded batches carry zero-length entries behind the real ones
        ):
            prefix, extend = int(prefix), int(extend)
            if extend > 0:
                sampled = torch.from_numpy(np.asarray(self._scorer.sample_queries(extend), dtype=np.int64))
                self._requests.append(
                    _Observed(
                        key_slots=self._req_to_token[request, : prefix + extend].to(torch.int64),
                        query_rows=(sampled + first_row).to(self._req_to_token.device),
                        query_positions=sampled + prefix,
                    )
                )
            first_row += extend
