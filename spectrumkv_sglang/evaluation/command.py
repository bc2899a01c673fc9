"""What ``spectrumkv eval`` does with its options: checks before any work, runs, writes, says."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import torch
from rich.console import Console

from spectrumkv_sglang.evaluation.errors import EvaluationError
from spectrumkv_sglang.evaluation.growth import growth_of
from spectrumkv_sglang.evaluation.methods import make_methods, parse_spec
from spectrumkv_sglang.evaluation.model import EvalModel, ModelFiles, read_model_files
from spectrumkv_sglang.evaluation.multi_needles import MultiNeedleTrial, make_multi_trial
from spectrumkv_sglang.evaluation.needle_runs import multi_needles_work, needles_work, run_multi_needles, run_needles
from spectrumkv_sglang.evaluation.placement import chosen_dtype, usable_device_type
from spectrumkv_sglang.evaluation.plot import draw
from spectrumkv_sglang.evaluation.prefix import Method
from spectrumkv_sglang.evaluation.progress import RunProgress
from spectrumkv_sglang.evaluation.report import markdown, print_result
from spectrumkv_sglang.evaluation.result import RESULT_FORMAT, EvaluationResult, Kind, Row, encode_result
from spectrumkv_sglang.evaluation.run import run_texts, texts_work
from spectrumkv_sglang.evaluation.windows import TextWindow, cut_windows
from spectrumkv_sglang.launch_config import check_writable, replace_file
from spectrumkv_sglang.loopback.plan import NATIVE
from spectrumkv_sglang.probe.haystack import load_haystack
from spectrumkv_sglang.probe.needles import NeedleTrial, least_length, make_trials
from spectrumkv_sglang.probe.plot import check_plot_format
from spectrumkv_sglang.probe.texts import load_judged_text
from spectrumkv_sglang.profiles.profile import is_profile_path


@dataclass(frozen=True, kw_only=True)
class EvaluationCommand:
    """The options of the command line, as they were given."""

    model_path: Path
    profiles: Sequence[str]
    baselines: Sequence[str]
    text: Path | None
    prefix_tokens: str
    continuation_tokens: int
    texts: int | None
    budget: float | None
    scorer: str
    seed: int
    generate: int
    needles: bool
    device: str
    dtype: str
    kv_dtype: str
    threads: int | None
    json: Path | None
    markdown: Path | None
    plot: Path | None


@dataclass(frozen=True)
class _Trials:
    """Needles of one length."""

    single: list[NeedleTrial]
    multi: list[MultiNeedleTrial]


@dataclass(frozen=True)
class _Prepared:
    """What is known before the weights are loaded."""

    files: ModelFiles
    methods: Mapping[str, Method]
    lengths: tuple[int, ...]
    windows: list[TextWindow]
    trials: dict[int, _Trials]
    dtype: str
    kv_dtype: str


def evaluate(command: EvaluationCommand, console: Console) -> EvaluationResult:
    """Run the command.

    Raises:
        SpectrumKVError: no result, and no file was written or changed; or a result of which a file, named in the
            error, could not be written.
    """
    started = time.monotonic()
    _check_outputs(command)
    with tempfile.TemporaryDirectory(prefix="spectrumkv-eval-") as folder:
        prepared = _prepare(command, Path(folder))
        if command.threads is not None:
            torch.set_num_threads(command.threads)
        progress = RunProgress(console)
        try:
            progress.note(f"loading {command.model_path.name} ({prepared.dtype} on {command.device})")
            model = EvalModel(prepared.files, command.device, prepared.dtype, prepared.kv_dtype)
            progress.expect(sum(_work(prepared, length, command.generate) for length in prepared.lengths))
            rows = {str(length): _run_length(model, prepared, length, command, progress) for length in prepared.lengths}
        finally:
            progress.close()
    result = EvaluationResult(
        format=RESULT_FORMAT,
        model=str(command.model_path),
        text=str(command.text) if command.text is not None else "shipped",
        prefix_tokens=list(prepared.lengths),
        continuation_tokens=command.continuation_tokens,
        texts=len(prepared.windows),
        seed=command.seed,
        scorer=command.scorer,
        device=command.device,
        dtype=prepared.dtype,
        kv_dtype=prepared.kv_dtype,
        native_bytes_per_token=model.native_bytes_per_token,
        methods={label: method.description for label, method in prepared.methods.items()},
        kinds={label: _kind(label, command) for label in prepared.methods},
        results=rows[str(max(prepared.lengths))],
        by_prefix_tokens=rows,
        growth=growth_of(rows, command.seed),
        seconds=time.monotonic() - started,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions=_versions(),
    )
    print_result(result, console)
    _write(result, command, console)
    return result


def _run_length(
    model: EvalModel, prepared: _Prepared, length: int, command: EvaluationCommand, progress: RunProgress
) -> dict[str, Row]:
    progress.phase(f"text, {length} tokens")
    rows = run_texts(
        model,
        prepared.methods,
        prepared.windows,
        length,
        generate=command.generate,
        seed=command.seed,
        advance=progress.advance,
    )
    trials = prepared.trials.get(length)
    if trials is None:
        return rows
    progress.phase(f"needles, {length} tokens")
    single = run_needles(model, prepared.methods, trials.single, progress.advance)
    multi = run_multi_needles(model, prepared.methods, trials.multi, progress.advance)
    return {
        label: msgspec.structs.replace(row, needles=single[label], multi_needles=multi[label])
        for label, row in rows.items()
    }


def _work(prepared: _Prepared, length: int, generate: int) -> float:
    methods, trials = len(prepared.methods), prepared.trials.get(length)
    work = texts_work(prepared.windows, methods, length, generate)
    if trials is not None:
        work += needles_work(trials.single, methods) + multi_needles_work(trials.multi, methods)
    return work


def _kind(label: str, command: EvaluationCommand) -> Kind:
    if label == NATIVE:
        return "native"
    return "profile" if label in command.profiles else "baseline"


def _prepare(command: EvaluationCommand, folder: Path) -> _Prepared:
    methods = make_methods(
        command.profiles,
        command.baselines,
        budget=command.budget,
        scorer=command.scorer,
        seed=command.seed,
        folder=folder,
    )
    lengths = _lengths(command.prefix_tokens)
    device_type = usable_device_type(command.device)
    text = load_judged_text(command.text)
    files = read_model_files(command.model_path)
    windows = cut_windows(
        files.tokenizer,
        text,
        prefix_tokens=lengths,
        continuation_tokens=command.continuation_tokens,
        texts=command.texts,
        seed=command.seed,
        context_tokens=files.context_tokens,
    )
    return _Prepared(
        files=files,
        methods=methods,
        lengths=lengths,
        windows=windows,
        trials=_trials(files, lengths, command.seed) if command.needles else {},
        dtype=chosen_dtype(command.dtype, "--dtype", "float32" if device_type == "cpu" else files.dtype),
        kv_dtype=chosen_dtype(command.kv_dtype, "--kv-dtype", files.dtype),
    )


def _trials(files: ModelFiles, lengths: Sequence[int], seed: int) -> dict[int, _Trials]:
    least = least_length(files.tokenizer)
    if short := [length for length in lengths if length < least]:
        raise EvaluationError(
            f"--needles: a prompt of {short[0]} tokens (--prefix-tokens) has no room for a needle in some text; this "
            f"model's chat template needs at least {least}"
        )
    haystack = load_haystack()
    return {
        length: _Trials(
            make_trials(files.tokenizer, haystack, lengths=[length], seed=seed),
            [make_multi_trial(files.tokenizer, haystack, length=length, seed=seed)],
        )
        for length in lengths
    }


def _lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise EvaluationError(f"--prefix-tokens {text!r}: expected lengths such as 1792 or 512,1792,4096") from error
    if lengths[0] < 1:
        raise EvaluationError(f"--prefix-tokens {text!r}: lengths are at least 1")
    return lengths


def _check_outputs(command: EvaluationCommand) -> None:
    """Refuse, before any work, files that cannot be written, and files that would replace one another or an input."""
    taken = {} if command.text is None else {os.path.realpath(command.text): "--text"}
    for text in command.profiles:
        name = parse_spec(text, "--profile").name
        if is_profile_path(name):
            taken[os.path.realpath(name)] = "--profile"
    for option, path in (("--json", command.json), ("--markdown", command.markdown), ("--plot", command.plot)):
        if path is None:
            continue
        target = os.path.realpath(path)
        if target in taken:
            raise EvaluationError(f"{option} {path} would replace the file of {taken[target]}: give it another name")
        taken[target] = option
        check_writable(path)
    if command.plot is not None:
        check_plot_format(command.plot)


def _write(result: EvaluationResult, command: EvaluationCommand, console: Console) -> None:
    contents: list[tuple[Path | None, bytes]] = [
        (command.json, encode_result(result)),
        (command.markdown, markdown(result).encode()),
        (command.plot, draw(result, command.plot) if command.plot is not None else b""),
    ]
    written = []
    for path, content in contents:
        if path is not None:
            replace_file(path, content)
            written.append(str(path))
    if written:
        console.print(f"written: {', '.join(written)}", highlight=False)


def _versions() -> dict[str, str]:
    found = {}
    for package in ("spectrumkv-sglang", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
