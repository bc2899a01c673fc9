"""Frontiers and what they dominate."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrumkv_sglang.search.acquisition import expected_gain
from spectrumkv_sglang.search.pareto import Box, Objectives, choose_spread, dominates, frontier

UNIT = Box((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
steps = st.integers(0, 4).map(lambda step: step / 4)
points = st.lists(st.tuples(steps, steps, steps), min_size=1, max_size=8)


def counted(found: list[tuple[float, ...]]) -> float:
    """Hypervolume by counting the cells of a grid that the points' coordinates lie on."""
    cells = list(itertools.product(range(4), repeat=3))
    return sum(any(all(x <= c / 4 for x, c in zip(p, cell, strict=True)) for p in found) for cell in cells) / len(cells)


@given(points)
@settings(deadline=None, max_examples=40)
def test_the_hypervolume_is_what_counting_gives(found: list[tuple[float, ...]]) -> None:
    assert UNIT.hypervolume(found) == pytest.approx(counted(found))
    kept = [found[place] for place in frontier(found)]
    assert UNIT.hypervolume(kept) == pytest.approx(counted(found))


@given(points)
@settings(deadline=None, max_examples=40)
def test_a_frontier_holds_what_none_dominates_once(found: list[tuple[float, ...]]) -> None:
    kept = {found[place] for place in frontier(found)}
    assert len(kept) == len(frontier(found))
    for point in found:
        beaten = any(dominates(other, point) for other in found)
        assert (point in kept) is not beaten


def test_axes_without_extent_do_not_count() -> None:
    box = Box((0.0, 2.0, 0.0), (1.0, 2.0, 1.0))
    assert box.hypervolume([(0.5, 2.0, 0.5)]) == pytest.approx(0.25)
    assert box.hypervolume([]) == 0


def test_kl_below_the_least_counts_as_equal() -> None:
    low, lower = Objectives(1e-6, 0.3, 1e-9), Objectives(1e-9, 0.3, 1e-9)
    assert low.coordinates(1e-5) == lower.coordinates(1e-5)
    assert low.coordinates(1e-8) > lower.coordinates(1e-8)


def test_a_few_points_that_dominate_most() -> None:
    found = [(0.1, 0.9, 0.5), (0.5, 0.5, 0.5), (0.52, 0.49, 0.5), (0.9, 0.1, 0.5)]
    assert choose_spread(found, 3, UNIT) == [0, 1, 3]
    assert choose_spread(found, 9, UNIT) == [0, 1, 2, 3]


@given(points, st.tuples(steps, steps), st.floats(0, 1), st.floats(0.001, 0.5))
@settings(deadline=None, max_examples=40)
def test_the_expected_gain_is_the_mean_of_the_gains(
    found: list[tuple[float, ...]], known: tuple[float, float], mean: float, deviation: float
) -> None:
    kept = [found[place] for place in frontier(found)]
    gain = expected_gain(np.array([mean]), np.array([deviation]), np.array([known]), np.array(kept))[0]
    before = UNIT.hypervolume(kept)
    quantiles = np.clip(mean + deviation * _normal_quantiles(101), 0, 1)
    sampled = np.mean([UNIT.hypervolume([*kept, (z, *known)]) - before for z in quantiles])
    assert gain == pytest.approx(sampled, abs=0.01)


def _normal_quantiles(count: int) -> np.ndarray:
    from scipy.special import ndtri

    return ndtri((np.arange(count) + 0.5) / count)
