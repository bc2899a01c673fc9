"""The rule: from needles and scores on real text to the tiers that a server may use."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.probe import policies
from spectrumkv_sglang.profiles.tier import Tier
from spectrumkv_sglang.verification.record import GateScores, Verdict

_NARROW_HIGH = (
    "use another profile: this one's high tier holds less than 8 bits, so servers refuse to start with it until a "
    "probe allows the low tier"
)
EXIT_CODES: dict[Verdict, int] = {"low_allowed": 0, "low_not_allowed": 10, "inconclusive": 11}


@dataclass(frozen=True)
class Thresholds:
    """Limits of the second gate, for every judged policy against native on the same text.

    Needles are a weak detector (Qwen2.5 still finds them at +29 % perplexity), so text decides as well. KL and top-1
    come first: they are steady on short texts, where perplexity moves by a point or two by chance.
    """

    max_kl: float = SpectrumKVConfig.model_fields["probe_max_kl"].default
    """Mean KL divergence, nats a token."""
    max_dppl_pct: float = SpectrumKVConfig.model_fields["probe_max_dppl_pct"].default
    """Rise of the perplexity, %."""
    min_top1: float = SpectrumKVConfig.model_fields["probe_min_top1"].default
    """Share of equal most likely tokens."""

    def failures(self, scores: GateScores) -> list[str]:
        """What of ``scores`` is beyond a limit; empty: passed. Scores that are not numbers fail."""
        found = []
        if not scores.kl <= self.max_kl:
            found.append(f"KL {scores.kl:.3f} above {self.max_kl:g}")
        if not scores.dppl_pct <= self.max_dppl_pct:
            found.append(f"perplexity {scores.dppl_pct:+.1f} % above +{self.max_dppl_pct:g} %")
        if not scores.top1 >= self.min_top1:
            found.append(f"top-1 agreement {scores.top1:.2f} below {self.min_top1:g}")
        return found

    @property
    def text(self) -> str:
        """The limits for people."""
        return f"KL <= {self.max_kl:g}, perplexity <= +{self.max_dppl_pct:g} %, top-1 >= {self.min_top1:g}"


@dataclass(frozen=True)
class NeedleCount:
    """Trials passed of all trials, by policy; ``native`` is the control."""

    trials: int
    passed: Mapping[str, int]


@dataclass(frozen=True)
class Decision:
    """``reasons`` say for people why it is not the better verdict; ``advice`` what to do."""

    verdict: Verdict
    allowed_tiers: tuple[Tier, ...]
    rule: str
    reasons: tuple[str, ...]
    advice: tuple[str, ...]


def decide(
    usable: tuple[Tier, ...],
    needles: NeedleCount,
    scores: Mapping[str, GateScores],
    thresholds: Thresholds,
    narrow: Collection[Tier] = (),
) -> Decision:
    """Apply the rule.

    Args:
        usable: tiers of the probed profile, HIGH first.
        needles: counts for ``native`` and every tiered policy that had to find needles.
        scores: of every judged policy.
        thresholds: the second gate.
        narrow: tiers that hold precisions under 8 bits. Servers use those, too, only where the low tier is allowed.
    """
    tiered = [name for name in needles.passed if name != "native"]
    rule = (
        f"low: {needles.trials}/{needles.trials} needles natively and with {' and '.join(tiered)}, and on text with "
        f"policy and low {thresholds.text}; mid: the same limits on text with mid; otherwise without that tier"
    )
    safe, reasons = _without_low(usable, scores, thresholds)
    safe = tuple(tier for tier in safe if tier is Tier.HIGH or tier not in narrow)
    no_start = (_NARROW_HIGH,) if Tier.HIGH in narrow else ()
    control = needles.passed["native"]
    if control < needles.trials:
        return Decision(
            "inconclusive",
            safe,
            rule,
            (f"the model itself found {control} of {needles.trials} needles without any loss", *reasons),
            (
                "probe with shorter haystacks (--length 1024), or with a bigger or better instruct model",
                "until then the low tier stays off",
                *no_start,
            ),
        )
    reasons += [
        f"{name}: found {needles.passed[name]} of {needles.trials} needles"
        for name in tiered
        if needles.passed[name] < needles.trials
    ]
    for name in (policies.POLICY, policies.HIGH, policies.LOW):
        if name in scores and (failed := thresholds.failures(scores[name])):
            reasons.append(f"{name}: {', '.join(failed)}")
    if Tier.LOW not in usable:
        return Decision("low_not_allowed", safe, rule, (*reasons, "the profile has no low tier"), no_start)
    if reasons:
        return Decision("low_not_allowed", safe, rule, tuple(reasons), (*_advice(scores, thresholds), *no_start))
    return Decision("low_allowed", usable, rule, (), ())


def _without_low(
    usable: tuple[Tier, ...], scores: Mapping[str, GateScores], thresholds: Thresholds
) -> tuple[tuple[Tier, ...], list[str]]:
    safe = tuple(tier for tier in usable if tier is not Tier.LOW)
    if policies.MID in scores and (failed := thresholds.failures(scores[policies.MID])):
        return (Tier.HIGH,), [f"mid: {', '.join(failed)}"]
    return safe, []


def _advice(scores: Mapping[str, GateScores], thresholds: Thresholds) -> tuple[str, ...]:
    values = scores.get(policies.LOW_VALUES)
    keys = scores.get(policies.LOW_KEYS)
    if keys is not None and values is not None and thresholds.failures(keys) and not thresholds.failures(values):
        return (
            "the loss comes from the keys, low-precision values alone pass: probe again with --profile balanced (INT4 "
            "keys with a scale per channel), or k8v4",
        )
    return ("serve with the tiers that are allowed, or probe with a profile whose low tier keeps more bits",)
