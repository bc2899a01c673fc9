"""What is not judged, or not to the end, was never on the frontier."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrumkv_sglang.search.pareto import Objectives, frontier
from spectrumkv_sglang.search.pruning import Pruning, least_mean

LEAST = 0.01


@st.composite
def tables(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """KL by point and text, b and seconds by point; few different values, so that many are equal."""
    points, texts = draw(st.integers(1, 10)), draw(st.integers(1, 4))
    kl = draw(st.lists(st.sampled_from([0.0, 0.004, 0.02, 0.1, 0.3]), min_size=points * texts, max_size=points * texts))
    costs = draw(st.lists(st.sampled_from([0.1, 0.2, 0.3]), min_size=2 * points, max_size=2 * points))
    return np.array(kl).reshape(points, texts), np.array(costs[:points]), np.array(costs[points:]) * 1e-8


@given(tables(), st.randoms(use_true_random=False), st.one_of(st.none(), st.just(0.15)))
@settings(deadline=None, max_examples=200)
def test_pruning_never_removes_a_point_of_the_true_frontier(table, order, max_kl) -> None:  # type: ignore[no-untyped-def]
    kl, ratio, seconds = table
    points, texts = kl.shape
    pruning = Pruning(LEAST, max_kl)

    def objectives(place: int, loss: float) -> Objectives:
        return Objectives(loss, float(ratio[place]), float(seconds[place]))

    # The truth: every point on every text.
    whole = [objectives(place, least_mean(kl[place].tolist(), texts)) for place in range(points)]
    useful = [place for place in range(points) if max_kl is None or whole[place].kl <= max_kl]
    coordinates = [whole[place].coordinates(LEAST) for place in useful]
    true = {coordinates[place] for place in frontier(coordinates)}

    costs = np.array([objectives(place, 0.0).coordinates(LEAST) for place in range(points)])
    left = list(range(points))
    order.shuffle(left)
    measured: list[Objectives] = []
    while left:
        place = left.pop()
        if pruning.cannot_reach(costs, measured)[place]:
            continue
        judged: list[float] = []
        for text in range(texts):
            judged.append(float(kl[place, text]))
            if pruning.surely_worse(objectives(place, least_mean(judged, texts)), measured):
                break
        else:
            measured.append(objectives(place, least_mean(judged, texts)))
    found = [one.coordinates(LEAST) for one in measured]
    assert {found[place] for place in frontier(found)} == true


def test_both_ways() -> None:
    good = Objectives(0.005, 0.3, 1e-9)
    pruning = Pruning(LEAST, max_kl=0.5)
    costs = np.array([Objectives(0.0, ratio, 1e-9).coordinates(LEAST) for ratio in (0.2, 0.3, 0.4)])
    assert pruning.cannot_reach(costs, [good]).tolist() == [False, True, True]
    assert pruning.cannot_reach(costs, [Objectives(0.02, 0.3, 1e-9)]).tolist() == [False, False, False]
    assert pruning.surely_worse(Objectives(0.02, 0.4, 1e-9), [good]) == "dominated"
    assert pruning.surely_worse(Objectives(0.02, 0.4, 1e-10), [good]) == ""
    assert pruning.surely_worse(Objectives(0.6, 0.1, 1e-10), []) == "loses more than 0.5"
