"""Judging a whole grid: what was judged is kept line by line, in one file a part, and taken up again.

Parts of a grid may be judged by processes beside each other (``--part 1/4``), on one GPU or several; the run without a
part takes what they all judged, judges what is left, and writes the grid.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from tune_grid import GridJudge

from spectrumkv_sglang.search.codec_speeds import CodecSpeeds, cells_of, measure_speeds, read_speeds
from spectrumkv_sglang.search.judge import Judge
from spectrumkv_sglang.search.space import Point, Space

SEED, SINKS, LEAST_KL = 0, 4, 1e-5
CHECKED = 12
SAID_EVERY = 10.0
"""Seconds."""

Losses = dict[tuple[str, int], float]
"""KL by point's name and text."""


def make_grid(arguments: argparse.Namespace, space: Space) -> None:
    """Judge the points of a space, or of a part of it; without a part, write the grid."""
    points = list(space)
    out: Path = arguments.out
    settings = _settings(arguments)
    done, seconds = read_judged(out, settings)
    if arguments.judged:
        if left := sum((point.name, text) not in done for point in points for text in range(arguments.texts)):
            raise SystemExit(f"{left:,} of {len(points) * arguments.texts:,} are not judged yet: leave --judged out")
        _write(out, settings, space, seconds, None, read_speeds(Path(arguments.speeds)), done)
        return
    model, windows = judge_model(arguments)
    number, parts = arguments.part or (1, 1)
    own = part_of(points, number, parts)
    path = out.with_suffix(f".part-{number}-of-{parts}.jsonl" if arguments.part else ".jsonl")
    seconds += judge_points(arguments, model, windows, own, done, path, settings)
    if arguments.part:
        print(f"part {number} of {parts} is judged: {path}", flush=True)
        return
    largest = against_harness(model, windows, arguments.prefix_tokens, points, done)
    speeds = read_speeds(Path(arguments.speeds)) if arguments.speeds else measured(arguments, model, windows[0], points)
    _write(out, settings, space, seconds, largest, speeds, done)
    print(f"{largest:.2g} at most from the harness, of {CHECKED} points", flush=True)


def save_speeds(arguments: argparse.Namespace, space: Space) -> None:
    """Measure the speeds of a space alone, for a grid whose parts are judged meanwhile."""
    model, windows = judge_model(arguments)
    speeds = measured(arguments, model, windows[0], list(space))
    arguments.out.write_text(speeds.encode().decode() + "\n")


def _write(
    out: Path,
    settings: dict[str, Any],
    space: Space,
    seconds: float,
    largest: float | None,
    speeds: CodecSpeeds,
    done: Losses,
) -> None:
    described = json.loads(speeds.encode())
    content = {
        **settings,
        "space": {axis.name: list(getattr(space, axis.name)) for axis in fields(space)},
        "seconds": round(seconds),
        "largest_difference_from_harness": largest,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "speeds": described,
        "geometry": described["geometry"],
        "kl": {point.name: [done[point.name, text] for text in range(settings["texts"])] for point in space},
    }
    out.write_text(json.dumps(content) + "\n")
    print(f"written: {out}", flush=True)


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the KL of a point depends on."""
    return {
        "model": Path(arguments.model_path).name,
        "text": Path(arguments.text).name,
        "prefix_tokens": arguments.prefix_tokens,
        "continuation_tokens": arguments.continuation_tokens,
        "texts": arguments.texts,
        "device": arguments.device.split(":")[0],
        "dtype": arguments.dtype,
    }


def judge_model(arguments: argparse.Namespace) -> tuple[Any, list[Any]]:
    """The model and the windows that it is judged on."""
    import torch

    from spectrumkv_sglang.evaluation.model import EvalModel, read_model_files
    from spectrumkv_sglang.evaluation.windows import cut_windows

    torch.set_num_threads(1)
    files = read_model_files(Path(arguments.model_path))
    windows = cut_windows(
        files.tokenizer,
        Path(arguments.text).read_text(encoding="utf-8"),
        prefix_tokens=(arguments.prefix_tokens,),
        continuation_tokens=arguments.continuation_tokens,
        texts=arguments.texts,
        seed=SEED,
        context_tokens=files.context_tokens,
    )
    return EvalModel(files, arguments.device, arguments.dtype, files.dtype), windows


def part_of(points: Sequence[Point], number: int, parts: int) -> list[Point]:
    """The points of part ``number``, counted from 1: neighbours, so that they have halves in common."""
    ordered = sorted(points, key=lambda p: (p.edges, p.upgrade, p.key_scales, p.key_transform))
    bounds = np.linspace(0, len(points), parts + 1).round().astype(int)
    return ordered[bounds[number - 1] : bounds[number]]


def read_judged(out: Path, settings: dict[str, Any]) -> tuple[Losses, float]:
    """What all runs for ``out`` judged so far, and the seconds that they took."""
    done: Losses = {}
    seconds = 0.0
    for path in sorted(out.parent.glob(f"{out.stem}.*jsonl")):
        lines = path.read_text().split("\n")[:-1]  # the last one may be half a line
        if lines and json.loads(lines[0]) != settings:
            raise SystemExit(f"{path} was begun with {lines[0]}, this run has {json.dumps(settings)}: another --out")
        for entry in map(json.loads, lines[1:]):
            done[entry["point"], entry["text"]] = entry["kl"]
            seconds += entry["seconds"]
    return done, seconds


def judge_points(
    arguments: argparse.Namespace,
    model: Any,
    windows: Sequence[Any],
    points: Sequence[Point],
    done: Losses,
    path: Path,
    settings: dict[str, Any],
) -> float:
    """Judge what ``done`` lacks of ``points``, into it and into a file; returns the seconds that it took."""
    _end_with_a_line(path)
    began = said = time.monotonic()
    left = sum((point.name, text) not in done for point in points for text in range(len(windows)))
    judged, last = 0, began
    budgets: dict[str, float] = {}
    with path.open("a") as file:
        if file.tell() == 0:
            file.write(json.dumps(settings) + "\n")
        for text, window in enumerate(windows):
            todo = [point for point in points if (point.name, text) not in done]
            if not todo:
                continue
            judge = GridJudge(
                model, window, arguments.prefix_tokens, SINKS, arguments.at_once, arguments.kept_gib << 30, budgets
            )
            for point, kl in judge.kl(todo):
                now = time.monotonic()
                entry = {"point": point.name, "text": text, "kl": kl, "seconds": round(now - last, 5)}
                file.write(json.dumps(entry) + "\n")
                last, judged = now, judged + 1
                done[point.name, text] = kl
                if now - said > SAID_EVERY or judged == left:
                    said = now
                    file.flush()
                    rate = judged / (now - began)
                    print(
                        f"{judged:,} of {left:,} judged, {rate:.1f} a second, {judge.halves_made:,} halves moved for "
                        f"text {text}; about {(left - judged) / rate / 60:.1f} min left",
                        flush=True,
                    )
    return time.monotonic() - began


def _end_with_a_line(path: Path) -> None:
    """Cut off what a run that was stopped wrote of a line."""
    if path.exists():
        content = path.read_bytes()
        if not content.endswith(b"\n"):
            path.write_bytes(content[: content.rfind(b"\n") + 1])


def against_harness(
    model: Any, windows: Sequence[Any], prefix_tokens: int, points: Sequence[Point], done: Losses
) -> float:
    """Largest relative difference of the grid's KL from what the search's own judge says, over some points."""
    drawn = np.random.default_rng(SEED).choice(len(points), min(CHECKED, len(points)), replace=False)
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(model, windows, prefix_tokens, SINKS, Path(folder), lambda _: None)
        differences = []
        for place in drawn.tolist():
            text = place % len(windows)
            ours, theirs = done[points[place].name, text], judge.kl(points[place], text)
            print(f"{points[place].name}, text {text}: {ours:.6g} here, {theirs:.6g} by the harness", flush=True)
            differences.append(abs(ours - theirs) / max(theirs, LEAST_KL))
    return float(f"{max(differences):.2g}")


def measured(arguments: argparse.Namespace, model: Any, window: Any, points: Sequence[Point]) -> CodecSpeeds:
    """Speeds of every cell of the points, on the text's KV, repeated."""
    import torch

    from spectrumkv_sglang.payload.key_rotation import KeyRotation
    from spectrumkv_sglang.payload.kv_buffers import KVBuffers
    from spectrumkv_sglang.transfer.pool_view import PoolView

    prefix = model.prefill(window.name, window.prefix(arguments.prefix_tokens), {}).prefix
    geometry = prefix.geometry
    cells = cells_of([point.profile(geometry.layers) for point in points], geometry)
    device = prefix.view.device
    repeats = max(1, arguments.speed_tokens // arguments.prefix_tokens)
    tokens = repeats * arguments.prefix_tokens
    buffers = KVBuffers(
        k=[k.repeat(repeats, 1, 1) for k in prefix.view.buffers.k],
        v=[v.repeat(repeats, 1, 1) for v in prefix.view.buffers.v],
    )
    angles = torch.outer(torch.arange(tokens).float(), torch.arange(geometry.head_dim).float() / 64).to(device)
    rotation = KeyRotation(((angles.cos(), angles.sin()),) * geometry.layers)
    view = PoolView(buffers, geometry, device, tokens, rotation)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, one thread"
    began, measured = time.monotonic(), 0

    def advance() -> None:
        nonlocal measured
        measured += 1
        print(f"speeds: {measured} of about {len(cells)}, {time.monotonic() - began:.0f} s", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        return measure_speeds(view, cells, name, Path(folder), advance)
