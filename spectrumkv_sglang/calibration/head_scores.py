"""How far back each KV head looks: retrieval heads attend to anything, streaming heads to sinks and recent tokens.

After DuoAttention (arXiv 2410.10819) and RazorAttention (arXiv 2407.15891), which keep whole caches for retrieval heads
alone. Here a score only says how a layer's cost is shared among its heads, without rounding one head after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spectrumkv_sglang.evaluation.attention_tap import LayerAttention
from spectrumkv_sglang.evaluation.model import EvalModel
from spectrumkv_sglang.evaluation.windows import TextWindow

SINK_KEYS = 16
"""First keys of a sequence, which streaming heads attend to."""
RECENT_KEYS = 128
"""Keys before a query that are near to it."""
LAST_QUERIES = 64
"""Queries at the prefix' end whose attention is looked at."""


class FarAttention:
    """Takes one prefill's attention layer by layer (`AttentionObserver`).

    Attributes:
        shares: by layer, for each KV head the share of its attention that goes to keys that are neither sinks nor
            recent, mean over its query heads and the queries at the end, in [0, 1].
    """

    def __init__(self) -> None:
        self.shares: list[list[float]] = []

    def observe(self, layer: LayerAttention) -> None:
        """Add one layer."""
        tokens = layer.key.shape[2]
        queries = torch.arange(max(0, tokens - LAST_QUERIES), tokens)
        far = slice(SINK_KEYS, max(SINK_KEYS, tokens - LAST_QUERIES - RECENT_KEYS))
        by_head = layer.received_by_head(queries)
        self.shares.append([float(sums[far].sum()) / len(queries) for sums, _ in by_head])


def head_scores(model: EvalModel, windows: Sequence[TextWindow], prefix_tokens: int) -> list[list[float]]:
    """`FarAttention.shares`, mean over the windows, [layers][kv_heads]."""
    seen = []
    for window in windows:
        observer = FarAttention()
        model.show_attention(window.prefix(prefix_tokens), observer)
        seen.append(torch.tensor(observer.shares, dtype=torch.float64))
    scores: list[list[float]] = torch.stack(seen).mean(dim=0).tolist()
    return scores
