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


@dataclass(frozen=True)
class LayerAttention:
    """How one layer attends to one sequence.

    Attributes:
        query: [1, q_heads, tokens, head_dim].
        key: [1, kv_heads, tokens, head_dim].
        value: [1, kv_heads, tokens, v_head_dim].
        scaling: factor on the logits.
        window: keys that a query sees, its own included (``sliding_window`` of a config); None for all.
        cap: of the logits, or None.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    window: int | None = None
    cap: float | None = None

    def received(self, sampled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What ``observed_attention`` gives for the queries ``sampled``, over all heads."""
        return self._received(self._chosen(sampled), self._keys, sampled)

    def received_by_head(self, sampled: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The same for the query heads of each KV head apart."""
        keys = self._keys
        for head, own in enumerate(self._chosen(sampled).chunk(keys.shape[1], dim=1)):
            yield self._received(own, keys[:, head : head + 1], sampled)

    def weighted(self, sampled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``received`` with each KV head's attention times its values' norms."""
        norms = self.value[0].float().norm(dim=-1)
        norms /= norms.mean(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        by_head = list(self.received_by_head(sampled))
        total = torch.zeros_like(norms[0])
        for norm, (column_sums, _) in zip(norms, by_head, strict=True):
            total += column_sums * norm / len(norms)
        _, could_attend = by_head[0]  # the same for all heads
        return total, could_attend

    @property
    def _keys(self) -> torch.Tensor:
        return self.key[0].transpose(0, 1)

    def _chosen(self, sampled: torch.Tensor) -> torch.Tensor:
        return self.query[0].transpose(0, 1)[sampled.to(self.query.device)]

    def _received(self, q: torch.Tensor, k: torch.Tensor, sampled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        window = None if self.window is None else self.window - 1
        return observed_attention(q, k, sampled, self.scaling, window, self.cap)


class AttentionObserver(Protocol):
    """What is shown every attention layer of a forward."""

    def observe(self, layer: LayerAttention) -> None:
        """Called layer by layer."""


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

    def observe(self, layer: LayerAttention) -> None:
        """Add one layer's attention."""
        for (queries, value_weighted), readers in self._readers.items():
            sampled = self._sampled[queries]
            column_sums, could_attend = layer.weighted(sampled) if value_weighted else layer.received(sampled)
            for scores, normalised in readers:
                queries_seen = could_attend if normalised else torch.full_like(could_attend, len(sampled))
                scores.add(self._slots, column_sums, queries_seen)

    def finish(self) -> None:
        """The prefill is over: what was observed may be read."""
        for scores in self.scores.values():
            scores.publish(self._slots)


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
        observer.observe(LayerAttention(query, key, value, scale, options.get("sliding_window"), cap))
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
