"""What ``spectrumkv probe`` does with its options: checks before any work, runs, writes, says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from spectrumkv_sglang.config import SpectrumKVConfig, load_config
from spectrumkv_sglang.launch.processes import stopping_on_signals
from spectrumkv_sglang.launch.servers import default_backend
from spectrumkv_sglang.launch_config import check_writable, replace_file, write_launch_config
from spectrumkv_sglang.launch_flags import flags_from_arguments, with_absolute_paths
from spectrumkv_sglang.probe.calibrated import calibrate_first, calibrated_profile_path
from spectrumkv_sglang.probe.console_progress import ConsoleProgress
from spectrumkv_sglang.probe.errors import ProbeError
from spectrumkv_sglang.probe.gate import Thresholds
from spectrumkv_sglang.probe.needle_runs import MIN_LENGTH
from spectrumkv_sglang.probe.needles import check_depths
from spectrumkv_sglang.probe.options import ProbeOptions
from spectrumkv_sglang.probe.plot import check_plot_format, draw
from spectrumkv_sglang.probe.probe import run_probe
from spectrumkv_sglang.probe.report import print_comparison, print_result
from spectrumkv_sglang.probe.result import encode_result, read_result
from spectrumkv_sglang.profiles.tier import Tier
from spectrumkv_sglang.sglang_compat import BACKEND, BACKEND_TCP


@dataclass(frozen=True, kw_only=True)
class ProbeCommand:
    """The options of the command line, as they were given."""

    model_path: str
    out: Path
    json: Path | None
    plot: Path | None
    config: Path | None
    profile: str | None
    calibrate: Path | None
    budget: float | None
    backend: str | None
    trials: int
    depths: str
    lengths: Sequence[int]
    haystack: Path | None
    text: Path | None
    seed: int
    needle_seconds: float
    request_timeout: float
    max_kl: float | None
    max_dppl: float | None
    min_top1: float | None
    engine_arguments: Sequence[str]


def probe(command: ProbeCommand, console: Console) -> int:
    """Run the command; returns its exit code: 0 low tier allowed, 10 not allowed, 11 inconclusive.

    Raises:
        SpectrumKVError: no result, and no file was written or changed; or a result of which a file, named in the
            error, could not be written. The launch config is the first one.
    """
    outputs = [command.out, *(path for path in (command.json, command.plot) if path is not None)]
    _check_outputs(outputs, command)
    if command.calibrate is not None and command.profile is not None:
        raise ProbeError("--calibrate makes the profile that is judged: leave --profile out")
    if command.plot is not None:
        check_plot_format(command.plot)
    depths = _depths(command.depths)
    check_depths(depths)
    if too_short := [length for length in command.lengths if length < MIN_LENGTH]:
        raise ProbeError(f"--length {too_short[0]}: a needle and some text need at least {MIN_LENGTH} tokens")
    config = _config(command)
    if command.calibrate is not None:
        profile = calibrated_profile_path(command.out)
        check_writable(profile)
        with stopping_on_signals():
            calibrate_first(command.model_path, command.calibrate, command.budget, command.seed, profile)
        command = replace(command, profile=str(profile.resolve()))
        config = _config(command)
    options = ProbeOptions(
        model=command.model_path,
        config=config,
        explicit_budget="budget" in config.model_fields_set,
        flags=with_absolute_paths(flags_from_arguments(command.engine_arguments)),
        backend=_backend(command.backend),
        trials=command.trials,
        depths=depths,
        lengths=tuple(command.lengths),
        haystack=command.haystack,
        text=command.text,
        seed=command.seed,
        needle_seconds=command.needle_seconds,
        request_seconds=command.request_timeout,
        thresholds=Thresholds(config.probe_max_kl, config.probe_max_dppl_pct, config.probe_min_top1),
        log_path=_log_path(command),
    )
    progress = ConsoleProgress(console)
    with stopping_on_signals():
        try:
            result, launch, exit_code = run_probe(options, progress)
        finally:
            progress.close()
        print_result(result, console)
        picture = draw(result, command.plot) if command.plot is not None else b""
        write_launch_config(command.out, launch)
        if command.json is not None:
            replace_file(command.json, encode_result(result))
        if command.plot is not None:
            replace_file(command.plot, picture)
    console.print(f"written: {', '.join(map(str, outputs))}", highlight=False)
    console.print(f"start with: spectrumkv launch prefill|decode|pair --config {command.out}", highlight=False)
    return exit_code


def compare(first: Path, second: Path, console: Console) -> None:
    """Print two results side by side. Raises ProbeError when one cannot be read."""
    print_comparison(read_result(first), read_result(second), (str(first), str(second)), console)


def _check_outputs(outputs: Sequence[Path], command: ProbeCommand) -> None:
    """Refuse, before any work, files that cannot be written, and files that would replace one another or an input. An
    earlier launch config given as ``--config`` may be replaced by the new one."""
    taken = {
        os.path.realpath(path): option
        for option, path in (
            ("--haystack", command.haystack),
            ("--text", command.text),
            ("--calibrate", command.calibrate),
            ("--profile", command.profile),
            ("the log", _log_path(command)),
        )
        if path is not None
    }
    for option, path in (("--out", command.out), ("--json", command.json), ("--plot", command.plot)):
        if path is None:
            continue
        target = os.path.realpath(path)
        if option != "--out" and command.config is not None and target == os.path.realpath(command.config):
            raise ProbeError(f"{option} {path} would replace the file of --config: give it another name")
        if target in taken:
            raise ProbeError(f"{option} {path} would replace the file of {taken[target]}: give it another name")
        taken[target] = option
    for path in outputs:
        check_writable(path)


def _log_path(command: ProbeCommand) -> Path:
    return command.out.with_name(f"{command.out.name}.log")


def _config(command: ProbeCommand) -> SpectrumKVConfig:
    """The configuration to judge: a file's, then the options; all three tiers, whatever an earlier probe allowed."""
    given = {
        "profile": ("--profile", command.profile),
        "budget": ("--budget", command.budget),
        "probe_max_kl": ("--max-kl", command.max_kl),
        "probe_max_dppl_pct": ("--max-dppl", command.max_dppl),
        "probe_min_top1": ("--min-top1", command.min_top1),
    }
    options: dict[str, tuple[str, Any]] = {
        field: (option, str(value)) for field, (option, value) in given.items() if value not in (None, "")
    }
    if command.config is not None:
        load_config(command.config, {})  # what stands in the file must be valid even where it does not count
        options["allowed_tiers"] = ("spectrumkv probe", tuple(Tier))
    return load_config(command.config, {}, options)


def _backend(chosen: str | None) -> str:
    backend = chosen or default_backend()
    if backend not in (BACKEND, BACKEND_TCP):
        raise typer.BadParameter(f"{backend!r}: expected {BACKEND} or {BACKEND_TCP}", param_hint="--backend")
    return backend


def _depths(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: expected numbers such as 0.1,0.5,0.9", param_hint="--depths") from error
