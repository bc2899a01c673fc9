"""Sees the queries of every attention layer of a transformers model, whatever its family.

transformers looks attention up by name in a registry. One function is registered here: it shows queries and keys, as
they are after the rotary embedding, to the observer in force, and then attends as SDPA does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from spectrumkv_sglang.evaluation.errors import EvaluationError
from spectrumkv_sglang.evaluation.scorers import Observation
from spectrumkv_sglang.importance.attention import observed_attention
from spectrumkv_sglang.importance.scorers import AttentionScorer
from spectrumkv_sglang.importance.scores import SlotScores

ATTENTION_NAME = "spectrumkv_observed"


class AttentionObserver(Protocol):
    """What is shown every attention layer of a forward."""

    def observe(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        cap: float | None,
    ) -> None:
        """One layer's attention, as `PrefillObserver.observe` takes it."""


class PrefillObserver:
    """Scores a prefix's tokens while it is prefilled: one `SlotScores` a scorer, slot i for position i.

    Scorers that read the same queries share one computation.

    Args:
        tokens: of the prefix.
        observations: what to look at, by the scorer's name.
        device: where the scores lie.
    """

    def __init__(self, tokens: int, observations: Mapping[str, Observation], device: torch.device) -> None:
        self.scores = {name: SlotScores(tokens, device) for name in observations}
        self._slots = torch.arange(tokens)
        self._readers: dict[tuple[AttentionScorer, bool], list[tuple[SlotScores, bool]]] = {}
        for name, seen in observations.items():
            readers = self._readers.setdefault((seen.queries, seen.value_weighted), [])
            readers.append((self.scores[name], seen.normalised))
        self._sampled = {queries: torch.from_numpy(queries.sample_queries(tokens)) for queries, _ in self._readers}

    def observe(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        cap: float | None,
    ) -> None:
        """Add one layer's attention.

        Args:
            query: [1, q_heads, tokens, head_dim].
            key: [1, kv_heads, tokens, head_dim].
            value: [1, kv_heads, tokens, v_head_dim].
            scaling: factor on the logits.
            window: keys that a query sees, its own included (``sliding_window`` of a config); None for all.
            cap: of the logits, or None.
        """
        q, k = query[0].transpose(0, 1), key[0].transpose(0, 1)
        attends = _Attention(scaling, None if window is None else window - 1, cap)
        for (queries, value_weighted), readers in self._readers.items():
            sampled = self._sampled[queries]
            chosen = q[sampled.to(q.device)]
            if value_weighted:
                column_sums, could_attend = attends.weighted(chosen, k, sampled, value[0])
            else:
                column_sums, could_attend = attends.received(chosen, k, sampled)
            for scores, normalised in readers:
                queries_seen = could_attend if normalised else torch.full_like(could_attend, len(sampled))
                scores.add(self._slots, column_sums, queries_seen)

    def finish(self) -> None:
        """The prefill is over: what was observed may be read."""
        for scores in self.scores.values():
            scores.publish(self._slots)


@dataclass(frozen=True)
class _Attention:
    """How one layer attends."""

    scaling: float
    window: int | None
    cap: float | None

    def received(self, q: torch.Tensor, k: torch.Tensor, sampled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What ``observed_attention`` gives."""
        return observed_attention(q, k, sampled, self.scaling, self.window, self.cap)

    def weighted(
        self, q: torch.Tensor, k: torch.Tensor, sampled: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same with each KV head's attention times its values' norms; ``values`` [kv_heads, tokens, v_head_dim]."""
        norms = values.float().norm(dim=-1)
        norms /= norms.mean(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        heads = len(values)
        total, could_attend = torch.zeros_like(norms[0]), torch.zeros_like(norms[0])
        for head, own in enumerate(q.chunk(heads, dim=1)):
            column_sums, could_attend = self.received(own, k[:, head : head + 1], sampled)
            total += column_sums * norms[head] / heads
        return total, could_attend


_OBSERVER: ContextVar[AttentionObserver | None] = ContextVar("observer", default=None)


@contextmanager
def observing(observer: AttentionObserver) -> Iterator[None]:
    """Show every layer's attention to ``observer`` meanwhile."""
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


def register_attention() -> str:
    """Make transformers know the function; returns the name to load models with."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(ATTENTION_NAME, _observed_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    return ATTENTION_NAME


def _observed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if options.get("s_aux") is not None:
        raise EvaluationError("this model adds learned sinks to its attention, which the evaluation does not compute")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    cap: float | None = options.pop("softcap", None)
    observer = _OBSERVER.get()
    if observer is not None:
        observer.observe(query, key, value, scale, options.get("sliding_window"), cap)
    if cap:
        return _capped_attention(query, key, value, attention_mask, scale, cap), None
    attended, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scale, **options
    )
    return attended, None


def _capped_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float, cap: float
) -> torch.Tensor:
    """Attention with capped logits (Gemma 2), [1, tokens, heads, head_dim]; ``mask`` bool, True: may attend."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    logits = torch.matmul(query.float() * scale, key.float().transpose(2, 3)).div_(cap).tanh_().mul_(cap)
    if mask is None:  # no mask: causal, and the queries are the last tokens
        queries, keys = logits.shape[-2:]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=logits.device).tril_(keys - queries)
    logits.masked_fill_(~mask, float("-inf"))
    return torch.matmul(logits.softmax(-1).to(value.dtype), value).transpose(1, 2).contiguous()
