"""Scores kept by pool slot."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spectrumkv_sglang.importance.attention import observed_attention
from spectrumkv_sglang.importance.scores import SlotScores


def test_unobserved_slots_score_zero() -> None:
    scores = SlotScores(8, "cpu")
    read = scores.read(torch.tensor([7, 0]))
    assert read.tolist() == [0.0, 0.0]
    assert read.dtype == torch.float32


def test_observations_add_up_before_they_are_divided() -> None:
    scores = SlotScores(8, "cpu")
    scores.add(torch.tensor([5, 2]), torch.tensor([1.0, 0.5]), torch.tensor([2.0, 1.0]))
    scores.add(torch.tensor([2, 5]), torch.tensor([0.5, 2.0]), torch.tensor([4.0, 4.0]))
    scores.publish(torch.tensor([2, 5, 0]))
    assert scores.read(torch.tensor([2, 5, 0])).tolist() == pytest.approx([1.0 / 5, 3.0 / 6, 0.0])


def test_only_what_was_published_is_read() -> None:
    scores = SlotScores(4, "cpu")
    slots = torch.tensor([3, 1])
    scores.add(slots, torch.tensor([1.0, 0.5]), torch.tensor([2.0, 2.0]))
    assert scores.read(slots).tolist() == [0.0, 0.0]
    scores.publish(torch.tensor([3]))
    assert scores.read(slots).tolist() == [0.5, 0.0]
    scores.add(slots, torch.tensor([1.0, 0.5]), torch.tensor([1.0, 1.0]))
    assert scores.read(slots).tolist() == [0.5, 0.0]
    np.testing.assert_array_equal(scores.fetch(np.array([1, 3])), np.array([0.0, 0.5], dtype=np.float32))


def test_sums_do_not_depend_on_the_order_of_observations() -> None:
    torch.manual_seed(1)
    slots, sums = torch.arange(50), torch.rand(20, 50) * 10 ** torch.linspace(-6, 1, 20)[:, None]
    totals = []
    for order in (range(20), reversed(range(20))):
        scores = SlotScores(50, "cpu")
        for i in order:
            scores.add(slots, sums[i], torch.ones(50))
        scores.publish(slots)
        totals.append(scores.read(slots))
    assert torch.equal(*totals)


def test_what_is_not_a_number_adds_nothing() -> None:
    scores = SlotScores(3, "cpu")
    scores.add(torch.arange(3), torch.tensor([float("nan"), float("inf"), 0.5]), torch.ones(3))
    scores.publish(torch.arange(3))
    assert scores.read(torch.arange(3)).tolist() == [0.0, 0.0, 0.5]


def test_a_slot_that_was_observed_very_often_keeps_its_score() -> None:
    scores = SlotScores(2, "cpu")
    for _ in range(3):
        scores.add(torch.arange(2), torch.full((2,), 2.0**29), torch.tensor([2.0**30, 2.0**28]))
    scores.publish(torch.arange(2))
    assert scores.read(torch.arange(2)).tolist() == [0.5, 2.0]
    assert bool((scores.received > 0).all())


def test_reset_forgets_only_its_slots() -> None:
    scores = SlotScores(4, "cpu")
    scores.add(torch.arange(4), torch.ones(4), torch.full((4,), 2.0))
    scores.publish(torch.arange(4))
    scores.reset(torch.tensor([1, 3]))
    assert scores.read(torch.arange(4)).tolist() == [0.5, 0.0, 0.5, 0.0]
    scores.add(torch.arange(4), torch.ones(4), torch.full((4,), 1.0))
    scores.publish(torch.arange(4))
    assert scores.read(torch.arange(4)).tolist() == pytest.approx([2 / 3, 1.0, 2 / 3, 1.0])


def test_chunked_prefill_accumulates_to_the_score_of_one_chunk() -> None:
    torch.manual_seed(0)
    tokens, layers = 30, 3
    slots = torch.randperm(64)[:tokens]
    q, k = torch.randn(layers, tokens, 4, 8), torch.randn(layers, tokens, 2, 8)

    whole, chunked = SlotScores(64, "cpu"), SlotScores(64, "cpu")
    for start, end in ((0, tokens),):
        for layer in range(layers):
            whole.add(slots[:end], *observed_attention(q[layer], k[layer], torch.arange(start, end), 0.3))
    for start, end in ((0, 11), (11, 24), (24, tokens)):
        for layer in range(layers):
            observed = observed_attention(q[layer, start:end], k[layer, :end], torch.arange(start, end), 0.3)
            chunked.add(slots[:end], *observed)

    whole.publish(slots)
    chunked.publish(slots)
    torch.testing.assert_close(whole.read(slots), chunked.read(slots))
    assert bool((whole.read(slots) > 0).all())
    assert float(whole.read(slots).max()) <= 1.0 + 1e-6


def test_no_slots_is_no_work() -> None:
    scores = SlotScores(4, "cpu")
    none = torch.empty(0, dtype=torch.int64)
    scores.reset(none)
    scores.add(none, torch.empty(0), torch.empty(0))
    assert scores.read(none).shape == (0,)


def test_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one slot"):
        SlotScores(0, "cpu")
    with pytest.raises(ValueError, match="one shape"):
        SlotScores(4, "cpu").add(torch.tensor([1, 2]), torch.ones(2), torch.ones(1))
