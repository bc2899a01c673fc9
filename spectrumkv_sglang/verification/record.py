"""What the probe measured and decided, as it stands in a launch config."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, field_validator

from spectrumkv_sglang.profiles.profile import Profile
from spectrumkv_sglang.profiles.tier import Tier, require_high
from spectrumkv_sglang.verification.fingerprint import ModelFingerprint

RECORD_FORMAT = 1

Verdict = Literal["low_allowed", "low_not_allowed", "inconclusive"]


def _tiers_from_labels(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        raise ValueError("expected a list of tiers such as [high, mid, low]")
    return tuple(sorted({item if isinstance(item, Tier) else Tier.from_label(str(item)) for item in value}))


def _labels(tiers: tuple[Tier, ...]) -> list[str]:
    return [tier.label for tier in tiers]


ProbedTiers = Annotated[tuple[Tier, ...], BeforeValidator(_tiers_from_labels), PlainSerializer(_labels)]
"""Tiers, HIGH first; a list of labels in files."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ProbedPolicy(_Strict):
    """The settings that decide what is lost: what was probed must be what is served.

    ``budget`` is the smallest b that was judged; a larger one loses less. ``profile`` is a name for people, the digest
    is what counts. ``sink_tokens`` and ``recent_tokens`` in tokens, ``scorer_*`` in queries.
    """

    profile: str
    profile_digest: str
    budget: Annotated[float, Field(gt=0, le=1)]
    scorer: str
    scorer_window: Annotated[int, Field(ge=0)]
    scorer_stride_samples: Annotated[int, Field(ge=0)]
    sink_tokens: Annotated[int, Field(ge=0)]
    recent_tokens: Annotated[int, Field(ge=0)]

    def differences(self, served: ProbedPolicy) -> list[str]:
        """What ``served`` has different from this, the probed policy; one readable text a field."""
        found = []
        if served.profile_digest != self.profile_digest:
            found.append(f"profile: probed {_named(self)}, served {_named(served)}")
        if served.budget < self.budget - 1e-9:
            found.append(f"budget: probed down to {self.budget:g}, served {served.budget:g}")
        found += [
            f"{name}: probed {getattr(self, name)}, served {getattr(served, name)}"
            for name in ("scorer", "scorer_window", "scorer_stride_samples", "sink_tokens", "recent_tokens")
            if getattr(self, name) != getattr(served, name)
        ]
        return found


def _score_for_file(value: float) -> float | str:
    """JSON has no nan and inf: they are kept as texts, which are read as numbers again."""
    return value if math.isfinite(value) else str(value)


Score = Annotated[float, PlainSerializer(_score_for_file, when_used="json")]


class GateScores(_Strict):
    """Teacher-forced scores of one policy on real text: perplexity, its change over native in %, mean KL divergence to
    native in nats, share of equal most likely tokens (0 to 1). A broken model or precision gives nan or inf."""

    ppl: Score
    dppl_pct: Score
    kl: Score
    top1: Score


class ProbeScores(_Strict):
    """Needle trials passed with the tiered policy and natively (``control_passed``), and the gate by policy name."""

    niah_passed: Annotated[int, Field(ge=0)]
    niah_trials: Annotated[int, Field(ge=0)]
    control_passed: Annotated[int, Field(ge=0)]
    gate: dict[str, GateScores]


class ProbeRecord(_Strict):
    """One probe's result. ``seal`` is a checksum over all other fields: it shows an edit, it is no signature.

    Attributes:
        rule: the rule that led from the scores to the verdict, for people.
        date: ISO 8601, UTC.
    """

    format: int = RECORD_FORMAT
    verdict: Verdict
    allowed_tiers: ProbedTiers
    rule: str
    date: str
    tool_version: str
    sglang_version: str
    policy: ProbedPolicy
    scores: ProbeScores
    fingerprint: ModelFingerprint
    seal: str

    @field_validator("format", mode="before")
    @classmethod
    def _format_is_known(cls, value: Any) -> Any:
        if value != RECORD_FORMAT or isinstance(value, bool):
            raise ValueError(f"expected probe format {RECORD_FORMAT}, got {value!r}: another version wrote it")
        return value

    @field_validator("allowed_tiers")
    @classmethod
    def _high_is_allowed(cls, tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
        return require_high(tiers)

    @classmethod
    def sealed(cls, **fields: Any) -> ProbeRecord:
        """A record of ``fields`` (all but ``seal``) with its seal. pydantic's ValidationError when they do not fit."""
        record = cls(**fields, seal="")
        return record.model_copy(update={"seal": record._expected_seal()})

    @property
    def edited(self) -> bool:
        """Whether a field was changed after the probe wrote the record."""
        return self.seal != self._expected_seal()

    def _expected_seal(self) -> str:
        return _content_digest(self.model_dump(mode="json", exclude={"seal"}))


def profile_digest(profile: Profile) -> str:
    """``sha256:<hex>`` of what a profile does: equal for equal content under another path, name, description or
    default budget: the budget in force is recorded beside it."""
    content = profile.model_dump(mode="json", exclude={"name", "description", "budget"})
    # Profiles once had this field, of which "none" was the one value: records of that time stay valid.
    return _content_digest({**content, "codec": "none"})


def _content_digest(content: Any) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return f"sha256:{hashlib.sha256(canonical).hexdigest()}"


def _named(policy: ProbedPolicy) -> str:
    return f"{policy.profile} ({policy.profile_digest[:19]}…)"
