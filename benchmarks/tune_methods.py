"""Searches that look their evaluations up in a grid that was judged: ours, optuna's GPSampler, random, and the best."""

from __future__ import annotations

import heapq
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tune_grid_run import LEAST_KL, SINKS

from spectrumkv_sglang.calibration.allocation import NominalChunk
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.search.codec_speeds import read_speeds
from spectrumkv_sglang.search.known_costs import KnownCosts, known_costs
from spectrumkv_sglang.search.pareto import Box, frontier
from spectrumkv_sglang.search.pruning import Pruning
from spectrumkv_sglang.search.search import MOST_KL, Limits, Search
from spectrumkv_sglang.search.space import Point, Space
from spectrumkv_sglang.search.trials import Trials

CHUNK_TOKENS = 8192


@dataclass(frozen=True)
class Table:
    """The grid: what every point loses on every text, and what it costs."""

    space: Space
    costs: KnownCosts
    kl: np.ndarray  # [points, texts]
    coordinates: list[tuple[float, float, float]]
    box: Box
    hypervolume: float
    frontier: list[int]

    def share(self, places: Sequence[int]) -> float:
        """Hypervolume of some points over the grid's."""
        return self.box.hypervolume([self.coordinates[place] for place in places]) / self.hypervolume


class Curve:
    """Share of the grid's hypervolume after each evaluation."""

    def __init__(self, table: Table) -> None:
        self._table, self._kept = table, []  # type: ignore[var-annotated]
        self.shares: list[float] = []

    def add(self, place: int | None) -> float:
        """One evaluation more, of the point at ``place``; None: of one that came to nothing."""
        if place is not None:
            kept = [*self._kept, place]
            places = frontier([self._table.coordinates[one] for one in kept])
            self._kept = [kept[one] for one in places]
        if place is None or place not in self._kept:
            self.shares.append(self.shares[-1] if self.shares else 0.0)
        else:
            self.shares.append(self._table.share(self._kept))
        return self.shares[-1]

    def needed(self, share: float) -> int | None:
        """Evaluations until it was reached; None: never."""
        return next((number for number, value in enumerate(self.shares, start=1) if value >= share), None)


def read_table(path: Path) -> Table:
    """The grid from its file, or from what ``compare`` made of it."""
    content = json.loads(path.read_text())
    described = content.get("grid", content)
    space = Space(**{axis: tuple(choices) for axis, choices in described["space"].items()})
    points = list(space)
    geometry = KVGeometry(**content["speeds"]["geometry"])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "speeds.json"
        file.write_text(json.dumps(content["speeds"]))
        speeds = read_speeds(file)
    costs = known_costs(points, NominalChunk(geometry, CHUNK_TOKENS, SINKS), speeds)
    kl = np.array([content["kl"][point.name] for point in points])
    coordinates = [
        costs.objectives(place, min(float(kl[place].mean()), MOST_KL)).coordinates(LEAST_KL)
        for place in range(len(points))
    ]
    box = Box.around(coordinates)
    kept = frontier(coordinates)
    volume = box.hypervolume([coordinates[place] for place in kept])
    return Table(space, costs, kl, coordinates, box, volume, kept)


def ours(table: Table, evaluations: int, most: int, goal: float, seed: int) -> dict[str, Any]:
    """One search of ours: ``evaluations``, and more, up to ``most``, until it comes to ``goal``."""
    started = time.process_time()
    texts = table.kl.shape[1]
    run = Search(
        table.costs,
        texts,
        lambda place, text: float(table.kl[place, text]),
        Trials(table.costs, None, {}),
        Pruning(LEAST_KL),
        Limits(most, most),
        seed,
    )
    curve = Curve(table)
    spent = 0
    pruned = 0
    for trial in run.run():
        reached = curve.add(None if trial.pruned else trial.place)
        if len(curve.shares) <= evaluations:
            spent += len(trial.kl)
            pruned += bool(trial.pruned)
        if len(curve.shares) >= evaluations and reached >= goal:
            break
    return {
        **described(curve, evaluations, goal, seed),
        "in_whole_evaluations": round(spent / texts, 1),
        "pruned": pruned,
        "ruled_out": run.ruled_out,
        "seconds": round(time.process_time() - started, 1),
    }


def described(curve: Curve, evaluations: int, goal: float, seed: int) -> dict[str, Any]:
    """What a search came to."""
    return {
        "seed": seed,
        "share": round(curve.shares[min(evaluations, len(curve.shares)) - 1], 4),
        "needed": curve.needed(goal),
        "curve": [round(value, 4) for value in curve.shares],
    }


def random_search(table: Table, evaluations: int, most: int, goal: float, seed: int) -> dict[str, Any]:
    """Points drawn without putting back."""
    curve = Curve(table)
    for place in np.random.default_rng(seed).permutation(len(table.coordinates)).tolist()[:most]:
        if curve.add(place) >= goal and len(curve.shares) >= evaluations:
            break
    return described(curve, evaluations, goal, seed)


def gp_sampler(table: Table, evaluations: int, most: int, goal: float, seed: int) -> dict[str, Any]:
    """optuna's own GPSampler, to which all three objectives are unknown; points that it asks for twice count once."""
    import optuna

    started = time.process_time()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    points = table.costs.points
    places = {point: place for place, point in enumerate(points)}
    study = optuna.create_study(
        directions=["minimize"] * 3, sampler=optuna.samplers.GPSampler(seed=seed, warn_independent_sampling=False)
    )
    distributions: dict[str, Any] = {}
    for axis in vars(points[0]):
        choices = sorted({getattr(point, axis) for point in points})
        if isinstance(choices[0], str):
            distributions[axis] = optuna.distributions.CategoricalDistribution(choices)
        else:
            distributions[axis] = optuna.distributions.IntDistribution(0, len(choices) - 1)
    seen: set[int] = set()
    curve = Curve(table)
    for _ in range(3 * evaluations):
        trial = study.ask(distributions)
        chosen = {}
        for axis, value in trial.params.items():
            choices = sorted({getattr(point, axis) for point in points})
            chosen[axis] = value if isinstance(value, str) else choices[value]
        place = places[table.space.canonical(Point(**chosen))]
        study.tell(trial, table.coordinates[place])
        if place not in seen:
            seen.add(place)
            curve.add(place)
        if len(seen) == evaluations:  # a trial takes seconds by now: it goes on no longer
            break
    return {**described(curve, evaluations, goal, seed), "seconds": round(time.process_time() - started, 1)}


def best_possible(table: Table, evaluations: int, most: int, goal: float, seed: int) -> dict[str, Any]:
    """What so many points can come to at best: chosen greedily by one who knows the grid.

    What a point adds can only fall while others are chosen, so that only the first of the queue is looked at again.
    """
    del seed
    curve = Curve(table)
    chosen: list[int] = []
    queue = [(-table.share([place]), 0, place) for place in table.frontier]
    heapq.heapify(queue)
    while queue and len(chosen) < most:
        gain, after, place = heapq.heappop(queue)
        if after < len(chosen):
            reached = table.share([*chosen, place]) - curve.shares[-1]
            heapq.heappush(queue, (-reached, len(chosen), place))
            continue
        del gain
        chosen.append(place)
        if curve.add(place) >= goal and len(chosen) >= evaluations:
            break
    return described(curve, evaluations, goal, 0)


METHODS = {"ours": ours, "gp_sampler": gp_sampler, "random": random_search, "best": best_possible}
