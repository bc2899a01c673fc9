"""Which tiers a server may use, from the probe's record and the model that is served.

Everything of at least 8 bits in HIGH and MID is always allowed. LOW, and any tier under 8 bits, needs a record of a
probe that passed with this model and this policy.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.observability.reasons import ProbeState
from spectrumkv_sglang.profiles.profile import Profile
from spectrumkv_sglang.profiles.tier import Tier
from spectrumkv_sglang.verification.fingerprint import FingerprintError, ModelFingerprint
from spectrumkv_sglang.verification.narrow_precisions import narrow_precisions
from spectrumkv_sglang.verification.record import ProbedPolicy, ProbeRecord

__all__ = ["ProbeState", "TierDecision", "UnprovenTiersError", "decide_tiers"]

_UNPROBED_TIERS = (Tier.HIGH, Tier.MID)


class UnprovenTiersError(SpectrumKVError):
    """The server must not start: strict mode, or a profile that dropping LOW does not make safe."""


@dataclass(frozen=True)
class TierDecision:
    """Tiers that a server uses, and why.

    Attributes:
        allowed_tiers: HIGH first; a peer's payload may use no others.
        reasons: what differs or is missing; empty when nothing is held against the record.
        unsafe: what makes even HIGH and MID unsafe without a verified record, or "".
        probe_flags: of `spectrumkv probe` for what is served, if known.
    """

    allowed_tiers: tuple[Tier, ...]
    state: ProbeState
    reasons: tuple[str, ...] = ()
    unsafe: str = ""
    probe_flags: str = ""

    @property
    def restricted(self) -> bool:
        """Whether tiers that the configuration asks for were taken away."""
        return self.state not in (ProbeState.VERIFIED, ProbeState.NOT_NEEDED, ProbeState.WAIVED)

    def probe_command(self, model: str) -> str:
        """What to run to have the served policy judged for ``model``, a path or hub id."""
        parts = ("spectrumkv probe --model-path", shlex.quote(model), self.probe_flags, "--out launch.yaml")
        return " ".join(filter(None, parts))

    def explanation(self, model: str) -> str:
        """What was found and what to do, for a log line or an error about the served ``model``."""
        why = "; ".join((self.state.meaning, *self.reasons))
        return (
            f"probe {self.state.value}: {why}. To use the low tier, run `{self.probe_command(model)}` and start with "
            "--spectrumkv-config launch.yaml; to do without it, set allowed_tiers: [high, mid]"
        )

    def require(self, model: str, *, strict: bool) -> None:
        """Raise UnprovenTiersError where the server must not start with this decision."""
        if self.restricted and self.unsafe:
            raise UnprovenTiersError(
                f"{self.unsafe}, and only a probe can tell whether the model bears that; {self.explanation(model)} and "
                "use a profile whose high and mid tiers keep 8 bits, such as spectrum-safe"
            )
        if self.restricted and strict:
            raise UnprovenTiersError(f"strict is set, so this server does not start: {self.explanation(model)}")


def decide_tiers(
    *,
    profile: Profile,
    allowed_tiers: Iterable[Tier],
    policy: ProbedPolicy,
    record: ProbeRecord | None,
    require_probe: bool,
    fingerprint: Callable[[], ModelFingerprint],
) -> TierDecision:
    """Tiers that a server with this configuration may use.

    Args:
        profile: the served profile.
        allowed_tiers: those that the configuration allows.
        policy: the served policy, to be compared with the record's.
        record: the probe's, from the configuration.
        require_probe: False: an experiment, take the configured tiers as they are.
        fingerprint: of the served model; called only when the decision depends on it. Its FingerprintError counts as
            a changed model.
    """
    allowed = tuple(sorted(set(allowed_tiers)))
    kept = tuple(tier for tier in allowed if tier in _UNPROBED_TIERS)
    usable = profile.usable_tiers(allowed)
    unsafe = _unsafe(profile, kept)
    if Tier.LOW not in usable and not unsafe:
        return TierDecision(kept, ProbeState.NOT_NEEDED)
    if not require_probe:
        return TierDecision(allowed, ProbeState.WAIVED)
    if record is None:
        return TierDecision(kept, ProbeState.MISSING, (), unsafe)
    if record.edited:
        return TierDecision(kept, ProbeState.EDITED, ("its seal does not fit its fields",), unsafe)
    differences = [*_model_differences(record, fingerprint), *record.policy.differences(policy)]
    if differences:
        return TierDecision(kept, ProbeState.CHANGED, tuple(differences), unsafe)
    if record.verdict != "low_allowed" or Tier.LOW not in record.allowed_tiers:
        kept = tuple(tier for tier in kept if tier in record.allowed_tiers)
        reasons = (f"verdict {record.verdict} of {record.date}",)
        return TierDecision(kept, ProbeState.NOT_PASSED, reasons, _unsafe(profile, kept))
    return TierDecision(tuple(tier for tier in allowed if tier in record.allowed_tiers), ProbeState.VERIFIED)


def _model_differences(record: ProbeRecord, fingerprint: Callable[[], ModelFingerprint]) -> list[str]:
    try:
        return record.fingerprint.differences(fingerprint())
    except FingerprintError as error:
        return [f"the served model cannot be compared with the probed one: {error}"]


def _unsafe(profile: Profile, tiers: tuple[Tier, ...]) -> str:
    """What is under 8 bits in ``tiers`` of ``profile``; "" if nothing is."""
    usable = profile.usable_tiers(tiers)
    narrow = narrow_precisions(profile.table(profile.nominal_geometry(), tiers), usable)
    if not narrow:
        return ""
    names = ", ".join(precision.name for precision in narrow)
    return f"profile {profile.name!r} holds {names} in its {' or '.join(tier.label for tier in usable)} tier"
