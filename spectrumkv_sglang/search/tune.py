"""What ``spectrumkv tune`` does with its options: checks, measures speeds, searches, writes."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from spectrumkv_sglang.calibration.allocation import NominalChunk
from spectrumkv_sglang.evaluation.model import EvalModel
from spectrumkv_sglang.evaluation.progress import RunProgress
from spectrumkv_sglang.evaluation.work import judged_work
from spectrumkv_sglang.launch_config import replace_file
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.search.codec_speeds import CodecSpeeds, cells_of, measure_speeds
from spectrumkv_sglang.search.errors import TuneError
from spectrumkv_sglang.search.judge import Judge
from spectrumkv_sglang.search.known_costs import KnownCosts, known_costs
from spectrumkv_sglang.search.preparation import Prepared, TuneCommand, prepare
from spectrumkv_sglang.search.pruning import Pruning
from spectrumkv_sglang.search.report import draw, print_result
from spectrumkv_sglang.search.result import FrontierFile, frontier_file, write_result
from spectrumkv_sglang.search.search import Limits, Search
from spectrumkv_sglang.search.space import Point
from spectrumkv_sglang.search.trials import Trials, kept_speeds

SINK_TOKENS = 4
"""First tokens that stay native, as a server's default keeps them."""


def tune(command: TuneCommand, console: Console) -> FrontierFile:
    """Run the command.

    Raises:
        SpectrumKVError: no result; what was judged is kept in the study.
    """
    prepared = prepare(command)
    if command.threads is not None:
        torch.set_num_threads(command.threads)
    progress = RunProgress(console)
    try:
        with tempfile.TemporaryDirectory(prefix="spectrumkv-tune-") as folder:
            search, costs, speeds, layers = _search(command, prepared, Path(folder), progress)
    finally:
        progress.close()
    result = frontier_file(search, costs, command.model_path.name, prepared.identity, speeds.device, command.candidates)
    if not result.frontier:
        raise TuneError(f"no point that was judged keeps to --max-kl {command.max_kl}: raise it, or judge more points")
    print_result(result, console)
    written = write_result(command.out, result, costs, layers)
    picture = command.out / "frontier.png"
    replace_file(picture, draw(result, picture))
    shown = [str(path) for path in (*written, picture) if path.parent == command.out]
    console.print(f"written: {', '.join(shown)}, and {len(result.frontier)} profiles", highlight=False)
    return result


def _search(
    command: TuneCommand, prepared: Prepared, folder: Path, progress: RunProgress
) -> tuple[Search, KnownCosts, CodecSpeeds, int]:
    progress.note(f"loading {command.model_path.name} ({prepared.dtype} on {command.device})")
    model = EvalModel(prepared.files, command.device, prepared.dtype, prepared.kv_dtype)
    judge = Judge(
        model, prepared.windows, command.prefix_tokens, SINK_TOKENS, folder, lambda work: progress.advance(work)
    )
    points = list(command.space)
    speeds = prepared.speeds or kept_speeds(command.study_path) or _measured(command, judge, points, folder, progress)
    points = _with_speeds(points, speeds, judge.geometry, progress)
    progress.note(f"{len(points):,} points: counting their bytes")
    costs = known_costs(points, NominalChunk(judge.geometry, command.chunk_tokens, SINK_TOKENS), speeds)
    content = speeds.encode()
    identity = {**prepared.identity, "speeds": hashlib.sha256(content).hexdigest()[:16]}
    trials = Trials(costs, command.study_path, identity, speeds=content)
    search = Search(
        costs,
        judge.texts,
        lambda place, text: judge.kl(points[place], text),
        trials,
        Pruning(command.least_kl, command.max_kl),
        Limits(command.evaluations, command.patience),
        command.seed,
    )
    before = len(trials.finished)
    if before:
        progress.note(f"{command.study_path}: goes on after {before} points")
    each = judged_work(command.continuation_tokens)
    progress.expect(max(0, command.evaluations - before) * judge.texts * each)
    progress.phase("searching")
    for number, trial in enumerate(search.run(), start=before + 1):
        progress.phase(f"searching, {number} points, {search.hypervolume():.1%} of the box")
        progress.advance(judge.texts * each)
        del trial
    return search, costs, speeds, judge.geometry.layers


def _measured(
    command: TuneCommand, judge: Judge, points: Sequence[Point], folder: Path, progress: RunProgress
) -> CodecSpeeds:
    cells = cells_of([point.profile(judge.geometry.layers) for point in points], judge.geometry)
    progress.note(f"measuring how fast {len(cells)} precisions are packed and unpacked on {command.device}")
    device = torch.cuda.get_device_name(command.device) if command.device.startswith("cuda") else "CPU, one thread"
    speeds = measure_speeds(judge.pool(), cells, device, folder)
    if command.save_speeds is not None:
        replace_file(command.save_speeds, speeds.encode())
        progress.note(f"speeds saved to {command.save_speeds}")
    return speeds


def _with_speeds(
    points: Sequence[Point], speeds: CodecSpeeds, geometry: KVGeometry, progress: RunProgress
) -> list[Point]:
    """Points all of whose cells have a speed; says which are left out for what.

    Raises:
        TuneError: none is left.
    """
    profiles = [point.profile(geometry.layers) for point in points]
    missing = speeds.missing(cells_of(profiles, geometry))
    if not missing:
        return list(points)
    kept = [
        point
        for point, profile in zip(points, profiles, strict=True)
        if not speeds.missing(cells_of([profile], geometry))
    ]
    if not kept:
        raise TuneError(f"--speeds holds no speed of {', '.join(missing)}, and no point goes without: measure anew")
    progress.note(
        f"no speed is known of {', '.join(missing)}: {len(points) - len(kept):,} of {len(points):,} points left out"
    )
    return kept
