"""Choices under a limit, beside all that there are."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrumkv_sglang.calibration.lagrangian import Chain, Group

choices = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=4)
problems = st.lists(choices, min_size=1, max_size=5)


def _groups(problem: list[list[tuple[int, int]]]) -> list[Group]:
    return [
        Group(np.array([size for size, _ in group]), np.array([float(cost) for _, cost in group])) for group in problem
    ]


def _size(groups: list[Group], chosen: list[int]) -> int:
    return sum(int(group.size[choice]) for group, choice in zip(groups, chosen, strict=True))


def _cost(groups: list[Group], chosen: list[int]) -> float:
    return sum(float(group.cost[choice]) for group, choice in zip(groups, chosen, strict=True))


def _least_cost(groups: list[Group], limit: int) -> float:
    """Over every choice that there is."""
    everything = itertools.product(*(range(len(group.size)) for group in groups))
    return min(_cost(groups, list(chosen)) for chosen in everything if _size(groups, list(chosen)) <= limit)


@given(problems, st.integers(0, 60))
@settings(max_examples=200, deadline=None)
def test_the_limit_is_kept_and_the_answer_is_the_best_but_for_one_step(
    problem: list[list[tuple[int, int]]], spare: int
) -> None:
    groups = _groups(problem)
    chain = Chain(groups)
    limit = _size(groups, chain.smallest()) + spare
    chosen = chain.best(lambda chosen: _size(groups, chosen) <= limit)
    assert _size(groups, chosen) <= limit
    best = _least_cost(groups, limit)
    largest_step = max(
        float(group.cost[small] - group.cost[large])
        for group in groups
        for small, large in itertools.pairwise([group.hull()[0], *group.hull()])
    )
    assert best <= _cost(groups, chosen) <= best + largest_step + 1e-9


@given(problems)
@settings(max_examples=100, deadline=None)
def test_along_the_chain_nothing_of_the_same_bytes_is_better(problem: list[list[tuple[int, int]]]) -> None:
    groups = _groups(problem)
    chain = Chain(groups)
    for steps in itertools.count():
        chosen = chain.after(steps)
        assert _cost(groups, chosen) <= _least_cost(groups, _size(groups, chosen)) + 1e-9
        if chosen == chain.after(steps + 1):
            break


@given(problems)
@settings(max_examples=100, deadline=None)
def test_without_a_limit_every_group_takes_its_least_cost(problem: list[list[tuple[int, int]]]) -> None:
    groups = _groups(problem)
    chosen = Chain(groups).best(lambda _: True)
    assert _cost(groups, chosen) == sum(float(group.cost.min()) for group in groups)


def test_what_is_dearer_and_no_better_is_never_taken() -> None:
    group = Group(np.array([10, 20, 30, 40]), np.array([9.0, 9.0, 2.0, 3.0]))
    assert group.hull() == [0, 2]


def test_a_choice_above_the_line_between_its_neighbours_is_passed_over() -> None:
    group = Group(np.array([10, 20, 30]), np.array([10.0, 9.0, 0.0]))
    assert group.hull() == [0, 2]


def test_equal_groups_move_up_in_their_order() -> None:
    groups = [Group(np.array([1, 2]), np.array([1.0, 0.0])) for _ in range(3)]
    assert Chain(groups).best(lambda chosen: _size(groups, chosen) <= 5) == [1, 1, 0]


def test_bytes_that_one_step_leaves_go_to_a_smaller_one() -> None:
    large = Group(np.array([0, 100]), np.array([100.0, 0.0]))
    small = Group(np.array([0, 10]), np.array([5.0, 0.0]))
    chosen = Chain([large, small]).best(lambda chosen: _size([large, small], chosen) <= 50)
    assert chosen == [0, 1]
