"""SpectrumKV as published (arXiv 2606.08635): one scale a token over all KV heads, tiers by position.

The paper's budget leaves scales out. Here they are counted, and tokens move to lower tiers until all of it fits, so
that rows of equal bytes can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from spectrumkv_sglang.evaluation.baselines.rounding import PARAM_BYTES, code_bytes, symmetric
from spectrumkv_sglang.evaluation.prefix import MovedKV, PrefixKV
from spectrumkv_sglang.importance.scorers import PositionScorer
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.tier_map import tier_map_bytes


def token_bytes(geometry: KVGeometry, bits: int) -> int:
    """Bytes of one token in ``bits`` bits: codes, and a scale each for K and V of each layer."""
    heads = geometry.kv_heads
    codes = code_bytes(heads * geometry.head_dim, bits) + code_bytes(heads * geometry.v_head_dim, bits)
    return geometry.layers * (codes + 2 * PARAM_BYTES)


@dataclass(frozen=True)
class PaperGreedyBaseline:
    """The paper's split: FP16 and INT8 down to the bytes of INT8 alone, below them INT8 and INT4 down to INT4 alone.

    Args:
        budget: wire / native bytes, all counted. Below INT4's bytes every token is INT4.
    """

    budget: float
    scorer: str | None = None
    description: str = "SpectrumKV as published: greedy shares, a scale a token, tiers by position"

    def counts(self, prefix: PrefixKV) -> tuple[int, int, int]:
        """Tokens in FP16, INT8 and INT4."""
        geometry, tokens = prefix.geometry, prefix.tokens
        room = int(self.budget * prefix.native_bytes) - tier_map_bytes(tokens)
        native, int8, int4 = geometry.native_bytes_per_token, token_bytes(geometry, 8), token_bytes(geometry, 4)
        if room >= tokens * int8:
            high = min(tokens, (room - tokens * int8) // (native - int8))
            return high, tokens - high, 0
        mid = max(0, (room - tokens * int4) // (int8 - int4))
        return 0, mid, tokens - mid

    def move(self, prefix: PrefixKV) -> MovedKV:
        """Round every token as its tier says."""
        return _move_in_tiers(prefix, self.counts(prefix))


@dataclass(frozen=True)
class PaperBalancedBaseline:
    """The paper's "Balanced": FP16, INT8 and INT4 for 1, 2 and 2 of 5 tokens."""

    budget: float | None = None
    scorer: str | None = None
    description: str = "SpectrumKV's Balanced: FP16, INT8, INT4 as 1:2:2, a scale a token, tiers by position"

    def move(self, prefix: PrefixKV) -> MovedKV:
        """Round every token as its tier says."""
        high, mid = prefix.tokens // 5, prefix.tokens * 2 // 5
        return _move_in_tiers(prefix, (high, mid, prefix.tokens - high - mid))


def _move_in_tiers(prefix: PrefixKV, counts: tuple[int, int, int]) -> MovedKV:
    tokens, geometry = prefix.tokens, prefix.geometry
    order = np.argsort(-PositionScorer().scores(0, tokens, 0), kind="stable")
    mid_rows = torch.from_numpy(order[counts[0] : counts[0] + counts[1]].copy())
    low_rows = torch.from_numpy(order[counts[0] + counts[1] :].copy())
    view = prefix.copied_view()
    for buffer in (*view.buffers.k, *view.buffers.v):
        for rows, bits in ((mid_rows, 8), (low_rows, 4)):
            own = rows.to(buffer.device)
            buffer[own] = symmetric(buffer[own].float(), bits, (1, 2)).to(buffer.dtype) if len(own) else buffer[own]
    cost = (geometry.native_bytes_per_token, token_bytes(geometry, 8), token_bytes(geometry, 4))
    wire_bytes = tier_map_bytes(tokens) + sum(count * size for count, size in zip(counts, cost, strict=True))
    return MovedKV(view.buffers, wire_bytes, tokens_by_tier=counts)
