"""Heads that look far back score high, heads that look at sinks and recent keys do not."""

from __future__ import annotations

import pytest
import torch

from spectrumkv_sglang.calibration.head_scores import LAST_QUERIES, RECENT_KEYS, SINK_KEYS, FarAttention
from spectrumkv_sglang.evaluation.attention_tap import LayerAttention

TOKENS, DIM = 512, 32
STRONG = 200.0


def _shares(attended: list[int], window: int | None = None, groups: int = 2) -> list[float]:
    """Scores of KV heads whose queries at the end attend to one key each, all but wholly."""
    heads = len(attended)
    key = torch.zeros(1, heads, TOKENS, DIM)
    query = torch.zeros(1, heads * groups, TOKENS, DIM)
    for head, position in enumerate(attended):
        key[0, head, position, 0] = 1
        query[0, head * groups : (head + 1) * groups, :, 0] = STRONG
    observer = FarAttention()
    observer.observe(LayerAttention(query, key, key, 1.0, window))
    [shares] = observer.shares
    return shares


def test_a_head_that_looks_far_back_scores_1_and_others_0() -> None:
    recent = TOKENS - LAST_QUERIES - 1
    assert _shares([SINK_KEYS + 5, SINK_KEYS - 1, recent]) == pytest.approx([1, 0, 0], abs=1e-6)


def test_the_first_far_key_and_the_last() -> None:
    last = TOKENS - LAST_QUERIES - RECENT_KEYS - 1
    assert _shares([SINK_KEYS, last, last + 1]) == pytest.approx([1, 1, 0], abs=1e-6)


def test_a_layer_with_a_short_window_sees_nothing_far() -> None:
    assert _shares([100], window=RECENT_KEYS) == [0]


def test_even_attention_is_shared_by_the_number_of_keys() -> None:
    observer = FarAttention()
    observer.observe(
        LayerAttention(torch.zeros(1, 2, TOKENS, DIM), torch.zeros(1, 1, TOKENS, DIM), torch.zeros(1), 1.0)
    )
    far = TOKENS - LAST_QUERIES - RECENT_KEYS - SINK_KEYS
    seen = [TOKENS - LAST_QUERIES + number + 1 for number in range(LAST_QUERIES)]
    assert observer.shares[0] == pytest.approx([sum(far / keys for keys in seen) / LAST_QUERIES])


def test_a_prefix_without_far_keys_scores_0() -> None:
    observer = FarAttention()
    observer.observe(LayerAttention(torch.zeros(1, 1, 100, DIM), torch.zeros(1, 1, 100, DIM), torch.zeros(1), 1.0))
    assert observer.shares == [[0.0]]
