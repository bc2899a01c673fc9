"""What a chunk is planned by, and which of the controller's candidates a rank may use."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.payload.layout import bytes_per_row
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.profiles.errors import ProfileError
from spectrumkv_sglang.profiles.profile import Profile, load_profile
from spectrumkv_sglang.profiles.tier import Tier
from spectrumkv_sglang.transfer.pool_view import PoolView
from spectrumkv_sglang.tuning.frontier import Candidate
from spectrumkv_sglang.tuning.own_candidate import own_candidate
from spectrumkv_sglang.tuning.settings import CandidateSettings
from spectrumkv_sglang.verification.fingerprint import ModelFingerprint

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SendingPolicy:
    """Profile, budget b and tiers of a chunk. ``budget``: wire bytes over native bytes."""

    profile: Profile
    budget: float
    allowed_tiers: tuple[Tier, ...]

    @classmethod
    def of(cls, config: SpectrumKVConfig) -> SendingPolicy:
        """What ``config`` states for every chunk."""
        return cls(config.loaded_profile, config.budget, config.allowed_tiers)

    @property
    def usable_tiers(self) -> tuple[Tier, ...]:
        """Tiers that the profile has and that may be used, HIGH first."""
        return self.profile.usable_tiers(self.allowed_tiers)

    def table(self, view: PoolView) -> PrecisionTable:
        """Its precisions for the pool. ProfileError: it names layers or heads that the model does not have."""
        return view.table(self.profile, self.allowed_tiers)


@dataclass(frozen=True)
class ServedCandidates:
    """Candidates that this rank may use.

    Attributes:
        candidates: what the controller chooses from.
        safe: what it takes where it knows nothing.
        policies: of each of them by name.
    """

    candidates: tuple[Candidate, ...]
    safe: Candidate
    policies: dict[str, SendingPolicy]

    @property
    def observe_attention(self) -> bool:
        """Whether some candidate has tiers to choose from."""
        return any(len(policy.usable_tiers) > 1 for policy in self.policies.values())


def configured_policies(config: SpectrumKVConfig, view: PoolView) -> tuple[SendingPolicy, ...]:
    """What peers with this configuration may send: the profile, and the candidates of a controller that is on."""
    own = SendingPolicy.of(config)
    if not config.controller.enabled:
        return (own,)
    others = [
        SendingPolicy(load_profile(candidate.profile), candidate.budget, config.allowed_tiers)
        for candidate in config.controller.candidates
    ]
    return (own, *(policy for policy in others if not _why_not(policy, view)))


def serve_candidates(
    asked: SpectrumKVConfig,
    served: SpectrumKVConfig,
    view: PoolView,
    fingerprint: Callable[[], ModelFingerprint],
    *,
    speaks: bool = True,
) -> ServedCandidates:
    """The candidates of ``asked.controller`` that the probe's record and the pool allow, and the safe one.

    The rules are those of the configured profile: without a record of a probe that fits, a candidate has HIGH and MID
    only, and one that does not reach its budget with these, or that is unsafe in these, is left out and said so.

    Args:
        asked: the configuration as the operator wrote it.
        served: the same after the probe's record was checked; its profile and budget are the safe candidate by default.
        fingerprint: of the served model; FingerprintError counts as a changed model.
        speaks: whether this rank logs for its server.
    """
    settings = asked.controller
    level = logging.WARNING if speaks else logging.DEBUG
    candidates: dict[str, Candidate] = {}
    policies: dict[str, SendingPolicy] = {}
    once = functools.cache(fingerprint)
    for setting in settings.candidates:
        policy = _policy(asked, setting, once)
        why = policy if isinstance(policy, str) else _why_not(policy, view)
        if isinstance(policy, str) or why:
            logger.log(level, "SpectrumKV controller: candidate %s is left out: %s", setting.label, why)
            continue
        candidates[setting.label] = Candidate(setting.label, _expected_b(policy, view), setting.kl, setting.speed)
        policies[setting.label] = policy
    own = SendingPolicy.of(served)
    own_choice = own_candidate(settings, own.profile, own.budget, _expected_b(own, view))
    safe = candidates.get(settings.safe)
    if safe is None:
        if settings.safe:
            logger.log(level, "SpectrumKV controller: %s is left out, the server's profile is safe", settings.safe)
        safe = candidates.get(own_choice.name, own_choice)
        policies.setdefault(safe.name, own)
        candidates[safe.name] = safe  # what the operator serves by is always among them
    logger.log(
        logging.INFO if speaks else logging.DEBUG,
        "SpectrumKV controller: candidates %s beside SGLang's own path, safe is %s",
        ", ".join(candidates) or "none",
        safe.name,
    )
    return ServedCandidates(tuple(candidates.values()), safe, policies)


def _policy(
    asked: SpectrumKVConfig, setting: CandidateSettings, fingerprint: Callable[[], ModelFingerprint]
) -> SendingPolicy | str:
    """The candidate with the tiers that it may use, or why it may not be used."""
    config = asked.with_policy(setting.profile, setting.budget)
    decision = config.decide_tiers(fingerprint)
    if decision.restricted and decision.unsafe:
        return f"{decision.unsafe}, and {decision.state.meaning}"
    return SendingPolicy(config.loaded_profile, setting.budget, decision.allowed_tiers)


def _why_not(policy: SendingPolicy, view: PoolView) -> str:
    try:
        table = policy.table(view)
    except ProfileError as error:
        return str(error)
    if table.needs_rotation and view.rotation is None:
        return f"it rotates keys back by their position: {view.why_no_rotation}"
    least = _tier_shares(policy, view)[-1]
    if least > policy.budget and len(policy.profile.tiers_defined) > 1:
        tiers = ", ".join(tier.label for tier in policy.usable_tiers)
        return f"tiers {tiers} reach {math.ceil(least * 1000) / 1000:g}, expected {policy.budget:g} or less: probe it"
    return ""


def _tier_shares(policy: SendingPolicy, view: PoolView) -> list[float]:
    """Bytes of a row over native bytes in each usable tier, HIGH first."""
    rows = bytes_per_row(view.geometry, policy.table(view))
    return [float(rows[tier]) / view.geometry.native_bytes_per_token for tier in policy.usable_tiers]


def _expected_b(policy: SendingPolicy, view: PoolView) -> float:
    """The budget, as far as the tiers can take less and use more."""
    shares = _tier_shares(policy, view)
    return max(shares[-1], min(policy.budget, shares[0]))
