"""Tier assignment under a byte budget."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrumkv_sglang.profiles.budget import TierAssignment, UpgradeLadder, assign_tiers
from spectrumkv_sglang.profiles.tier import Tier

ALL_TIERS = tuple(Tier)
COST = np.array([256, 130, 68])
DISTORTION = np.array([0.0, 1e-4, 1e-2])

messy_float = st.one_of(
    st.floats(width=32),  # NaN, infinities and negative numbers included
    st.sampled_from([0.0, 1.0, 2.0]),  # ties
)


@dataclass(frozen=True)
class Problem:
    importance: np.ndarray
    cost: np.ndarray
    distortion: np.ndarray
    forced: np.ndarray
    usable: tuple[Tier, ...]

    def assign(self, budget: int) -> TierAssignment:
        return assign_tiers(self.importance, self.cost, self.distortion, budget, self.forced, self.usable)

    def weights(self) -> np.ndarray:
        weights = self.importance.astype(np.float64)
        return np.where(np.isfinite(weights) & (weights > 0), weights, 0.0)

    def cost_of(self, tiers: np.ndarray) -> int:
        return int(self.cost[tiers].sum())

    def loss_of(self, tiers: np.ndarray) -> float:
        return float((self.weights() * self.distortion[tiers]).sum())

    @property
    def largest(self) -> int:
        return int(self.cost.max()) * len(self.importance)


@st.composite
def problems(draw: st.DrawFn, max_rows: int = 30, ordered_costs: bool = False) -> Problem:
    rows = draw(st.integers(0, max_rows))
    costs = st.lists(st.integers(1, 400), min_size=3, max_size=3)
    cost = np.array(draw(costs))
    distortion = np.array(draw(st.lists(st.floats(0, 1), min_size=3, max_size=3)))
    if ordered_costs:
        cost, distortion = np.sort(cost)[::-1], np.sort(distortion)
    usable = (Tier.HIGH, *draw(st.sets(st.sampled_from([Tier.MID, Tier.LOW]))))
    return Problem(
        np.array(draw(st.lists(messy_float, min_size=rows, max_size=rows)), dtype=np.float32),
        cost,
        distortion,
        np.array(draw(st.lists(st.booleans(), min_size=rows, max_size=rows)), dtype=bool),
        usable,
    )


@given(problems(), st.floats(0, 1.2))
@settings(max_examples=150, deadline=None)
def test_never_over_budget_when_reachable_and_cheapest_otherwise(problem: Problem, share: float) -> None:
    budget = int(share * problem.largest)
    result = problem.assign(budget)

    cheapest = int(problem.cost[list(problem.usable)].min())
    floor = int(np.where(problem.forced, problem.cost[Tier.HIGH], cheapest).sum())
    assert result.tiers.dtype == np.uint8
    assert result.cost_bytes == problem.cost_of(result.tiers)
    assert result.reachable == (floor <= budget)
    if result.reachable:
        assert result.cost_bytes <= budget
    else:
        assert result.cost_bytes == floor
    assert (result.tiers[problem.forced] == Tier.HIGH).all()
    assert set(result.tiers.tolist()) <= {int(tier) for tier in problem.usable}


@given(problems(ordered_costs=True), st.floats(0, 1.2), st.floats(0, 1.2))
@settings(max_examples=150, deadline=None)
def test_a_larger_budget_lowers_no_row(problem: Problem, one: float, other: float) -> None:
    small, large = sorted((int(one * problem.largest), int(other * problem.largest)))
    assert (problem.assign(large).tiers <= problem.assign(small).tiers).all()


@given(problems(ordered_costs=True), st.floats(0, 1.2))
@settings(max_examples=150, deadline=None)
def test_a_more_important_row_is_never_in_a_lower_tier(problem: Problem, share: float) -> None:
    tiers = problem.assign(int(share * problem.largest)).tiers
    weights = problem.weights()
    free = np.flatnonzero(~problem.forced)
    for left, right in itertools.combinations(free, 2):
        if weights[left] >= weights[right]:  # among equals the earlier row comes first
            assert tiers[left] <= tiers[right]
        else:
            assert tiers[right] <= tiers[left]


@given(problems(max_rows=5), st.floats(0, 1.2))
@settings(max_examples=100, deadline=None)
def test_no_assignment_of_the_same_bytes_loses_less(problem: Problem, share: float) -> None:
    result = problem.assign(int(share * problem.largest))
    choices = [(Tier.HIGH,) if forced else problem.usable for forced in problem.forced]
    loss = problem.loss_of(result.tiers)
    for other in itertools.product(*choices):
        tiers = np.array(other, dtype=np.uint8)
        if problem.cost_of(tiers) <= result.cost_bytes:
            assert problem.loss_of(tiers) >= loss * (1 - 1e-9) - 1e-300


@given(problems(ordered_costs=True), st.floats(0, 1.2))
@settings(max_examples=100, deadline=None)
def test_stops_only_where_the_next_step_does_not_fit(problem: Problem, share: float) -> None:
    budget = int(share * problem.largest)
    result = problem.assign(budget)
    best = problem.assign(problem.largest * 2)
    if result.reachable and result.cost_bytes < best.cost_bytes:
        assert budget - result.cost_bytes < problem.cost.max() - problem.cost.min()


@given(problems())
@settings(max_examples=60, deadline=None)
def test_each_step_says_what_it_changes(problem: Problem) -> None:
    ladder = UpgradeLadder(problem.importance, problem.cost, problem.distortion, problem.forced, problem.usable)
    for number in range(ladder.steps):
        row, tier = ladder.step(number)
        expected = ladder.tiers(number)
        expected[row] = tier
        assert (ladder.tiers(number + 1) == expected).all()


def test_two_thresholds_on_importance() -> None:
    importance = np.array([5, 1, 4, 2, 3, 0], dtype=np.float32)
    distortion = np.array([0.0, 0.008, 0.01])  # INT8 saves little here: the best rows go all the way to HIGH first
    result = assign_tiers(importance, COST, distortion, 2 * 256 + 4 * 68, np.zeros(6, bool), ALL_TIERS)
    assert result.tiers.tolist() == [0, 2, 0, 2, 2, 2]
    result = assign_tiers(importance, COST, DISTORTION, 6 * 130, np.zeros(6, bool), ALL_TIERS)
    assert result.tiers.tolist() == [1, 1, 1, 1, 1, 2]


def test_tiers_of_one_cost_take_the_best_for_nothing() -> None:
    result = assign_tiers(np.ones(3), [64, 64, 64], [0.2, 0.1, 0.3], 192, [True, False, False], ALL_TIERS)
    assert result.tiers.tolist() == [0, 1, 1]
    assert result.cost_bytes == 192


def test_order_of_importance_survives_rounding() -> None:
    importance = 2.0 - np.finfo(np.float64).eps * np.arange(20, 0, -1)  # later rows by one ulp more important
    cost, distortion = [101, 99, 1], [0.0, 0.5, 1.1]
    assert len(np.unique(importance * (distortion[2] / 100))) < 20
    for budget in range(20, 20 * 101, 50):
        tiers = assign_tiers(importance, cost, distortion, budget, np.zeros(20, bool), [Tier.HIGH, Tier.LOW]).tiers
        assert (np.diff(tiers.astype(int)) <= 0).all()


def test_a_single_usable_tier_is_trivial() -> None:
    result = assign_tiers(np.arange(3), COST, DISTORTION, 10, np.zeros(3, bool), [Tier.HIGH])
    assert (result.tiers.tolist(), result.cost_bytes, result.reachable) == ([0, 0, 0], 768, False)


def test_a_dominated_tier_is_not_used() -> None:
    for budget in range(3 * 68, 3 * 256, 10):
        tiers = assign_tiers(np.ones(3), [256, 200, 68], [0.0, 0.9, 1.0], budget, np.zeros(3, bool), ALL_TIERS).tiers
        assert Tier.MID not in tiers


@pytest.mark.parametrize(
    ("importance", "cost", "forced", "usable", "message"),
    [
        (np.ones(3), COST, np.zeros(2, bool), ALL_TIERS, "forced and preferred rows"),
        (np.ones((3, 1)), COST, np.zeros((3, 1), bool), ALL_TIERS, "forced and preferred rows"),
        (np.ones(3), COST[:2], np.zeros(3, bool), ALL_TIERS, "one a tier"),
        (np.ones(3), COST, np.zeros(3, bool), [Tier.LOW], "contain HIGH"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    importance: np.ndarray, cost: np.ndarray, forced: np.ndarray, usable: list[Tier], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        assign_tiers(importance, cost, DISTORTION, 100, forced, usable)
