"""How many evaluations `spectrumkv tune` needs against an exhaustive grid, beside random search and optuna's GPSampler.

    python benchmarks/tune_against_grid.py grid --model-path DIR --text FILE --out GRID.json [--speeds FILE]
    python benchmarks/tune_against_grid.py compare GRID.json [--seeds 5] [--json FILE]

``grid`` judges every point of a space of profiles on some text (`tune_grid`) and keeps each KL. ``compare``
lets searches look their evaluations up there: the hypervolume that they come to, over the grid's own, in the smallest
box with all of the grid's points in it (logarithm of KL, b, logarithm of the time).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from tune_grid import GridJudge

from spectrumkv_sglang.calibration.allocation import NominalChunk
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.search.codec_speeds import cells_of, measure_speeds, read_speeds
from spectrumkv_sglang.search.judge import Judge
from spectrumkv_sglang.search.known_costs import KnownCosts, known_costs
from spectrumkv_sglang.search.pareto import Box, frontier
from spectrumkv_sglang.search.pruning import Pruning
from spectrumkv_sglang.search.search import MOST_KL, Limits, Search
from spectrumkv_sglang.search.space import Point, Space
from spectrumkv_sglang.search.trials import Trials

KEY_SCALES = ("channel",)
PREFIX, CONTINUATION, SEED = 256, 32, 0
WINDOWS = 2
"""Drawn from the text; `--texts` says how many of them are judged."""
CHECKED = 12
SINKS, CHUNK_TOKENS = 4, 8192
LEAST_KL = 1e-5
SHARE = 20
"""The grid's evaluations over those that a search may spend."""


@dataclass(frozen=True)
class Table:
    """The grid: what every point loses on every text, and what it costs."""

    space: Space
    costs: KnownCosts
    kl: np.ndarray  # [points, texts]
    coordinates: list[tuple[float, float, float]]
    box: Box
    hypervolume: float
    frontier: int


def make_space(key_scales: Sequence[str]) -> Space:
    """564 points with keys' scales by channel alone, twice as many less a few with both."""
    return Space(key_scales=tuple(key_scales), key_transform=("identity", "derope"), edges=(0, 1), upgrade=(0.0, 0.5))


def judge_model(model_path: str, text_path: str, texts: int) -> tuple[Any, list[Any]]:
    """The model and the windows that it is judged on."""
    import torch

    from spectrumkv_sglang.evaluation.model import EvalModel, read_model_files
    from spectrumkv_sglang.evaluation.windows import cut_windows

    torch.set_num_threads(1)
    files = read_model_files(Path(model_path))
    windows = cut_windows(
        files.tokenizer,
        Path(text_path).read_text(encoding="utf-8"),
        prefix_tokens=(PREFIX,),
        continuation_tokens=CONTINUATION,
        texts=WINDOWS,
        seed=SEED,
        context_tokens=files.context_tokens,
    )
    return EvalModel(files, "cpu", "float32", files.dtype), windows[:texts]


def make_grid(arguments: argparse.Namespace) -> None:
    """Judge every point, and keep what came of it after each, so that a run that was stopped goes on."""
    os.nice(10)
    texts: int = arguments.texts
    space = make_space(arguments.key_scales)
    points = list(space)
    out = Path(arguments.out)
    lines = out.with_suffix(".jsonl")
    done: dict[int, dict[str, float]] = {text: {} for text in range(texts)}
    seconds = 0.0
    if lines.exists():
        for entry in map(json.loads, lines.read_text().splitlines()):
            if entry["text"] < texts:
                done[entry["text"]][entry["point"]] = entry["kl"]
                seconds += entry["cpu_seconds"]
    model, windows = judge_model(arguments.model_path, arguments.text, texts)
    started, before = time.monotonic(), sum(map(len, done.values()))
    with lines.open("a") as file:
        for text, window in enumerate(windows):
            left = [point for point in points if point.name not in done[text]]
            judge = GridJudge(model, window, PREFIX, SINKS)
            last = time.process_time()
            for point, kl in judge.kl(left):
                done[text][point.name] = kl
                spent, last = time.process_time() - last, time.process_time()
                seconds += spent
                entry = {"point": point.name, "text": text, "kl": kl, "cpu_seconds": round(spent, 4)}
                file.write(json.dumps(entry) + "\n")
                file.flush()
                there = sum(map(len, done.values()))
                if there % 80 == 0:
                    left_seconds = (time.monotonic() - started) / (there - before) * (texts * len(points) - there)
                    print(f"{there} of {texts * len(points)}, about {left_seconds / 60:.0f} min left", flush=True)
    largest = _against_harness(model, windows, points, done)
    geometry, speeds = _speeds(arguments, model, windows[0], points)
    content = {
        "model": Path(arguments.model_path).name,
        "text": Path(arguments.text).name,
        "prefix_tokens": PREFIX,
        "continuation_tokens": CONTINUATION,
        "texts": texts,
        "space": {axis.name: list(getattr(space, axis.name)) for axis in fields(space)},
        "cpu_seconds": round(seconds),
        "largest_difference_from_harness": largest,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "speeds": json.loads(speeds.encode()),
        "geometry": {name: getattr(geometry, name) for name in geometry.__dataclass_fields__},
        "kl": {point.name: [done[text][point.name] for text in range(texts)] for point in points},
    }
    out.write_text(json.dumps(content, indent=1) + "\n")
    print(f"written: {out}")


def _against_harness(model: Any, windows: Sequence[Any], points: Sequence[Point], done: dict[int, Any]) -> float:
    """Largest relative difference of the grid's KL from what the search's own judge says, over some points."""
    drawn = np.random.default_rng(SEED).choice(len(points), CHECKED, replace=False)
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(model, windows, PREFIX, SINKS, Path(folder), lambda _: None)
        differences = []
        for place in drawn.tolist():
            text = place % len(done)
            ours, theirs = done[text][points[place].name], judge.kl(points[place], text)
            differences.append(abs(ours - theirs) / max(theirs, LEAST_KL))
    return float(f"{max(differences):.2g}")


def _speeds(arguments: argparse.Namespace, model: Any, window: Any, points: Sequence[Point]) -> tuple[KVGeometry, Any]:
    import torch

    from spectrumkv_sglang.payload.key_rotation import KeyRotation
    from spectrumkv_sglang.payload.kv_buffers import KVBuffers
    from spectrumkv_sglang.transfer.pool_view import PoolView

    prefix = model.prefill(window.name, window.prefix(PREFIX), {}).prefix
    geometry = prefix.geometry
    if arguments.speeds:
        return geometry, read_speeds(Path(arguments.speeds))
    cells = cells_of([point.profile(geometry.layers) for point in points], geometry)
    device = torch.device(arguments.device)
    tokens = arguments.speed_tokens
    repeats = tokens // PREFIX
    buffers = KVBuffers(
        k=[k.repeat(repeats, 1, 1).to(device) for k in prefix.view.buffers.k],
        v=[v.repeat(repeats, 1, 1).to(device) for v in prefix.view.buffers.v],
    )
    angles = torch.outer(torch.arange(tokens).float(), torch.arange(geometry.head_dim).float() / 64).to(device)
    rotation = KeyRotation(((angles.cos(), angles.sin()),) * geometry.layers)
    view = PoolView(buffers, geometry, device, tokens, rotation)
    with tempfile.TemporaryDirectory() as folder:
        return geometry, measure_speeds(view, cells, arguments.device, Path(folder))


def read_table(path: Path) -> Table:
    """The grid from its file."""
    content = json.loads(path.read_text())
    space = Space(**{axis: tuple(choices) for axis, choices in content["space"].items()})
    points = list(space)
    geometry = KVGeometry(**content["geometry"])
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
    return Table(space, costs, kl, coordinates, box, volume, len(kept))


def share(table: Table, places: Sequence[int]) -> float:
    """Hypervolume of some points over the grid's."""
    return table.box.hypervolume([table.coordinates[place] for place in places]) / table.hypervolume


def search(table: Table, evaluations: int, seed: int, patience: int | None = None) -> dict[str, Any]:
    """One search of ours."""
    started = time.process_time()
    texts = table.kl.shape[1]
    run = Search(
        table.costs,
        texts,
        lambda place, text: float(table.kl[place, text]),
        Trials(table.costs, None, {}),
        Pruning(LEAST_KL),
        Limits(evaluations, patience or evaluations),
        seed,
    )
    curve = []
    for trial in run.run():
        whole = [one.place for one in run.trials.finished if not one.pruned]
        curve.append(share(table, whole))
        del trial
    done = run.trials.finished
    judged = sum(len(trial.kl) for trial in done)
    return {
        "seed": seed,
        "evaluations": len(done),
        "texts_judged": judged,
        "in_whole_evaluations": judged / texts,
        "pruned": sum(bool(trial.pruned) for trial in done),
        "ruled_out": run.ruled_out,
        "share": curve[-1],
        "curve": [round(value, 4) for value in curve],
        "cpu_seconds": round(time.process_time() - started, 1),
    }


def random_search(table: Table, evaluations: int, seed: int) -> float:
    """Points drawn without putting back."""
    drawn = np.random.default_rng(seed).choice(len(table.coordinates), evaluations, replace=False)
    return share(table, drawn.tolist())


def gp_sampler(table: Table, evaluations: int, seed: int) -> float:
    """optuna's own GPSampler, to which all three objectives are unknown; points that it asks for twice count once."""
    import optuna

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
    seen: list[int] = []
    for _ in range(3 * evaluations):
        trial = study.ask(distributions)
        chosen = {}
        for axis, value in trial.params.items():
            choices = sorted({getattr(point, axis) for point in points})
            chosen[axis] = value if isinstance(value, str) else choices[value]
        place = places[table.space.canonical(Point(**chosen))]
        if place not in seen:
            seen.append(place)
        study.tell(trial, table.coordinates[place])
        if len(seen) == evaluations:
            break
    return share(table, seen)


def best_possible(table: Table, evaluations: int) -> float:
    """What so many points can come to at best: chosen greedily by one who knows the grid."""
    kept = frontier(table.coordinates)
    chosen: list[int] = []
    while len(chosen) < min(evaluations, len(kept)):
        left = [place for place in kept if place not in chosen]
        chosen.append(max(left, key=lambda place: share(table, [*chosen, place])))
    return share(table, chosen)


_table: Table | None = None


def _take(table: Table) -> None:
    global _table
    _table = table


def _one(job: tuple[str, int, int]) -> tuple[str, int, Any]:
    method, evaluations, seed = job
    table = _table
    assert table is not None
    methods: dict[str, Any] = {"ours": search, "random": random_search, "gp_sampler": gp_sampler}
    if method == "best":
        return method, seed, best_possible(table, evaluations)
    return method, seed, methods[method](table, evaluations, seed)


def compare(arguments: argparse.Namespace) -> None:
    """All methods and seeds with a twentieth of the grid's evaluations."""
    table = read_table(Path(arguments.grid))
    points = len(table.coordinates)
    evaluations = points // SHARE
    jobs = [("ours", evaluations, seed) for seed in range(arguments.seeds)]
    jobs += [("gp_sampler", evaluations, seed) for seed in range(min(arguments.seeds, arguments.gp_seeds))]
    jobs += [("best", evaluations, 0)]
    with multiprocessing.get_context("spawn").Pool(arguments.processes, _take, (table,)) as pool:
        found = pool.map(_one, jobs, chunksize=1)
    results: dict[str, Any] = {
        "points": points,
        "frontier": table.frontier,
        "evaluations": evaluations,
        "ours": [result for method, _, result in found if method == "ours"],
        "gp_sampler": [round(result, 4) for method, _, result in found if method == "gp_sampler"],
        "random": [round(random_search(table, evaluations, seed), 4) for seed in range(100)],
        "best_possible": next(result for method, _, result in found if method == "best"),
    }
    content = json.loads(Path(arguments.grid).read_text())
    kept = ("model", "text", "prefix_tokens", "continuation_tokens", "texts", "space", "cpu_seconds")
    kept += ("largest_difference_from_harness", "date")
    results["grid"] = {name: content[name] for name in kept}
    results["speeds"] = content["speeds"]
    results["kl"] = content["kl"]
    print(summary(results))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n")


def summary(results: dict[str, Any]) -> str:
    """The figures as lines."""
    ours = [result["share"] for result in results["ours"]]
    spent = [result["in_whole_evaluations"] for result in results["ours"]]

    def shown(values: Sequence[float]) -> str:
        return f"mean {np.mean(values):.4f}, from {min(values):.4f} to {max(values):.4f}, {len(values)} seeds"

    return "\n".join(
        [
            f"{results['points']} points, {results['frontier']} on the frontier, {results['evaluations']} evaluations",
            f"spectrumkv tune: {shown(ours)}; texts judged come to {np.mean(spent):.1f} whole evaluations",
            f"optuna's GPSampler: {shown(results['gp_sampler'])}",
            f"random: {shown(results['random'])}",
            f"at best: {results['best_possible']:.4f}",
        ]
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    grid = commands.add_parser("grid")
    grid.add_argument("--model-path", required=True)
    grid.add_argument("--text", required=True)
    grid.add_argument("--out", required=True)
    grid.add_argument("--texts", type=int, default=1)
    grid.add_argument("--key-scales", nargs="+", default=list(KEY_SCALES), choices=["channel", "row"])
    grid.add_argument("--device", default="cpu", help="to measure speeds on")
    grid.add_argument("--speed-tokens", type=int, default=1024)
    grid.add_argument("--speeds", help="measured already")
    grid.set_defaults(run=make_grid)
    against = commands.add_parser("compare")
    against.add_argument("grid")
    against.add_argument("--seeds", type=int, default=5)
    against.add_argument("--gp-seeds", type=int, default=3)
    against.add_argument("--processes", type=int, default=1)
    against.add_argument("--json")
    against.set_defaults(run=compare)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
