"""Observes SGLang's attention during prefill and keeps the scores by pool slot.

Called after each layer's attention of an extend (prefill) forward. It reads the queries that the layer was given
and the keys that the layer has just written to the pool; it never changes what the layer returns, and an error in
it is counted and logged, not raised. With the kernels it never waits for the GPU.
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

import torch

from spectrumkv_sglang.importance.attention import observed_attention
from spectrumkv_sglang.importance.forward_layout import ObservedRequests, requests_of_forward
from spectrumkv_sglang.importance.kernel_observation import KernelObservation
from spectrumkv_sglang.importance.scorers import AttentionScorer
from spectrumkv_sglang.importance.scores import SlotScores
from spectrumkv_sglang.observability.once import log_once

logger = logging.getLogger(__name__)

_MOST_OPEN_FORWARDS = 4
"""Forwards whose layers may come interleaved (SGLang's two-batch overlap makes two of a batch)."""
_MOST_CHUNKED_REQUESTS = 4096


class _ForwardObservation(Protocol):
    """One forward under observation, by kernels or by torch."""

    def observe(
        self, layer: int, q: torch.Tensor, scaling: float, sliding_window: int | None, logit_cap: float | None
    ) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class _OpenForward:
    """A forward that SGLang is at; ``observation`` is None once it is over, or if it is not observed."""

    batch: weakref.ref[Any]
    observation: _ForwardObservation | None
    failed: bool = False


class AttentionObserver:
    """Scores the tokens of every prefill forward of one rank.

    Args:
        k_buffers: the pool's key tensors, one a layer, [pool slots, kv heads, head dim].
        req_to_token: SGLang's int32 [requests, positions] -> pool slot.
        scores: where the scores are kept.
        scorer: which queries to sample.
        on_error: called once for each forward whose observation failed.
        first_layer: layer id of the first key tensor.
        backend: "triton" for the kernels, compiled here and now; "torch" for the reference; "auto" for the kernels
            where a GPU's pool suits them.
    """

    def __init__(
        self,
        *,
        k_buffers: Sequence[torch.Tensor],
        req_to_token: torch.Tensor,
        scores: SlotScores,
        scorer: AttentionScorer,
        on_error: Callable[[], None],
        first_layer: int = 0,
        backend: Literal["auto", "torch", "triton"] = "auto",
    ) -> None:
        self._k_buffers, self._req_to_token = k_buffers, req_to_token
        self._scores, self._on_error = scores, on_error
        self._first_layer = first_layer
        self._sample_queries = lru_cache(maxsize=256)(scorer.sample_queries)
        self._open: deque[_OpenForward] = deque()
        self._prefilled: OrderedDict[str, int] = OrderedDict()
        self._kernels = _kernels(k_buffers, req_to_token, scores, backend)

    def observe(self, q: torch.Tensor, layer: Any, forward_batch: Any) -> None:
        """Add what ``layer`` attended to.

        Args:
            q: [tokens, q heads * head dim] or [tokens, q heads, head dim]; of Gemma 3 [1, tokens, q heads, head dim].
            layer: SGLang's RadixAttention.
            forward_batch: SGLang's ForwardBatch.
        """
        try:
            if q.dim() == 4:
                q = q.flatten(0, 1)
            if not forward_batch.forward_mode.is_extend_without_speculative():
                return
            if getattr(layer, "is_cross_attention", False):
                return
            index = layer.layer_id - self._first_layer
            if not 0 <= index < len(self._k_buffers):
                return
            forward = self._forward_of(forward_batch)
            if forward is None:
                forward = self._begin(forward_batch, layer.tp_q_head_num, q.dtype)
            if forward.observation is None:
                return
            forward.observation.observe(
                index,
                q,
                layer.scaling,
                getattr(layer, "sliding_window_size", None),
                getattr(layer, "logit_cap", None),
            )
            if index == len(self._k_buffers) - 1:
                forward.observation.finish()
                forward.observation = None
        except Exception as error:  # noqa: BLE001 (nothing in here may fail a forward)
            self._failed(forward_batch, repr(error))

    def _forward_of(self, forward_batch: Any) -> _OpenForward | None:
        for forward in self._open:  # the latest first
            if forward.batch() is forward_batch:
                return forward
        return None

    def _begin(self, forward_batch: Any, q_heads: int, dtype: torch.dtype) -> _OpenForward:
        """A new forward: forget the scores of newly written slots and lay out its requests."""
        forward = _OpenForward(weakref.ref(forward_batch), None)
        self._open.appendleft(forward)
        while len(self._open) > _MOST_OPEN_FORWARDS:
            self._abandon(self._open.pop())
        if self._req_to_token.is_cuda and torch.cuda.is_current_stream_capturing():
            return forward  # a graph's rehearsal: what it attends to is nobody's prompt
        prefixes = [int(tokens) for tokens in forward_batch.extend_prefix_lens_cpu]
        extends = [int(tokens) for tokens in forward_batch.extend_seq_lens_cpu]
        continuing = self._continuing(getattr(forward_batch, "rids", None), prefixes, extends)
        requests = requests_of_forward(prefixes, extends, continuing, self._sample_queries)
        if not len(requests):
            return forward
        if self._kernels is not None:
            forward.observation = self._kernels.begin(requests, forward_batch.req_pool_indices, q_heads, dtype)
        else:
            self._scores.reset(forward_batch.out_cache_loc)
            forward.observation = _TorchForward(
                requests, self._k_buffers, self._req_to_token, forward_batch.req_pool_indices, self._scores
            )
        return forward

    def _continuing(self, rids: Sequence[str] | None, prefixes: list[int], extends: list[int]) -> list[bool]:
        """Whether each request goes on where its last forward ended, so that its prefix is no cached one.

        A replayed prefill graph does not say whose requests it runs: then every prefix may be on its way already.
        """
        if rids is None:
            return [prefix > 0 for prefix in prefixes]
        continuing = [False] * len(extends)
        for row, rid in enumerate(rids):
            if row < len(extends) and extends[row] > 0:
                continuing[row] = self._prefilled.pop(rid, None) == prefixes[row]
                self._prefilled[rid] = prefixes[row] + extends[row]
        while len(self._prefilled) > _MOST_CHUNKED_REQUESTS:
            self._prefilled.popitem(last=False)
        return continuing

    def _abandon(self, forward: _OpenForward) -> None:
        """A forward of long ago: if it has not come to its last layer, its tokens have no scores."""
        if forward.observation is not None:
            forward.observation.close()
            forward.observation = None
            self._report("a forward ended before the pool's last layer")

    def _failed(self, forward_batch: Any, error: str) -> None:
        forward = self._forward_of(forward_batch)
        if forward is None:  # it did not come that far
            forward = _OpenForward(weakref.ref(forward_batch), None)
            self._open.appendleft(forward)
        if forward.observation is not None:
            forward.observation.close()
            forward.observation = None
        if not forward.failed:
            self._forget(forward_batch)
            forward.failed = True
            self._report(error)

    def _forget(self, forward_batch: Any) -> None:
        """The slots of a forward that was not observed must not keep the scores of their last tenants."""
        try:
            self._scores.reset(forward_batch.out_cache_loc)
        except Exception as error:  # noqa: BLE001 (the forward goes on)
            logger.debug("scores of a failed observation stay as they were: %r", error)

    def _report(self, error: str) -> None:
        self._on_error()
        log_once(
            logger,
            logging.WARNING,
            "attention-observer",
            f"token importance could not be observed: {error}; affected tokens count as unimportant",
        )


def _kernels(
    k_buffers: Sequence[torch.Tensor], req_to_token: torch.Tensor, scores: SlotScores, backend: str
) -> KernelObservation | None:
    """The kernels, compiled; None where torch is to do it."""
    if backend == "torch" or (backend == "auto" and k_buffers[0].device.type != "cuda"):
        return None
    problem = KernelObservation.why_not(k_buffers)
    if problem is not None:
        if backend == "triton":
            raise ValueError(f"the importance kernels take {problem}; use the torch backend")
        log_once(
            logger,
            logging.WARNING,
            "importance-without-kernels",
            f"token importance is observed by plain torch, which delays prefill: the kernels take {problem}",
        )
        return None
    try:
        kernels = KernelObservation(k_buffers, req_to_token, scores)
        kernels.warm_up()
    except Exception as error:
        if backend == "triton":
            raise
        # A small GPU may not have the shared memory that they want: serving is worth more than their speed.
        log_once(
            logger,
            logging.WARNING,
            "importance-without-kernels",
            f"token importance is observed by plain torch, which delays prefill: its kernels do not compile: {error!r}",
        )
        return None
    return kernels


class _TorchForward:
    """The reference: each layer and request by itself, as soon as the layer is through."""

    def __init__(
        self,
        requests: ObservedRequests,
        k_buffers: Sequence[torch.Tensor],
        req_to_token: torch.Tensor,
        pool_indices: torch.Tensor,
        scores: SlotScores,
    ) -> None:
        self._k_buffers, self._scores, self._requests = k_buffers, scores, requests
        device = req_to_token.device
        pool_rows = [pool_indices[row : row + 1].to(torch.int64) for row in requests.batch_rows.tolist()]
        self._slots = [
            req_to_token.index_select(0, pool_row)[0, :keys].to(torch.int64)
            for pool_row, keys in zip(pool_rows, requests.keys.tolist(), strict=True)
        ]
        self._query_rows = torch.from_numpy(requests.query_rows).to(device)
        self._positions = torch.from_numpy(requests.query_positions)

    def observe(
        self, layer: int, q: torch.Tensor, scaling: float, sliding_window: int | None, logit_cap: float | None
    ) -> None:
        q = q.view(len(q), -1, self._k_buffers[layer].shape[2])
        starts = self._requests.first_queries.tolist()
        for slots, start, end in zip(self._slots, starts, starts[1:], strict=False):
            column_sums, could_attend = observed_attention(
                q[self._query_rows[start:end]],
                self._k_buffers[layer][slots],
                self._positions[start:end],
                scaling,
                sliding_window=sliding_window,
                logit_cap=logit_cap,
            )
            self._scores.add(slots, column_sums, could_attend)

    def finish(self) -> None:
        for slots, first in zip(self._slots, self._requests.publish_from.tolist(), strict=True):
            self._scores.publish(slots[first:])

    def close(self) -> None:
        pass
