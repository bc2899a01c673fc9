"""From what a probe measured to its record, its launch config and its result."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.launch.sglang_versions import installed_version
from spectrumkv_sglang.launch_config import LaunchConfig, SGLangFlags
from spectrumkv_sglang.launch_flags import Flags
from spectrumkv_sglang.loopback.plan import NATIVE
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.probe import policies
from spectrumkv_sglang.probe.gate import Decision
from spectrumkv_sglang.probe.needle_runs import NeedleResult, count
from spectrumkv_sglang.probe.options import ProbeOptions
from spectrumkv_sglang.probe.result import RESULT_FORMAT, Control, Memory, Needles, ProbeResult, Seconds
from spectrumkv_sglang.probe.server_flags import decode_flags
from spectrumkv_sglang.profiles.profile import is_profile_path
from spectrumkv_sglang.profiles.tier import Tier
from spectrumkv_sglang.verification.fingerprint import ModelFingerprint
from spectrumkv_sglang.verification.record import GateScores, ProbeRecord, ProbeScores
from spectrumkv_sglang.version import __version__

# Of the launch config's section: what the probe writes itself, or does away with.
_WRITTEN_FIELDS = {"profile", "budget", "allowed_tiers", "probe", "require_probe"}


@dataclass(frozen=True)
class Measured:
    """What the probe's server answered, and what it took: its command line, wall time and memory."""

    fingerprint: ModelFingerprint
    geometry: KVGeometry
    needles: list[NeedleResult]
    scores: dict[str, GateScores]
    command: list[str]
    seconds: Seconds
    memory: Memory


def make_record(options: ProbeOptions, decision: Decision, measured: Measured) -> ProbeRecord:
    """The sealed record that servers compare themselves with."""
    counted = count(measured.needles)
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
            niah_passed=_tiered_passes(measured.needles),
            niah_trials=counted.trials,
            control_passed=counted.passed[NATIVE],
            gate={name: _rounded(score) for name, score in measured.scores.items()},
        ),
        fingerprint=measured.fingerprint,
    )


def _rounded(scores: GateScores) -> GateScores:
    return GateScores(**{name: float(f"{value:.6g}") for name, value in scores.model_dump().items()})


def make_launch_config(options: ProbeOptions, flags: Flags, record: ProbeRecord) -> LaunchConfig:
    """The launch config with the servers' ``flags`` and the tiers that ``record`` allows."""
    local = Path(options.model)
    model = str(local.resolve()) if local.exists() else options.model
    profile = options.config.profile
    section: dict[str, Any] = {
        "profile": str(Path(profile).resolve()) if is_profile_path(profile) else profile,
        "budget": options.config.budget,
        "allowed_tiers": [tier.label for tier in record.allowed_tiers],
        **kept_fields(options.config),
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


def kept_fields(config: SpectrumKVConfig) -> dict[str, Any]:
    """Fields that the operator chose, so that the file serves what was judged, as strictly as before. Not
    ``require_probe``: this is the probe that it was to do without."""
    chosen = config.model_dump(mode="json", include=config.model_fields_set - _WRITTEN_FIELDS)
    return {name: value for name, value in chosen.items() if value != type(config).model_fields[name].default}


def _least(config: SpectrumKVConfig, tiers: tuple[Tier, ...]) -> float:
    return config.restricted_to(tiers).reachable_budget


def make_result(
    options: ProbeOptions, decision: Decision, measured: Measured, record: ProbeRecord, launch: LaunchConfig
) -> ProbeResult:
    """Everything for the result file."""
    counted = count(measured.needles)
    scores = measured.scores
    return ProbeResult(
        format=RESULT_FORMAT,
        model=options.model,
        allowed_tiers=[tier.label for tier in decision.allowed_tiers],
        verdict=decision.verdict,
        niah=Needles(_tiered_passes(measured.needles), counted.trials, dict(counted.passed), measured.needles),
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
        budget=policies.probe_budget(options.config, measured.geometry),
        seconds=measured.seconds,
        memory=measured.memory,
        date=record.date,
        versions={"spectrumkv": __version__, "sglang": installed_version()},
        sglang_command=measured.command,
        launch=launch.model_dump(mode="json"),
    )


def _tiered_passes(results: Sequence[NeedleResult]) -> int:
    return sum(all(answer.passed for name, answer in result.answers.items() if name != NATIVE) for result in results)
