"""The server's own profile as a candidate: always among them, and safe unless the configuration says otherwise."""

from __future__ import annotations

import math

from spectrumkv_sglang.profiles.profile import Profile, load_profile
from spectrumkv_sglang.tuning.frontier import Candidate
from spectrumkv_sglang.tuning.settings import CandidateSettings, ControllerSettings, candidate_label

NATIVE_PACKED = "native-packed"
"""Profile that loses nothing, whoever asks."""


def own_candidate(settings: ControllerSettings, profile: Profile, budget: float, b: float) -> Candidate:
    """The candidate that ``profile`` at ``budget`` is: the configured one where there is one, else one of its own.

    Profiles are alike by what they do, not by their names: a file may call itself as a shipped profile does.

    Args:
        b: wire bytes over native bytes that it is expected to take.
    """
    label = candidate_label(profile.name, budget)
    for setting in settings.candidates:
        if setting.budget == budget and _alike(load_profile(setting.profile), profile):
            return Candidate(setting.label, b, setting.kl, setting.speed)
    if label in [setting.label for setting in settings.candidates]:
        label = f"own:{label}"  # no profile can have such a name
    return Candidate(label, b, _kl_of(settings, profile, budget))


def _alike(one: Profile, other: Profile) -> bool:
    return _content(one) == _content(other)


def _content(profile: Profile) -> Profile:
    return profile.model_copy(update={"name": "any", "description": "", "budget": None})


def _kl_of(settings: ControllerSettings, profile: Profile, budget: float) -> float:
    """Expected KL: stated, or that of a candidate of this profile at no larger budget; infinite where nobody knows."""
    if settings.safe_kl is not None:
        return settings.safe_kl
    if _alike(profile, load_profile(NATIVE_PACKED)):
        return 0.0
    return min((c.kl for c in _below(settings, profile, budget)), default=math.inf)


def _below(settings: ControllerSettings, profile: Profile, budget: float) -> list[CandidateSettings]:
    return [c for c in settings.candidates if c.budget <= budget and _alike(load_profile(c.profile), profile)]
