"""Which tiers a server may use, for every state of the probe's record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.observability.reasons import ProbeState
from spectrumkv_sglang.profiles.tier import Tier
from spectrumkv_sglang.verification.enforcement import TierDecision, UnprovenTiersError
from spectrumkv_sglang.verification.fingerprint import FingerprintError, ModelFingerprint
from spectrumkv_sglang.verification.record import ProbeRecord, ProbeScores

HIGH, MID, LOW = Tier
MODEL = ModelFingerprint(weights="w", config="c", tokenizer="t", quantization="none", dtype="bfloat16")


def record_for(config: SpectrumKVConfig, **changes: Any) -> ProbeRecord:
    fields: dict[str, Any] = {
        "verdict": "low_allowed",
        "allowed_tiers": [HIGH, MID, LOW],
        "rule": "",
        "date": "2026-01-02T03:04:05Z",
        "tool_version": "1",
        "sglang_version": "0.5.20",
        "policy": config.probed_policy(),
        "scores": ProbeScores(niah_passed=3, niah_trials=3, control_passed=3, gate={}),
        "fingerprint": MODEL,
    }
    return ProbeRecord.sealed(**{**fields, **changes})


def probed(record_changes: dict[str, Any] | None = None, /, **settings: Any) -> SpectrumKVConfig:
    """A configuration with a record of its own policy."""
    config = SpectrumKVConfig(**settings)
    return SpectrumKVConfig(**settings, probe=record_for(config, **(record_changes or {})))


def decide(config: SpectrumKVConfig, served: ModelFingerprint = MODEL) -> TierDecision:
    return config.decide_tiers(lambda: served)


def unasked() -> ModelFingerprint:
    raise AssertionError("the model was fingerprinted where nothing depends on it")


@pytest.fixture
def narrow_high(tmp_path: Path) -> str:
    path = tmp_path / "narrow.yaml"
    path.write_text("name: narrow\ntiers:\n  high: {keys: int8, values: int4}\n")
    return str(path)


@pytest.fixture
def narrow_layer(tmp_path: Path) -> str:
    """INT4 hides in an override of the last layer."""
    path = tmp_path / "layer.yaml"
    path.write_text(
        "name: layer\ntiers:\n  high: {keys: native, values: native}\n  mid: {keys: int8, values: int8}\n"
        "layer_overrides:\n  - {layers: last, tiers: [mid], values: int4}\n"
    )
    return str(path)


def test_a_record_of_this_model_and_policy_allows_low() -> None:
    decision = decide(probed())
    assert (decision.allowed_tiers, decision.state, decision.reasons) == ((HIGH, MID, LOW), ProbeState.VERIFIED, ())
    assert not decision.restricted
    decision.require("m", strict=True)


def test_a_larger_budget_than_the_probed_one_is_fine() -> None:
    config = SpectrumKVConfig(budget=0.6, probe=record_for(SpectrumKVConfig(budget=0.4)))
    assert decide(config).state is ProbeState.VERIFIED


def test_the_record_may_allow_fewer_tiers_than_are_configured() -> None:
    decision = decide(probed({"allowed_tiers": [HIGH, LOW]}))
    assert (decision.allowed_tiers, decision.state) == ((HIGH, LOW), ProbeState.VERIFIED)
    decision = decide(probed(allowed_tiers=[HIGH, LOW]))
    assert (decision.allowed_tiers, decision.state) == ((HIGH, LOW), ProbeState.VERIFIED)


@pytest.mark.parametrize("profile", ["native-packed", "int8", "fp8", "spectrum-safe"])
def test_eight_bits_in_high_and_mid_need_no_probe(profile: str) -> None:
    decision = SpectrumKVConfig(profile=profile).decide_tiers(unasked)
    # LOW is not allowed either: on decode, the peer's profile may hold INT4 in it.
    assert (decision.allowed_tiers, decision.state) == ((HIGH, MID), ProbeState.NOT_NEEDED)
    decision.require("m", strict=True)


@pytest.mark.parametrize("profile", ["spectrum", "k8v4", "balanced"])
def test_profiles_with_a_low_tier_need_none_without_it(profile: str) -> None:
    decision = SpectrumKVConfig(profile=profile, allowed_tiers=["high", "mid"]).decide_tiers(unasked)
    assert (decision.allowed_tiers, decision.state) == ((HIGH, MID), ProbeState.NOT_NEEDED)


def test_an_explicit_waiver_uses_what_is_configured(narrow_high: str) -> None:
    for profile in ("spectrum", narrow_high):
        decision = SpectrumKVConfig(profile=profile, require_probe=False).decide_tiers(unasked)
        assert (decision.allowed_tiers, decision.state) == ((HIGH, MID, LOW), ProbeState.WAIVED)
        decision.require("m", strict=False)


def test_without_a_record_low_is_dropped() -> None:
    decision = SpectrumKVConfig().decide_tiers(unasked)
    assert (decision.allowed_tiers, decision.state) == ((HIGH, MID), ProbeState.MISSING)
    assert SpectrumKVConfig(allowed_tiers=["high", "low"]).decide_tiers(unasked).allowed_tiers == (HIGH,)


def test_an_edited_record_is_worth_nothing() -> None:
    config = SpectrumKVConfig()
    edited = record_for(config, verdict="low_not_allowed").model_copy(update={"verdict": "low_allowed"})
    decision = SpectrumKVConfig(probe=edited).decide_tiers(unasked)
    assert (decision.allowed_tiers, decision.state) == ((HIGH, MID), ProbeState.EDITED)


@pytest.mark.parametrize("field", list(ModelFingerprint.model_fields))
def test_another_model_is_named_by_what_differs(field: str) -> None:
    decision = decide(probed(), MODEL.model_copy(update={field: "other"}))
    assert (decision.allowed_tiers, decision.state) == ((HIGH, MID), ProbeState.CHANGED)
    assert decision.reasons == (f"{field}: probed {getattr(MODEL, field)}, served other",)


@pytest.mark.parametrize(
    ("served", "reason"),
    [
        ({"budget": 0.28}, "budget: probed down to 0.3, served 0.28"),
        ({"profile": "k8v4"}, "profile: probed balanced"),
        ({"scorer": "uniform"}, "scorer: probed window, served uniform"),
        ({"scorer_window": 8}, "scorer_window: probed 32, served 8"),
        ({"scorer_stride_samples": 8}, "scorer_stride_samples: probed 32, served 8"),
        ({"sink_tokens": 0}, "sink_tokens: probed 4, served 0"),
        ({"recent_tokens": 0}, "recent_tokens: probed 64, served 0"),
    ],
)
def test_another_policy_is_named_by_what_differs(served: dict[str, Any], reason: str) -> None:
    decision = decide(SpectrumKVConfig(**served, probe=record_for(SpectrumKVConfig())))
    assert (decision.allowed_tiers, decision.state) == ((HIGH, MID), ProbeState.CHANGED)
    [found] = decision.reasons
    assert found.startswith(reason)


def test_a_model_that_cannot_be_fingerprinted_counts_as_changed() -> None:
    def fails() -> ModelFingerprint:
        raise FingerprintError("no weights in /models/x")

    decision = probed().decide_tiers(fails)
    assert decision.state is ProbeState.CHANGED
    assert "no weights in /models/x" in decision.reasons[0]


@pytest.mark.parametrize("verdict", ["low_not_allowed", "inconclusive"])
def test_a_probe_that_did_not_pass_allows_no_low(verdict: str) -> None:
    decision = decide(probed({"verdict": verdict, "allowed_tiers": [HIGH, MID]}))
    assert (decision.allowed_tiers, decision.state) == ((HIGH, MID), ProbeState.NOT_PASSED)
    assert verdict in decision.reasons[0]


def test_a_verdict_and_tiers_that_contradict_each_other_allow_no_low() -> None:
    assert decide(probed({"verdict": "inconclusive"})).state is ProbeState.NOT_PASSED
    assert decide(probed({"allowed_tiers": [HIGH, MID]})).state is ProbeState.NOT_PASSED


def test_strict_refuses_with_the_same_explanation() -> None:
    decision = decide(probed(), MODEL.model_copy(update={"weights": "other"}))
    decision.require("/models/x", strict=False)
    with pytest.raises(UnprovenTiersError) as refused:
        decision.require("/models/x", strict=True)
    explanation = decision.explanation("/models/x")
    assert explanation in str(refused.value)
    for part in (
        "changed",
        "weights: probed w, served other",
        "spectrumkv probe --model-path /models/x",
        "[high, mid]",
    ):
        assert part in explanation


def test_dropping_low_does_not_make_every_profile_safe(narrow_high: str, narrow_layer: str) -> None:
    for profile, tiers in ((narrow_high, "high"), (narrow_layer, "high or mid")):
        decision = SpectrumKVConfig(profile=profile).decide_tiers(unasked)
        assert decision.state is ProbeState.MISSING
        with pytest.raises(
            UnprovenTiersError, match=f"holds INT4 in its {tiers} tier.*spectrumkv probe.*spectrum-safe"
        ):
            decision.require("m", strict=False)
        verified = decide(probed(profile=profile))
        assert (verified.allowed_tiers, verified.state) == ((HIGH, MID, LOW), ProbeState.VERIFIED)
        verified.require("m", strict=True)


def test_a_failed_probe_takes_away_every_tier_that_it_refused() -> None:
    decision = decide(probed({"verdict": "low_not_allowed", "allowed_tiers": [HIGH]}))
    assert (decision.allowed_tiers, decision.state) == ((HIGH,), ProbeState.NOT_PASSED)


def test_what_a_failed_probe_of_int4_in_mid_still_allows_is_served(narrow_layer: str) -> None:
    """Not refused as unsafe: HIGH alone is safe."""
    decision = decide(probed({"verdict": "low_not_allowed", "allowed_tiers": [HIGH]}, profile=narrow_layer))
    assert decision.allowed_tiers == (HIGH,)
    decision.require("m", strict=False)
