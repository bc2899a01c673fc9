"""The grid that searches are compared with: its parts, what a stopped run left, and the methods that look it up."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tune_grid_run import part_of, read_judged
from tune_methods import Table, best_possible, random_search

from spectrumkv_sglang.search.known_costs import KnownCosts
from spectrumkv_sglang.search.pareto import Box, frontier
from spectrumkv_sglang.search.space import Space
from spectrumkv_sglang.search.wire_cost import WireCost

SETTINGS = {"model": "m", "texts": 1}


@pytest.mark.parametrize("parts", [1, 3, 8])
def test_parts_hold_every_point_once(parts: int) -> None:
    points = list(Space())
    found = [point for number in range(1, parts + 1) for point in part_of(points, number, parts)]
    assert len(found) == len(points)
    assert set(found) == set(points)


def test_a_stopped_run_of_parts_is_taken_up_without_the_line_that_it_did_not_end(tmp_path: Path) -> None:
    out = tmp_path / "grid.json"
    lines = [SETTINGS, {"point": "a", "text": 0, "kl": 0.1, "seconds": 1.5}]
    out.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"point": "b", "te')
    more = [SETTINGS, {"point": "c", "text": 0, "kl": 0.2, "seconds": 0.5}]
    out.with_suffix(".part-1-of-2.jsonl").write_text("".join(json.dumps(line) + "\n" for line in more))
    assert read_judged(out, SETTINGS) == ({("a", 0): 0.1, ("c", 0): 0.2}, 2.0)
    with pytest.raises(SystemExit, match="another --out"):
        read_judged(out, {**SETTINGS, "texts": 2})


def table() -> Table:
    points = list(Space(key_scales=("channel",), edges=(0,), upgrade=(0.0,)))
    chance = np.random.default_rng(0)
    coordinates = [tuple(row) for row in chance.random((len(points), 3)).tolist()]
    box, kept = Box.around(coordinates), frontier(coordinates)
    costs = KnownCosts(tuple(points), (WireCost(0.5, 0.5, (0, 0, 1)),) * len(points), (1e-9,) * len(points))
    volume = box.hypervolume([coordinates[place] for place in kept])
    return Table(Space(), costs, np.zeros((len(points), 1)), coordinates, box, volume, kept)  # type: ignore[arg-type]


def test_the_lazy_choice_is_the_greedy_one() -> None:
    grid = table()
    chosen: list[int] = []
    for _ in range(6):
        left = [place for place in grid.frontier if place not in chosen]
        chosen.append(max(left, key=lambda place: grid.share([*chosen, place])))
    found = best_possible(grid, 6, 6, 0.98, 0)
    assert found["curve"][-1] == pytest.approx(grid.share(chosen), abs=1e-4)


def test_all_points_come_to_the_whole_and_the_goal_is_counted() -> None:
    grid = table()
    points = len(grid.coordinates)
    found = random_search(grid, points, points, 0.98, 3)
    curve = found["curve"]
    assert curve[-1] == 1.0
    assert curve == sorted(curve)
    assert curve[found["needed"] - 2] < 0.98 <= curve[found["needed"] - 1] + 1e-4
