"""The rule: which scores lead to which tiers."""

import math

import pytest

from spectrumkv_sglang.probe.gate import EXIT_CODES, NeedleCount, Thresholds, decide
from spectrumkv_sglang.profiles.tier import Tier
from spectrumkv_sglang.verification.record import GateScores

ALL = (Tier.HIGH, Tier.MID, Tier.LOW)
GOOD = GateScores(ppl=10.0, dppl_pct=0.4, kl=0.004, top1=0.97)
NATIVE = GateScores(ppl=10.0, dppl_pct=0.0, kl=0.0, top1=1.0)


def _needles(native: int = 3, policy: int = 3, low: int = 3) -> NeedleCount:
    return NeedleCount(3, {"native": native, "policy": policy, "low": low})


def _scores(**changed: GateScores) -> dict[str, GateScores]:
    names = ("policy", "mid", "low", "low_keys", "low_values")
    return {"native": NATIVE, **dict.fromkeys(names, GOOD), **changed}


def _bad(**fields: float) -> GateScores:
    return GOOD.model_copy(update=fields)


def test_all_needles_and_scores_within_limits_allow_the_low_tier() -> None:
    decision = decide(ALL, _needles(), _scores(), Thresholds())
    assert decision.verdict == "low_allowed"
    assert decision.allowed_tiers == ALL
    assert decision.reasons == ()
    assert EXIT_CODES[decision.verdict] == 0


@pytest.mark.parametrize("lost", [{"policy": 2}, {"low": 0}, {"policy": 2, "low": 1}])
def test_one_lost_needle_refuses_it(lost: dict[str, int]) -> None:
    decision = decide(ALL, _needles(**lost), _scores(), Thresholds())
    assert decision.verdict == "low_not_allowed"
    assert decision.allowed_tiers == (Tier.HIGH, Tier.MID)
    for name, found in lost.items():
        assert f"{name}: found {found} of 3 needles" in decision.reasons
    assert EXIT_CODES[decision.verdict] == 10


@pytest.mark.parametrize("policy", ["policy", "low"])
@pytest.mark.parametrize(
    "fields", [{"kl": 0.0301}, {"dppl_pct": 5.01}, {"top1": 0.899}, {"kl": math.nan}, {"dppl_pct": math.inf}]
)
def test_needles_alone_are_not_enough(policy: str, fields: dict[str, float]) -> None:
    decision = decide(ALL, _needles(), _scores(**{policy: _bad(**fields)}), Thresholds())
    assert decision.verdict == "low_not_allowed"
    assert decision.allowed_tiers == (Tier.HIGH, Tier.MID)
    assert decision.reasons[0].startswith(f"{policy}: ")


def test_limits_are_the_callers() -> None:
    scores = _scores(low=_bad(kl=0.2))
    assert decide(ALL, _needles(), scores, Thresholds(max_kl=0.5)).verdict == "low_allowed"
    assert decide(ALL, _needles(), scores, Thresholds(max_kl=0.1)).verdict == "low_not_allowed"


def test_a_failing_control_is_inconclusive_whatever_the_tiers_did() -> None:
    decision = decide(ALL, _needles(native=2), _scores(), Thresholds())
    assert decision.verdict == "inconclusive"
    assert Tier.LOW not in decision.allowed_tiers
    assert any("--length" in advice for advice in decision.advice)
    assert EXIT_CODES[decision.verdict] == 11


def test_a_model_that_does_not_bear_the_mid_tier_keeps_high_only() -> None:
    broken = _bad(kl=2.0, dppl_pct=2000.0, top1=0.1)
    decision = decide(ALL, _needles(policy=0, low=0), _scores(mid=broken, low=broken, policy=broken), Thresholds())
    assert decision.allowed_tiers == (Tier.HIGH,)
    assert decision.reasons[0].startswith("mid: KL 2.000")


def test_keys_that_lose_alone_lead_to_the_advice_of_k8v4() -> None:
    decision = decide(ALL, _needles(), _scores(low=_bad(kl=0.3), low_keys=_bad(kl=0.3)), Thresholds())
    assert any("k8v4" in advice for advice in decision.advice)
    both = _scores(low=_bad(kl=0.3), low_keys=_bad(kl=0.3), low_values=_bad(kl=0.3))
    assert not any("k8v4" in advice for advice in decide(ALL, _needles(), both, Thresholds()).advice)


def test_a_profile_without_a_low_tier_never_gets_one() -> None:
    scores = {"native": NATIVE, "policy": GOOD, "high": GOOD}
    decision = decide((Tier.HIGH,), NeedleCount(3, {"native": 3, "policy": 3}), scores, Thresholds())
    assert decision.verdict == "low_not_allowed"
    assert decision.allowed_tiers == (Tier.HIGH,)


def test_a_tier_under_8_bits_goes_with_the_low_tier() -> None:
    """Servers use it only with a passed probe: a launch config with it would be one that no server starts with."""
    decision = decide(ALL, _needles(low=0), _scores(), Thresholds(), narrow=(Tier.MID, Tier.LOW))
    assert decision.allowed_tiers == (Tier.HIGH,)
    assert decide(ALL, _needles(), _scores(), Thresholds(), narrow=(Tier.MID, Tier.LOW)).allowed_tiers == ALL
    stuck = decide(ALL, _needles(low=0), _scores(), Thresholds(), narrow=ALL)
    assert any("servers refuse to start" in advice for advice in stuck.advice)
