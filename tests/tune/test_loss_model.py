"""What a search expects of a loss: a sum over keys and values, a factor of four a bit until it was seen otherwise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from spectrumkv_sglang.search.known_costs import KnownCosts
from spectrumkv_sglang.search.loss_model import LossModel
from spectrumkv_sglang.search.surrogate import Surrogate

Small = tuple[KnownCosts, Callable[[int, int], float]]


def truth_of(small: Small) -> np.ndarray:
    costs, kl = small
    return np.log10([kl(place, 0) for place in range(len(costs.points))])


def test_one_judged_point_says_something_of_all(small_space: Small) -> None:
    points = small_space[0].points
    place = {(p.key_bits, p.value_bits): n for n, p in enumerate(points) if p.value_transform == "identity"}
    mean, variance = LossModel(points).fit([place[4, 4]], [-2.0])
    assert mean[place[4, 4]] == pytest.approx(-2.0, abs=0.05)
    assert mean[place[5, 5]] == pytest.approx(-2.0 - np.log10(4), abs=0.05)
    assert mean[place[4, 8]] > mean[place[5, 5]]  # what the keys lose stays
    assert variance[place[8, 8]] > variance[place[4, 4]]


def test_few_points_tell_the_others(small_space: Small) -> None:
    truth = truth_of(small_space)
    known = np.random.default_rng(1).permutation(len(truth))[:10]
    mean, variance = LossModel(small_space[0].points).fit(known.tolist(), truth[known].tolist())
    others = np.setdiff1d(np.arange(len(truth)), known)
    assert np.abs(mean - truth)[others].mean() < 0.1
    assert (variance >= 0).all()


def test_a_prediction_depends_on_what_is_known_alone(small_space: Small) -> None:
    """A search that was interrupted starts with a new surrogate, in the middle of the points between two fits."""
    truth = truth_of(small_space)
    order = np.random.default_rng(3).permutation(len(truth)).tolist()
    going = Surrogate(small_space[0].points)
    for count in range(31, 39):
        mean, deviation = going.predict(order[:count], truth[order[:count]].tolist())
    again = Surrogate(small_space[0].points).predict(order[:38], truth[order[:38]].tolist())
    np.testing.assert_array_equal(mean, again[0])
    np.testing.assert_array_equal(deviation, again[1])
