"""Runs a probe from start to launch config: one server, needles, text, the rule, the files."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.launch.servers import Device, detect_device
from spectrumkv_sglang.launch.sglang_versions import installed_version
from spectrumkv_sglang.launch_config import LaunchConfig, SGLangFlags
from spectrumkv_sglang.launch_flags import Flags
from spectrumkv_sglang.loopback.plan import NATIVE, ServerRecord
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.probe import policies
from spectrumkv_sglang.probe.engine import ProbeEngine
from spectrumkv_sglang.probe.errors import ProbeError
from spectrumkv_sglang.probe.gate import EXIT_CODES, Decision, Thresholds, decide
from spectrumkv_sglang.probe.haystack import load_haystack
from spectrumkv_sglang.probe.needle_runs import (
    CALIBRATION_TOKENS,
    MIN_LENGTH,
    NeedleResult,
    choose_length,
    count,
    longest_length,
    run_trials,
)
from spectrumkv_sglang.probe.needles import DEFAULT_DEPTHS, DEFAULT_TRIALS, least_length, make_trials
from spectrumkv_sglang.probe.result import RESULT_FORMAT, Control, Memory, Needles, ProbeResult, Seconds
from spectrumkv_sglang.probe.server_flags import decode_flags, probe_server_flags, with_cpu_defaults
from spectrumkv_sglang.probe.text_runs import CONTINUATION_TOKENS, PREFIX_TOKENS, WINDOWS, cut_windows, run_windows
from spectrumkv_sglang.probe.texts import load_judged_text
from spectrumkv_sglang.profiles.profile import is_profile_path
from spectrumkv_sglang.profiles.tier import Tier
from spectrumkv_sglang.sglang_compat import ServedModel
from spectrumkv_sglang.verification.fingerprint import ModelFingerprint, fingerprint_model
from spectrumkv_sglang.verification.narrow_precisions import narrow_precisions
from spectrumkv_sglang.verification.record import GateScores, ProbeRecord, ProbeScores
from spectrumkv_sglang.version import __version__

_NEEDLE_POLICIES = (policies.POLICY, policies.LOW)
# Of the launch config's section: what the probe writes itself, or does away with.
_WRITTEN_FIELDS = {"profile", "budget", "allowed_tiers", "probe", "require_probe"}


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """What a probe is asked to do.

    Attributes:
        model: directory or hub id.
        config: the SpectrumKV configuration that would serve; its allowed tiers are those to be judged.
        explicit_budget: whether the operator chose the budget.
        flags: SGLang's flags, as the operator gave them.
        backend: value of ``--disaggregation-transfer-backend`` in the launch config.
        lengths: of needle prompts, tokens; empty: chosen by ``needle_seconds``.
        needle_seconds: wall time that all needle prompts may take together, as far as the shortest length allows.
        request_seconds: longest that one request may take.
        log_path: where the server's log is copied when it fails.
    """

    model: str
    config: SpectrumKVConfig
    explicit_budget: bool
    flags: Flags
    backend: str
    trials: int = DEFAULT_TRIALS
    depths: tuple[float, ...] = DEFAULT_DEPTHS
    lengths: tuple[int, ...] = ()
    haystack: Path | None = None
    text: Path | None = None
    prefix_tokens: int = PREFIX_TOKENS
    continuation_tokens: int = CONTINUATION_TOKENS
    windows: int = WINDOWS
    seed: int = 0
    needle_seconds: float = 45.0
    request_seconds: float = 600.0
    thresholds: Thresholds = field(default_factory=Thresholds)
    log_path: Path


class ProbeProgress:
    """Where the probe says how far it is; this one says nothing."""

    def note(self, text: str) -> None:
        """One line for people."""

    def begin(self, name: str, steps: int) -> Callable[[], None]:
        """A stage of ``steps`` steps begins; returns what to call after each."""
        return lambda: None


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
    before = _fingerprint_on_disk(options)
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
    ) as engine:
        progress.note(f"ready after {engine.load_seconds:.0f} s")
        fingerprint = _fingerprint(engine.server)
        _require_unchanged(before, fingerprint)
        geometry = engine.server.geometry
        names = policies.write_policies(options.config, geometry, engine.policies)
        progress.note(f"KV pool: {geometry.dtype}, {engine.server.pool_tokens} tokens, page {geometry.page_size}")
        needle_started = time.monotonic()
        needle_names = [name for name in _NEEDLE_POLICIES if name in names]
        results = _run_needles(engine, tokenizer, haystack, options, needle_names, progress)
        text_started = time.monotonic()
        scores = _run_text(engine, tokenizer, text, options, names, progress)
        ended = time.monotonic()
        memory = Memory(loaded=engine.load_bytes, peak=engine.peak_bytes)
        command = list(engine.command)
        load_seconds = engine.load_seconds
    decision = decide(
        options.config.loaded_profile.usable_tiers(options.config.allowed_tiers),
        count(results),
        scores,
        options.thresholds,
        _narrow_tiers(options.config),
    )
    record = _record(options, decision, results, scores, fingerprint)
    launch = _launch_config(options, flags, record)
    seconds = Seconds(
        load=load_seconds,
        needles=text_started - needle_started,
        text=ended - text_started,
        total=time.monotonic() - started,
    )
    result = _result(options, decision, record, results, scores, geometry, seconds, memory, command, launch)
    return result, launch, EXIT_CODES[decision.verdict]


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


# ---- results -----------------------------------------------------------------------------------------------------


def _fingerprint(server: ServerRecord) -> ModelFingerprint:
    if server.fingerprint is None:
        raise ProbeError(f"the model cannot be told from others: {server.fingerprint_error}")
    return ModelFingerprint(**server.fingerprint)


def _fingerprint_on_disk(options: ProbeOptions) -> ModelFingerprint | None:
    """Of the model before it is loaded; None where it is not on this machine yet."""
    revision, folder = options.flags.get("revision"), options.flags.get("download-dir")
    local = ServedModel(
        path=options.model,
        quantization=None,
        revision=str(revision) if revision else None,
        download_dir=str(folder) if folder else None,
    ).local_path()
    return fingerprint_model(local, quantization=None, dtype="") if local is not None else None


def _require_unchanged(before: ModelFingerprint | None, loaded: ModelFingerprint) -> None:
    """Refuse a model whose files were replaced while it was loaded: nobody could say which one was probed."""
    if before is None:
        return
    same_settings = before.model_copy(update={"quantization": loaded.quantization, "dtype": loaded.dtype})
    if changed := same_settings.differences(loaded):
        fields = ", ".join(text.partition(":")[0] for text in changed)
        raise ProbeError(
            f"the model's files changed while it was loaded ({fields}): probe again once they are complete"
        )


def _narrow_tiers(config: SpectrumKVConfig) -> tuple[Tier, ...]:
    profile = config.loaded_profile
    table = profile.table(profile.nominal_geometry())
    return tuple(tier for tier in profile.tiers_defined if narrow_precisions(table, [tier]))


def _tiered_passes(results: Sequence[NeedleResult]) -> int:
    return sum(all(answer.passed for name, answer in result.answers.items() if name != NATIVE) for result in results)


def _record(
    options: ProbeOptions,
    decision: Decision,
    results: Sequence[NeedleResult],
    scores: dict[str, GateScores],
    fingerprint: ModelFingerprint,
) -> ProbeRecord:
    counted = count(results)
    # Every token in the low tier was judged as well, so every budget of this profile is covered.
    least = math.ceil(options.config.reachable_budget * 1000 - 1e-9) / 1000
    policy = options.config.probed_policy().model_copy(update={"budget": min(options.config.budget, least)})
    return ProbeRecord.sealed(
        verdict=decision.verdict,
        allowed_tiers=decision.allowed_tiers,
        rule=decision.rule,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        tool_version=__version__,
        sglang_version=installed_version(),
        policy=policy,
        scores=ProbeScores(
            niah_passed=_tiered_passes(results),
            niah_trials=counted.trials,
            control_passed=counted.passed[NATIVE],
            gate={name: _rounded(score) for name, score in scores.items()},
        ),
        fingerprint=fingerprint,
    )


def _rounded(scores: GateScores) -> GateScores:
    return GateScores(**{name: float(f"{value:.6g}") for name, value in scores.model_dump().items()})


def _launch_config(options: ProbeOptions, flags: Flags, record: ProbeRecord) -> LaunchConfig:
    local = Path(options.model)
    model = str(local.resolve()) if local.exists() else options.model
    profile = options.config.profile
    section: dict[str, Any] = {
        "profile": str(Path(profile).resolve()) if is_profile_path(profile) else profile,
        "budget": options.config.budget,
        "allowed_tiers": [tier.label for tier in record.allowed_tiers],
        **_kept_fields(options.config),
        "probe": record.model_dump(mode="json"),
    }
    if not options.explicit_budget or _least(options.config, record.allowed_tiers) > options.config.budget:
        # Left out, it is the default or the least that the allowed tiers reach.
        del section["budget"]
    return LaunchConfig(
        backend=options.backend,  # type: ignore[arg-type]  # checked by pydantic
        sglang=SGLangFlags(
            common={"model-path": model, **flags}, prefill={}, decode=decode_flags(flags, installed_version())
        ),
        spectrumkv=section,
    )


def _kept_fields(config: SpectrumKVConfig) -> dict[str, Any]:
    """Fields that the operator chose, so that the file serves what was judged, as strictly as before. Not
    ``require_probe``: this is the probe that it was to do without."""
    chosen = config.model_dump(mode="json", include=config.model_fields_set - _WRITTEN_FIELDS)
    return {name: value for name, value in chosen.items() if value != type(config).model_fields[name].default}


def _least(config: SpectrumKVConfig, tiers: tuple[Tier, ...]) -> float:
    return config.restricted_to(tiers).reachable_budget


def _result(
    options: ProbeOptions,
    decision: Decision,
    record: ProbeRecord,
    results: list[NeedleResult],
    scores: dict[str, GateScores],
    geometry: KVGeometry,
    seconds: Seconds,
    memory: Memory,
    command: list[str],
    launch: LaunchConfig,
) -> ProbeResult:
    counted = count(results)
    return ProbeResult(
        format=RESULT_FORMAT,
        model=options.model,
        allowed_tiers=[tier.label for tier in decision.allowed_tiers],
        verdict=decision.verdict,
        niah=Needles(_tiered_passes(results), counted.trials, dict(counted.passed), results),
        control=Control(counted.passed[NATIVE], counted.trials),
        ppl={name: score.ppl for name, score in scores.items()},
        dppl_pct={name: score.dppl_pct for name, score in scores.items()},
        kl={name: score.kl for name, score in scores.items()},
        top1={name: score.top1 for name, score in scores.items()},
        thresholds=asdict(options.thresholds),
        rule=decision.rule,
        reasons=list(decision.reasons),
        advice=list(decision.advice),
        fingerprint=record.fingerprint.model_dump(),
        profile=options.config.profile,
        budget=policies.probe_budget(options.config, geometry),
        seconds=seconds,
        memory=memory,
        date=record.date,
        versions={"spectrumkv": __version__, "sglang": installed_version()},
        sglang_command=command,
        launch=launch.model_dump(mode="json"),
    )
