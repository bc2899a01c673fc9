"""The probe's record: what is in a file comes back, an edit shows, a profile is known by what it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from spectrumkv_sglang.config import load_config
from spectrumkv_sglang.launch_config import LaunchConfig, SGLangFlags, write_launch_config
from spectrumkv_sglang.profiles.profile import load_profile
from spectrumkv_sglang.profiles.tier import Tier
from spectrumkv_sglang.verification.fingerprint import ModelFingerprint
from spectrumkv_sglang.verification.record import GateScores, ProbedPolicy, ProbeRecord, ProbeScores, profile_digest

POLICY = ProbedPolicy(
    profile="spectrum",
    profile_digest=profile_digest(load_profile("spectrum")),
    budget=0.4,
    scorer="window",
    scorer_window=32,
    scorer_stride_samples=32,
    sink_tokens=4,
    recent_tokens=64,
)
FIELDS: dict[str, Any] = {
    "verdict": "low_allowed",
    "allowed_tiers": ["low", "high", "mid"],
    "rule": "all needle trials pass",
    "date": "2026-01-02T03:04:05Z",
    "tool_version": "0.2.0",
    "sglang_version": "0.5.20",
    "policy": POLICY,
    "scores": ProbeScores(
        niah_passed=3,
        niah_trials=3,
        control_passed=3,
        gate={"spectrum": GateScores(ppl=12, dppl_pct=float("inf"), kl=1e-7, top1=0.98)},
    ),
    "fingerprint": ModelFingerprint(weights="w", config="c", tokenizer="t", quantization="none", dtype="float32"),
}


def through_a_file(record: ProbeRecord) -> Any:
    return yaml.safe_load(yaml.safe_dump(record.model_dump(mode="json"), sort_keys=True))


def test_a_record_survives_a_file() -> None:
    record = ProbeRecord.sealed(**FIELDS)
    assert record.allowed_tiers == (Tier.HIGH, Tier.MID, Tier.LOW)
    again = ProbeRecord.model_validate(through_a_file(record))
    assert again == record
    assert not again.edited


def every_leaf(content: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(content, dict):
        return [path]
    return [leaf for name, value in content.items() for leaf in every_leaf(value, (*path, name))]


@pytest.mark.parametrize("leaf", every_leaf(ProbeRecord.sealed(**FIELDS).model_dump(mode="json")), ids=".".join)
def test_an_edit_of_any_field_shows(leaf: tuple[str, ...]) -> None:
    content = through_a_file(ProbeRecord.sealed(**FIELDS))
    section = content
    for name in leaf[:-1]:
        section = section[name]
    replacements = {"format": 1, "verdict": "inconclusive", "allowed_tiers": ["high"], "budget": 0.3}
    value = section[leaf[-1]]
    section[leaf[-1]] = replacements.get(leaf[-1], value + 1 if isinstance(value, (int, float)) else f"{value}x")
    if leaf[-1] == "dppl_pct":
        section["dppl_pct"] = 0.0
    assert ProbeRecord.model_validate(content).edited == (leaf != ("format",))


def test_numbers_written_another_way_are_no_edit() -> None:
    content = through_a_file(ProbeRecord.sealed(**FIELDS))
    content["scores"]["gate"]["spectrum"]["ppl"] = 12
    content["policy"]["budget"] = 0.40
    assert not ProbeRecord.model_validate(content).edited


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"format": "1"},
        {"verdict": "maybe"},
        {"allowed_tiers": ["mid"]},
        {"allowed_tiers": "high"},
        {"unknown": 1},
        {"policy": {**POLICY.model_dump(), "budget": 0}},
    ],
)
def test_what_is_no_record_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ProbeRecord.model_validate({**through_a_file(ProbeRecord.sealed(**FIELDS)), **change})


def test_a_profile_is_known_by_its_content(tmp_path: Path) -> None:
    spectrum = load_profile("spectrum")
    same = spectrum.model_copy(update={"name": "mine", "description": "else"})
    assert profile_digest(same) == profile_digest(spectrum)
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\ntiers:\n  low: {values: int4, keys: int4}\n  high: {keys: native, values: native}\n"
        "  mid: {keys: int8, values: int8}\n"
    )
    assert profile_digest(load_profile(path)) == profile_digest(spectrum)
    digests = [profile_digest(load_profile(name)) for name in ("spectrum", "spectrum-safe", "k8v4", "int8", "fp8")]
    path.write_text(path.read_text() + "layer_overrides:\n  - {layers: first, keys: native}\n")
    assert len({*digests, profile_digest(load_profile(path))}) == 6


def test_records_made_before_the_codec_left_the_profile_stay_valid() -> None:
    """This one is as it was computed then, with the profile's field in it."""
    assert profile_digest(load_profile("int8")).endswith(
        ":9b3d7bd29031b1dfe8e4c5073df74b9da8bab55f10864f81c1d366e1439ef517"
    )


@pytest.mark.parametrize(
    ("served", "differences"),
    [
        ({}, []),
        ({"profile": "renamed"}, []),
        ({"budget": 0.9}, []),
        ({"budget": 0.35}, ["budget: probed down to 0.4, served 0.35"]),
        ({"scorer": "uniform"}, ["scorer: probed window, served uniform"]),
        ({"scorer_window": 16}, ["scorer_window: probed 32, served 16"]),
        ({"scorer_stride_samples": 0}, ["scorer_stride_samples: probed 32, served 0"]),
        (
            {"sink_tokens": 0, "recent_tokens": 8},
            ["sink_tokens: probed 4, served 0", "recent_tokens: probed 64, served 8"],
        ),
    ],
)
def test_policies_are_compared_by_what_they_lose(served: dict[str, Any], differences: list[str]) -> None:
    assert POLICY.differences(POLICY.model_copy(update=served)) == differences


def test_another_profile_is_named() -> None:
    other = POLICY.model_copy(update={"profile": "k8v4", "profile_digest": "sha256:1234"})
    [difference] = POLICY.differences(other)
    assert "probed spectrum (sha256:" in difference
    assert "served k8v4 (sha256:1234" in difference


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_scores_of_a_broken_model_survive_the_launch_config(value: float, tmp_path: Path) -> None:
    """JSON and YAML's JSON subset have no such numbers; the file must load all the same, unedited."""
    scores = GateScores(ppl=value, dppl_pct=value, kl=value, top1=0.5)
    fields = {**FIELDS, "scores": ProbeScores(niah_passed=0, niah_trials=3, control_passed=3, gate={"low": scores})}
    record = ProbeRecord.sealed(**fields)
    path = tmp_path / "launch.yaml"
    section = {"probe": record.model_dump(mode="json")}
    write_launch_config(path, LaunchConfig(sglang=SGLangFlags(), spectrumkv=section))
    read = load_config(path, {}).probe
    assert read is not None
    assert not read.edited
    assert str(read.scores.gate["low"].kl) == str(value)
