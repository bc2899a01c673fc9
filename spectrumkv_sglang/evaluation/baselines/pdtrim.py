"""Dropping tokens in place of narrowing them: PDTrim, as SpectrumKV (arXiv 2606.08635) compares itself with it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from spectrumkv_sglang.evaluation.prefix import MovedKV, PrefixKV

SINK_TOKENS = 4
RECENT_TOKENS = 64


@dataclass(frozen=True)
class DropTokensBaseline:
    """The most important tokens travel native, the others not at all: decode cannot attend to them, positions stay.

    Sinks and the last tokens are kept first. A bit a token says which ones came.

    Args:
        budget: wire / native bytes.
        scorer: whose observed importance decides.
    """

    budget: float
    scorer: str = "window"
    description: str = "tokens dropped, the others native"

    def kept_tokens(self, prefix: PrefixKV) -> int:
        """How many tokens the budget keeps; at least one."""
        room = int(self.budget * prefix.native_bytes) - _map_bytes(prefix.tokens)
        return max(1, min(prefix.tokens, room // prefix.geometry.native_bytes_per_token))

    def move(self, prefix: PrefixKV) -> MovedKV:
        """Hide the least important tokens."""
        scores = prefix.scores[self.scorer].read(torch.arange(prefix.tokens)).cpu().numpy().astype(np.float64)
        scores[-RECENT_TOKENS:] = np.inf
        scores[:SINK_TOKENS] = np.inf
        kept_tokens = self.kept_tokens(prefix)
        kept = torch.zeros(prefix.tokens, dtype=torch.bool)
        kept[torch.from_numpy(np.argsort(-scores, kind="stable")[:kept_tokens].copy())] = True
        wire_bytes = kept_tokens * prefix.geometry.native_bytes_per_token + _map_bytes(prefix.tokens)
        return MovedKV(prefix.view.buffers, wire_bytes, kept=kept)


def _map_bytes(tokens: int) -> int:
    return -(-tokens // 8)
