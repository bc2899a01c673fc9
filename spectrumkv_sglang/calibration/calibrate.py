"""What ``spectrumkv calibrate`` does with its options: checks before any work, measures, allocates, checks, writes."""

from __future__ import annotations

import tempfile
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console

from spectrumkv_sglang.calibration.allocated_profile import make_profile, profile_yaml
from spectrumkv_sglang.calibration.allocation import (
    Allocation,
    NominalChunk,
    allocate,
    expected_of,
    require_reachable,
)
from spectrumkv_sglang.calibration.candidates import PART_NAMES
from spectrumkv_sglang.calibration.expected_cost import ExpectedCost, Granularity
from spectrumkv_sglang.calibration.head_cost import HeadCost
from spectrumkv_sglang.calibration.held_out import HeldOutCheck, check_held_out, contenders, held_out_work
from spectrumkv_sglang.calibration.measurement import MeasurementPlan, measure, measurement_work
from spectrumkv_sglang.calibration.preparation import CalibrationCommand, Prepared, prepare
from spectrumkv_sglang.calibration.report import print_allocation, print_check, print_sensitivity
from spectrumkv_sglang.calibration.result import CALIBRATION_FORMAT, CalibrationResult, encode_calibration
from spectrumkv_sglang.calibration.sensitivity import (
    SENSITIVITY_FORMAT,
    MeasuredOn,
    Sensitivity,
    encode_sensitivity,
)
from spectrumkv_sglang.evaluation.model import EvalModel
from spectrumkv_sglang.evaluation.progress import RunProgress
from spectrumkv_sglang.launch_config import replace_file
from spectrumkv_sglang.profiles.profile import Profile
from spectrumkv_sglang.profiles.tier import Tier
from spectrumkv_sglang.verification.fingerprint import fingerprint_model

SINK_TOKENS = 4
"""First tokens that stay native, as a server's default keeps them."""


def calibrate(command: CalibrationCommand, console: Console) -> CalibrationResult:
    """Run the command.

    Raises:
        SpectrumKVError: no profile; a new measurement may have been saved.
    """
    prepared = prepare(command)
    if command.threads is not None:
        torch.set_num_threads(command.threads)
    progress = RunProgress(console)
    try:
        progress.note(f"loading {command.model_path.name} ({prepared.dtype} on {command.device})")
        model = EvalModel(prepared.files, command.device, prepared.dtype, prepared.kv_dtype)
        sensitivity = prepared.known or _measure(model, prepared, command, progress)
        chunk = NominalChunk(sensitivity.geometry, command.chunk_tokens, SINK_TOKENS)
        granularity = Granularity.HEADS if command.heads and sensitivity.geometry.kv_heads > 1 else Granularity.LAYERS
        if command.heads and granularity is not Granularity.HEADS:
            progress.note("one KV head a layer: --heads changes nothing")
        expected = ExpectedCost(sensitivity, prepared.candidates, granularity)
        allocation = allocate(expected, prepared.candidates, chunk, command.budget)
        check = _check(model, prepared, command, sensitivity, chunk, allocation, progress)
    finally:
        progress.close()
    profile = make_profile(allocation, _name(command.out), _description(command), command.budget)
    result = CalibrationResult(
        format=CALIBRATION_FORMAT,
        model=str(command.model_path),
        profile=str(command.out),
        budget=command.budget,
        chunk_tokens=command.chunk_tokens,
        wire_ratio=allocation.wire_ratio,
        expected_kl=_expected_by_tier(profile, allocation, expected),
        granularity=allocation.granularity.value,
        additivity={name: sensitivity.of(kv).additivity() for kv, name in enumerate(PART_NAMES)},
        held_out=check,
    )
    print_sensitivity(sensitivity, console)
    print_allocation(allocation, console)
    if check is not None:
        print_check(check, console)
    replace_file(command.out, profile_yaml(profile, _comments(profile, result, sensitivity)).encode())
    if command.json is not None:
        replace_file(command.json, encode_calibration(result))
    console.print(f"written: {command.out}{f', {command.json}' if command.json else ''}", highlight=False)
    return result


def _measure(model: EvalModel, prepared: Prepared, command: CalibrationCommand, progress: RunProgress) -> Sensitivity:
    geometry = model.prefill("geometry", prepared.measured[0].prefix(command.prefix_tokens)[:8], {}).prefix.geometry
    prepared.candidates.check_geometry(geometry)
    require_reachable(prepared.candidates, NominalChunk(geometry, command.chunk_tokens, SINK_TOKENS), command.budget)
    plan = MeasurementPlan(
        prepared.candidates, geometry.layers, geometry.kv_heads, command.heads if geometry.kv_heads > 1 else None
    )
    progress.expect(measurement_work(prepared.measured, command.prefix_tokens, plan))
    progress.phase("measuring")
    keys, values = measure(model, prepared.measured, command.prefix_tokens, plan, SINK_TOKENS, progress.advance)
    fingerprint = fingerprint_model(command.model_path, quantization=None, dtype=prepared.kv_dtype)
    sensitivity = Sensitivity(
        format=SENSITIVITY_FORMAT,
        model=command.model_path.name,
        fingerprint=fingerprint.model_dump(),
        geometry=geometry,
        measured_on=MeasuredOn(
            text=str(command.text),
            text_sha256=prepared.text_sha256,
            windows=[window.name for window in prepared.measured],
            prefix_tokens=command.prefix_tokens,
            continuation_tokens=command.continuation_tokens,
            seed=command.seed,
            sink_tokens=SINK_TOKENS,
        ),
        keys=keys,
        values=values,
        versions={package: version(package) for package in ("torch", "transformers")},
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        head_cost=command.heads or HeadCost.MEASURED,
    )
    if command.sensitivity is not None:
        replace_file(command.sensitivity, encode_sensitivity(sensitivity))
        progress.note(f"measurement saved: {command.sensitivity}")
    return sensitivity


def _check(
    model: EvalModel,
    prepared: Prepared,
    command: CalibrationCommand,
    sensitivity: Sensitivity,
    chunk: NominalChunk,
    allocation: Allocation,
    progress: RunProgress,
) -> HeldOutCheck | None:
    if not prepared.held_out:
        return None
    found = contenders(sensitivity, prepared.candidates, chunk, allocation, command.budget)
    progress.expect(held_out_work(prepared.held_out, command.prefix_tokens, found))
    progress.phase("checking")
    with tempfile.TemporaryDirectory(prefix="spectrumkv-calibrate-") as folder:
        return check_held_out(
            model,
            prepared.held_out,
            command.prefix_tokens,
            found,
            chunk,
            command.budget,
            command.seed,
            Path(folder),
            progress.advance,
        )


def _expected_by_tier(profile: Profile, allocation: Allocation, expected: ExpectedCost) -> dict[str, float]:
    maps = {Tier.MID: allocation.stepped_up(), Tier.LOW: allocation.cells}
    return {
        tier.label: float(expected_of(maps[tier], expected, allocation.candidates).sum()) if tier in maps else 0.0
        for tier in profile.tiers_defined
    }


def _name(out: Path) -> str:
    name = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in out.stem)
    return name if name[:1].isalnum() else f"calibrated{name}"


def _description(command: CalibrationCommand) -> str:
    return f"Calibrated for {command.model_path.name}: least KL at b {command.budget:g}"


def _comments(profile: Profile, result: CalibrationResult, sensitivity: Sensitivity) -> list[str]:
    on = sensitivity.measured_on
    tiers = ", ".join(f"{tier} {kl:.5f}" for tier, kl in result.expected_kl.items())
    comments = [
        f"Made by spectrumkv calibrate for {sensitivity.model} (weights {sensitivity.fingerprint['weights'][:19]}...):",
        f"prefixes of {on.prefix_tokens:,} tokens, windows {', '.join(on.windows)} of {Path(on.text).name}.",
        "Another model needs a profile of its own.",
        f"b {result.wire_ratio:.4f} for chunks of {result.chunk_tokens:,} tokens; KL expected with every token in one",
        f"tier: {tiers} nats.",
    ]
    if profile.head_overrides:
        comments.append(
            "Its heads are counted on one rank that holds them all: for servers without tensor parallelism."
        )
    return comments
