"""How many evaluations `spectrumkv tune` needs against an exhaustive grid, beside random search and optuna's GPSampler.

    python benchmarks/tune_against_grid.py grid --model-path DIR --text FILE --out GRID.json [--full] [--device cuda]
    python benchmarks/tune_against_grid.py speeds --model-path DIR --text FILE --out SPEEDS.json [--full]
    python benchmarks/tune_against_grid.py compare GRID.json [--seeds 5] [--json FILE]

``grid`` judges every point of a space of profiles on some texts (`tune_grid`) and keeps each KL. Run it again to go on
where it was stopped; ``--part 1/4`` to ``4/4`` beside each other share the work, and the same without ``--part``
afterwards writes the grid. With ``--judged`` that takes what was judged as it is, needs no model, and takes the speeds
that ``speeds`` measured with the same options. ``compare`` lets searches look their evaluations up there: the
hypervolume that they come to, over the grid's own, in the smallest box with all of the grid's points in it (logarithm
of KL, b, logarithm of the time), and the evaluations until 98 %.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tune_grid_run import make_grid, save_speeds
from tune_methods import METHODS, Table, read_table

from spectrumkv_sglang.search.space import Space, space_from

SHARE = 20
"""The grid's evaluations over those that a search may spend."""
MOST = 4
"""So many times as many are spent until the goal is reached."""
GOAL = 0.98
RANDOM_SEEDS = 20
SMALL = {"key_scales": "channel", "key_transform": "identity,derope", "edges": "0,1", "upgrade": "0,0.5"}
"""Axes of the smaller grid where they are not `Space`'s own: 564 points."""
AXES = ("key_bits", "value_bits", "key_scales", "key_transform", "value_transform", "edges", "upgrade")

_table: Table | None = None


def _take(table: Table) -> None:
    global _table
    _table = table


def _one(job: tuple[str, int, int, int]) -> tuple[str, dict[str, Any]]:
    method, evaluations, most, seed = job
    assert _table is not None
    result = METHODS[method](_table, evaluations, most, GOAL, seed)
    needed = "not reached" if result["needed"] is None else f"98 % after {result['needed']}"
    print(f"{method}, seed {seed}: {result['share']:.4f} with {evaluations}; {needed}", flush=True)
    return method, result


def compare(arguments: argparse.Namespace) -> None:
    """All methods and seeds with a twentieth of the grid's evaluations."""
    table = read_table(arguments.grid)
    points = len(table.coordinates)
    evaluations = points // SHARE
    most = MOST * evaluations
    print(f"{points} points, {len(table.frontier)} on the frontier", flush=True)
    # The longest first.
    jobs = [("gp_sampler", evaluations, most, seed) for seed in range(arguments.gp_seeds)]
    jobs += [("ours", evaluations, most, seed) for seed in range(arguments.seeds)]
    jobs += [("best", evaluations, most, 0)]
    jobs += [("random", evaluations, points, seed) for seed in range(arguments.random_seeds)]
    with multiprocessing.get_context("spawn").Pool(arguments.processes, _take, (table,)) as pool:
        found = list(pool.imap_unordered(_one, jobs, chunksize=1))
    content = json.loads(arguments.grid.read_text())
    described = content.get("grid") or {
        name: value for name, value in content.items() if name not in ("speeds", "kl", "geometry")
    }
    results: dict[str, Any] = {
        "points": points,
        "frontier": len(table.frontier),
        "evaluations": evaluations,
        "goal": GOAL,
        **{name: sorted((r for m, r in found if m == name), key=lambda r: r["seed"]) for name in METHODS},
        "grid": described,
        "speeds": content["speeds"],
        "kl": {name: [float(f"{value:.5g}") for value in values] for name, values in content["kl"].items()},
    }
    print(summary(results))
    if arguments.json:
        arguments.json.write_text(json.dumps(results) + "\n")


def summary(results: dict[str, Any]) -> str:
    """The figures as a Markdown table."""
    rows = [
        f"{results['points']} points, {results['frontier']} on the frontier, {results['evaluations']} evaluations",
        "",
        "| | mean | least | most | evaluations until 98 % | seeds |",
        "|---|---|---|---|---|---|",
    ]
    names = {"ours": "`spectrumkv tune`", "gp_sampler": "optuna's GPSampler", "random": "random", "best": "at best"}
    for method, name in names.items():
        found = results[method]
        if found:
            shares = [result["share"] for result in found]
            cells = f"{np.mean(shares):.4f} | {min(shares):.4f} | {max(shares):.4f}"
            rows.append(f"| {name} | {cells} | {_needed(found)} | {len(found)} |")
    if results["ours"]:
        spent = [result["in_whole_evaluations"] for result in results["ours"]]
        rows += ["", f"texts that ours judged come to {np.mean(spent):.1f} whole evaluations"]
    return "\n".join(rows)


def _needed(found: Sequence[dict[str, Any]]) -> str:
    needed = [result["needed"] for result in found if result["needed"] is not None]
    missed = len(found) - len(needed)
    if not needed:
        return f"not within {len(found[0]['curve'])}"
    shown = f"{np.mean(needed):.0f}, from {min(needed)} to {max(needed)}"
    return shown + (f"; {missed} not within {max(len(result['curve']) for result in found)}" if missed else "")


def _space(arguments: argparse.Namespace) -> Space:
    given = {axis: getattr(arguments, axis) for axis in AXES if getattr(arguments, axis) is not None}
    return space_from(**{**({} if arguments.full else SMALL), **given})


def _part(text: str) -> tuple[int, int]:
    number, parts = (int(piece) for piece in text.split("/"))
    if not 1 <= number <= parts:
        raise argparse.ArgumentTypeError(f"{text}: expected I/N, from 1/N to N/N")
    return number, parts


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    grid = commands.add_parser("grid")
    alone = commands.add_parser("speeds")
    for command in (grid, alone):
        command.add_argument("--model-path", required=True)
        command.add_argument("--text", required=True)
        command.add_argument("--out", required=True, type=Path)
        command.add_argument("--full", action="store_true", help="all 5,052 points that spectrumkv tune searches")
        for axis in AXES:
            command.add_argument(
                f"--{axis.replace('_', '-')}", help="choices, with commas, as spectrumkv tune takes them"
            )
        command.add_argument("--texts", type=int, default=1)
        command.add_argument("--prefix-tokens", type=int, default=256)
        command.add_argument("--continuation-tokens", type=int, default=32)
        command.add_argument("--device", default="cpu", help="to judge, and to measure speeds, on")
        command.add_argument("--dtype", default="float32", help="that the model computes in")
        command.add_argument("--speed-tokens", type=int, default=1024)
    grid.add_argument("--at-once", type=int, default=8, help="points in one forward")
    grid.add_argument("--kept-gib", type=int, default=1, help="memory for KV that many points have in common")
    grid.add_argument("--part", type=_part, metavar="I/N", help="judge a part alone, for a run beside others")
    grid.add_argument("--speeds", help="measured already, a file of speeds or of spectrumkv tune --save-speeds")
    grid.add_argument(
        "--judged", action="store_true", help="only write the grid, all of which was judged; with --speeds"
    )
    grid.set_defaults(run=lambda arguments: make_grid(arguments, _space(arguments)))
    alone.set_defaults(run=lambda arguments: save_speeds(arguments, _space(arguments)))
    against = commands.add_parser("compare")
    against.add_argument("grid", type=Path)
    against.add_argument("--seeds", type=int, default=5)
    against.add_argument("--gp-seeds", type=int, default=3)
    against.add_argument("--random-seeds", type=int, default=RANDOM_SEEDS)
    against.add_argument("--processes", type=int, default=1)
    against.add_argument("--json", type=Path)
    against.set_defaults(run=compare)
    arguments = parser.parse_args()
    if getattr(arguments, "judged", False) and not arguments.speeds:
        parser.error("--judged needs --speeds: nothing is measured")
    arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
