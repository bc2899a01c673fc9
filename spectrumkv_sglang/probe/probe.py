"""Runs a probe from start to launch config: one server, needles, text, the rule, the files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.launch.servers import Device, detect_device
from spectrumkv_sglang.launch.sglang_versions import installed_version
from spectrumkv_sglang.launch_config import LaunchConfig
from spectrumkv_sglang.launch_flags import Flags
from spectrumkv_sglang.loopback.plan import NATIVE
from spectrumkv_sglang.probe import policies
from spectrumkv_sglang.probe.engine import ProbeEngine
from spectrumkv_sglang.probe.errors import ProbeError
from spectrumkv_sglang.probe.gate import EXIT_CODES, decide
from spectrumkv_sglang.probe.haystack import load_haystack
from spectrumkv_sglang.probe.model_identity import fingerprint_on_disk, loaded_fingerprint, require_unchanged
from spectrumkv_sglang.probe.needle_runs import (
    CALIBRATION_TOKENS,
    MIN_LENGTH,
    NeedleResult,
    choose_length,
    count,
    longest_length,
    run_trials,
)
from spectrumkv_sglang.probe.needles import least_length, make_trials
from spectrumkv_sglang.probe.options import ProbeOptions, ProbeProgress
from spectrumkv_sglang.probe.outcome import Measured, make_launch_config, make_record, make_result
from spectrumkv_sglang.probe.result import Memory, ProbeResult, Seconds
from spectrumkv_sglang.probe.server_flags import probe_server_flags, with_cpu_defaults
from spectrumkv_sglang.probe.text_runs import cut_windows, run_windows
from spectrumkv_sglang.probe.texts import load_judged_text
from spectrumkv_sglang.profiles.tier import Tier
from spectrumkv_sglang.verification.narrow_precisions import narrow_precisions
from spectrumkv_sglang.verification.record import GateScores

_NEEDLE_POLICIES = (policies.POLICY, policies.LOW)


def run_probe(options: ProbeOptions, progress: ProbeProgress) -> tuple[ProbeResult, LaunchConfig, int]:
    """Probe a model; returns the result, the launch config, and the command's exit code. The caller writes the files.

    Raises:
        SpectrumKVError: the probe could not reach a result; nothing is left running.
    """
    started = time.monotonic()
    device = detect_device()
    flags = with_cpu_defaults(options.flags, device)
    server_flags, left_out = probe_server_flags(flags)
    haystack, text = load_haystack(options.haystack), load_judged_text(options.text)
    tokenizer = load_tokenizer(options.model, options.flags)
    least_length(tokenizer)  # a chat template that cannot be used is found before the model is loaded
    before = fingerprint_on_disk(options)
    if left_out:
        progress.note(f"not used by the probe's own server: {', '.join(f'--{name}' for name in left_out)}")
    progress.note(f"starting SGLang {installed_version()} with {options.model}")
    served_device = Device.CPU if server_flags.get("device") == "cpu" else device
    local = Path(options.model)
    with ProbeEngine(
        model=local if local.exists() else options.model,
        flags=server_flags,
        device=served_device,
        base=policies.base_fields(options.config),
        request_seconds=options.request_seconds,
        log_path=options.log_path,
        on_waiting=lambda seconds: progress.note(f"waiting for SGLang, {seconds:.0f} s so far"),
    ) as engine:
        progress.note(f"ready after {engine.load_seconds:.0f} s")
        fingerprint = loaded_fingerprint(engine.server)
        require_unchanged(before, fingerprint)
        geometry = engine.server.geometry
        names = policies.write_policies(options.config, geometry, engine.policies)
        progress.note(f"KV pool: {geometry.dtype}, {engine.server.pool_tokens} tokens, page {geometry.page_size}")
        needle_started = time.monotonic()
        needle_names = [name for name in _NEEDLE_POLICIES if name in names]
        results = _run_needles(engine, tokenizer, haystack, options, needle_names, progress)
        text_started = time.monotonic()
        scores = _run_text(engine, tokenizer, text, options, names, progress)
        ended = time.monotonic()
        measured = Measured(
            fingerprint=fingerprint,
            geometry=geometry,
            needles=results,
            scores=scores,
            command=list(engine.command),
            seconds=Seconds(
                load=engine.load_seconds,
                needles=text_started - needle_started,
                text=ended - text_started,
                total=ended - started,
            ),
            memory=Memory(loaded=engine.load_bytes, peak=engine.peak_bytes),
        )
    decision = decide(
        options.config.loaded_profile.usable_tiers(options.config.allowed_tiers),
        count(results),
        scores,
        options.thresholds,
        _narrow_tiers(options.config),
    )
    record = make_record(options, decision, measured)
    launch = make_launch_config(options, flags, record)
    return make_result(options, decision, measured, record, launch), launch, EXIT_CODES[decision.verdict]


def load_tokenizer(model: str, flags: Flags) -> Any:
    """The model's tokenizer.

    Raises:
        ProbeError: there is none, or transformers cannot read it.
    """
    source = str(flags.get("tokenizer-path") or model)
    directory = Path(model)
    if ("/" in model or directory.exists()) and not model.count("/") == 1 and not directory.is_dir():
        raise ProbeError(f"no model directory {model}: give --model-path the directory of a downloaded model")
    if directory.is_dir() and not (directory / "config.json").is_file():
        raise ProbeError(f"{model} holds no config.json: give --model-path the directory of a Hugging Face model")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=bool(flags.get("trust-remote-code", False)))
    except Exception as error:  # transformers raises many kinds
        raise ProbeError(
            f"the tokenizer of {source} cannot be loaded: {error}. Give --model-path the directory of a downloaded "
            "model that has its tokenizer files, or --tokenizer-path"
        ) from error


# ---- stages ------------------------------------------------------------------------------------------------------


def _run_needles(
    engine: ProbeEngine,
    tokenizer: Any,
    haystack: Any,
    options: ProbeOptions,
    names: Sequence[str],
    progress: ProbeProgress,
) -> list[NeedleResult]:
    longest = longest_length(engine.server.context_tokens, engine.server.pool_tokens)
    if longest < MIN_LENGTH:
        raise ProbeError(
            f"the server takes prompts of {longest} tokens, needles need at least {MIN_LENGTH}: raise --context-length "
            "or --max-total-tokens"
        )
    least = least_length(tokenizer)
    if least > longest:
        raise ProbeError(
            f"the server takes prompts of {longest} tokens, but needles in this model's chat template need at least "
            f"{least}: raise --context-length or --max-total-tokens"
        )
    lengths = options.lengths
    if too_long := [length for length in lengths if length > longest]:
        raise ProbeError(
            f"--length {too_long[0]}: the server takes at most {longest} tokens: give a shorter one, or raise "
            "--context-length or --max-total-tokens"
        )
    if not lengths:
        calibration = min(max(CALIBRATION_TOKENS, least), longest)
        sample = make_trials(tokenizer, haystack, lengths=[calibration], trials=1, seed=options.seed + 1)[0]
        engine.generate(sample.token_ids, NATIVE, 2)  # the first request warms the server up
        begun = time.monotonic()
        engine.generate(sample.token_ids, NATIVE, 2)
        measured = time.monotonic() - begun
        prompts = options.trials * (1 + len(names))
        lengths = (
            choose_length(longest, measured * CALIBRATION_TOKENS / calibration, prompts, options.needle_seconds, least),
        )
        progress.note(
            f"needle prompts of {lengths[0]} tokens ({measured:.1f} s for {calibration}, {prompts} prompts, "
            f"--needle-seconds {options.needle_seconds:g})"
        )
    trials = make_trials(
        tokenizer, haystack, lengths=lengths, depths=options.depths, trials=options.trials, seed=options.seed
    )
    advance = progress.begin("needles", len(trials) * (1 + len(names)))
    return run_trials(engine, trials, names, advance)


def _run_text(
    engine: ProbeEngine,
    tokenizer: Any,
    text: str,
    options: ProbeOptions,
    names: Sequence[str],
    progress: ProbeProgress,
) -> dict[str, GateScores]:
    windows = cut_windows(
        tokenizer,
        text,
        prefix_tokens=options.prefix_tokens,
        continuation_tokens=options.continuation_tokens,
        windows=options.windows,
        page_size=engine.server.geometry.page_size,
        longest=longest_length(engine.server.context_tokens, engine.server.pool_tokens),
    )
    advance = progress.begin("text", len(windows) * (1 + len(names)))
    return run_windows(engine, windows, names, advance)


def _narrow_tiers(config: SpectrumKVConfig) -> tuple[Tier, ...]:
    profile = config.loaded_profile
    table = profile.table(profile.nominal_geometry())
    return tuple(tier for tier in profile.tiers_defined if narrow_precisions(table, [tier]))
