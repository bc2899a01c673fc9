"""Which queries are observed, and the rules that observe none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrumkv_sglang.importance.attention import observed_attention
from spectrumkv_sglang.importance.scorers import (
    AttentionScorer,
    ExactScorer,
    RandomScorer,
    RuleScorer,
    WindowScorer,
    make_scorer,
    scorer_names,
)


@pytest.mark.parametrize("name", scorer_names())
@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 1000])
def test_every_scorer_keeps_its_contract(name: str, tokens: int) -> None:
    scorer = make_scorer(name)
    assert scorer.name == name
    if isinstance(scorer, AttentionScorer):
        assert scorer.needs_attention
        queries = scorer.sample_queries(tokens)
        assert queries.dtype == np.int64
        assert (np.diff(queries) > 0).all()
        assert len(queries) == 0 or (queries[0] >= 0 and queries[-1] == tokens - 1)
    else:
        assert isinstance(scorer, RuleScorer)
        assert not scorer.needs_attention
        scores = scorer.scores(first_position=7, rows=tokens, room=2**63 - 1)
        assert scores.dtype == np.float32
        assert scores.shape == (tokens,)
        assert np.isfinite(scores).all()
        assert (scores >= 0).all()


@given(tokens=st.integers(0, 5000), window=st.integers(0, 64), samples=st.integers(0, 64))
@settings(max_examples=100, deadline=None)
def test_window_takes_the_end_and_spreads_the_rest(tokens: int, window: int, samples: int) -> None:
    if window + samples == 0:
        return
    queries = WindowScorer(window, samples).sample_queries(tokens)
    assert len(queries) == min(tokens, window + samples)
    assert (np.diff(queries) > 0).all()
    assert set(range(max(0, tokens - window), tokens)) <= set(queries.tolist())
    before = queries[queries < tokens - window]
    if len(before) > 1:
        steps = np.diff(before)
        assert steps.max() - steps.min() <= 1


def test_the_sample_agrees_with_the_exact_scores_on_what_matters() -> None:
    torch.manual_seed(0)
    tokens = 400
    q, k = torch.randn(tokens, 2, 16), torch.randn(tokens, 2, 16)
    heavy = [50, 130, 260]
    k[heavy] = q.mean(dim=(0, 1)) * 60  # keys that every query likes a little
    q += q.mean(dim=(0, 1)) * 20

    def score(scorer: AttentionScorer) -> np.ndarray:
        positions = torch.from_numpy(scorer.sample_queries(tokens))
        sums, could_attend = observed_attention(q[positions], k, positions, 0.25)
        return (sums / could_attend.clamp(min=1)).numpy()

    assert sorted(np.argsort(score(ExactScorer()))[-3:]) == heavy
    assert sorted(np.argsort(score(WindowScorer(32, 32)))[-3:]) == heavy


def test_random_repeats_by_seed_room_and_position() -> None:
    one = RandomScorer(seed=1)
    assert np.array_equal(one.scores(0, 50, room=9), RandomScorer(seed=1).scores(0, 50, room=9))
    for other in (RandomScorer(2).scores(0, 50, 9), one.scores(0, 50, 10), one.scores(50, 50, 9)):
        assert not np.array_equal(one.scores(0, 50, 9), other)


def test_position_ranks_later_tokens_higher_across_chunks() -> None:
    scorer = make_scorer("position")
    assert isinstance(scorer, RuleScorer)
    both = np.concatenate([scorer.scores(0, 5, 1), scorer.scores(5, 5, 1)])
    assert (np.diff(both) > 0).all()


def test_uniform_has_no_favourites() -> None:
    scorer = make_scorer("uniform")
    assert isinstance(scorer, RuleScorer)
    assert set(scorer.scores(0, 5, 1).tolist()) == {1.0}


def test_settings_reach_the_scorer() -> None:
    assert make_scorer("window", window=5, stride_samples=7) == WindowScorer(5, 7)
    assert make_scorer("random", seed=3) == RandomScorer(3)


def test_what_cannot_score_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown scorer 'oracle': choose from window"):
        make_scorer("oracle")
    with pytest.raises(ValueError, match="nor both 0"):
        WindowScorer(0, 0)
    with pytest.raises(ValueError, match="must not be negative"):
        WindowScorer(-1, 5)
