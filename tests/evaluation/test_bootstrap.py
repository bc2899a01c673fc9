"""Scores over texts: means, paired changes, intervals."""

from __future__ import annotations

import math

import pytest

from spectrumkv_sglang.evaluation.bootstrap import TextBootstrap


def test_one_text_has_a_value_and_no_interval() -> None:
    estimate = TextBootstrap(1, seed=0).mean([0.25])
    assert (estimate.value, estimate.interval) == (0.25, None)


def test_the_interval_holds_the_mean_and_lies_within_the_texts() -> None:
    values = [0.1, 0.2, 0.4, 0.9]
    estimate = TextBootstrap(4, seed=0).mean(values)
    assert estimate.value == pytest.approx(0.4)
    assert estimate.interval is not None
    low, high = estimate.interval
    assert min(values) <= low < estimate.value < high <= max(values)


def test_perplexity_is_that_of_all_tokens_together() -> None:
    assert TextBootstrap(2, seed=0).perplexity([1.0, 3.0]).value == pytest.approx(math.exp(2.0))


def test_a_change_is_taken_text_by_text() -> None:
    """Texts differ far more from one another than a method from native: pairing leaves the texts' difference out."""
    native = [1.0, 2.0, 5.0]
    estimate = TextBootstrap(3, seed=0).change_pct([nll + 0.01 for nll in native], native)
    assert estimate.value == pytest.approx(100 * (math.exp(0.01) - 1))
    assert estimate.interval == pytest.approx((estimate.value, estimate.value))
    assert TextBootstrap(3, seed=0).change_pct(native, native).interval == (0.0, 0.0)


def test_the_seed_decides_the_resamples() -> None:
    values = [0.1, 0.5, 0.7, 0.2, 0.9]
    first = TextBootstrap(5, seed=1).mean(values)
    assert TextBootstrap(5, seed=1).mean(values) == first
    assert TextBootstrap(5, seed=2).mean(values).interval != first.interval


def test_a_perplexity_beyond_all_numbers_is_infinite() -> None:
    assert TextBootstrap(1, seed=0).perplexity([1e4]).value == math.inf


def test_a_power_law_is_found_with_no_doubt() -> None:
    lengths = [512, 2048, 8192]
    values = [[factor * length**0.4 for factor in (1.0, 3.0, 0.5)] for length in lengths]
    estimate = TextBootstrap(3, seed=0).exponent(lengths, values)
    assert estimate.value == pytest.approx(0.4)
    assert estimate.interval == pytest.approx((0.4, 0.4))


def test_texts_that_disagree_on_the_growth_widen_its_interval() -> None:
    values = [[1.0, 1.0, 1.0], [0.5, 1.0, 4.0]]
    estimate = TextBootstrap(3, seed=0).exponent([1000, 2000], values)
    assert estimate.interval is not None
    low, high = estimate.interval
    assert low < 0 < estimate.value < high


def test_a_ratio_is_taken_text_by_text() -> None:
    values = [1.0, 20.0, 300.0]
    estimate = TextBootstrap(3, seed=0).ratio([2 * value for value in values], values)
    assert estimate.value == pytest.approx(2)
    assert estimate.interval == pytest.approx((2, 2))
