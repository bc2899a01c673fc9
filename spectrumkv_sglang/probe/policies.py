"""The policies that a probe judges, each written as the SpectrumKV configuration that a server would have.

``policy`` is what would be served: tiers by importance under a budget; ``random`` gives as many tokens each tier, but
not those that matter. The others put every token in one tier, so that each tier is judged at its worst, and the low
tier's keys and values apart; all but the sinks, which servers never send in another tier than high.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import yaml

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.layout import bytes_per_row
from spectrumkv_sglang.profiles.profile import HeadOverride, LayerOverride, Profile, TierPrecision
from spectrumkv_sglang.profiles.tier import Tier

POLICY = "policy"
RANDOM = "random"
HIGH = "high"
MID = "mid"
LOW = "low"
LOW_KEYS = "low_keys"
LOW_VALUES = "low_values"
LOWEST = (MID, LOW, LOW_KEYS, LOW_VALUES)
"""Policies that put all but the sinks into the tier that they judge, see `LoopbackPlan.lowest`."""

Part = Literal["both", "keys", "values"]
_SCORER_FIELDS = ("scorer", "scorer_window", "scorer_stride_samples", "seed")


def one_tier_profile(profile: Profile, tier: Tier, part: Part = "both") -> Profile:
    """``profile`` with two tiers: HIGH, for the sinks, as it is, and as LOW the precisions that it gives to ``tier``;
    with ``part`` "keys" or "values" the other of the two is HIGH's there. HIGH alone where ``tier`` is HIGH."""
    stated, high = profile.tiers[tier], profile.tiers[Tier.HIGH]
    judged = TierPrecision(
        keys=high.keys if part == "values" else stated.keys,
        values=high.values if part == "keys" else stated.values,
    )
    place = Tier.HIGH if tier is Tier.HIGH else Tier.LOW
    sources: list[tuple[Tier, Part, Tier]] = [(tier, part, place)]
    if place is Tier.LOW:
        sources.append((Tier.HIGH, "both", Tier.HIGH))
        if part != "both":
            sources.append((Tier.HIGH, "values" if part == "keys" else "keys", Tier.LOW))

    def kept(overrides: Sequence[LayerOverride]) -> list[LayerOverride]:
        found = [_of_tier(override, *source) for override in overrides for source in sources]
        return [override for override in found if override is not None]

    return Profile(
        name=f"{profile.name}-{tier.label}-{part}",
        description=f"Every token but the sinks as {tier.label} of {profile.name}, {part}",
        transform=profile.transform,
        tiers={Tier.HIGH: high, place: judged},
        layer_overrides=kept(profile.layer_overrides),
        head_overrides=[override for override in kept(profile.head_overrides) if isinstance(override, HeadOverride)],
    )


def probe_budget(config: SpectrumKVConfig, geometry: KVGeometry) -> float:
    """Budget b of the judged policy: the configured one, or, where that would leave the lowest tier unused, the middle
    between the bytes of the two lowest tiers, which puts about half of the tokens in the lowest."""
    profile = config.loaded_profile
    tiers = profile.usable_tiers(config.allowed_tiers)
    cost = bytes_per_row(geometry, profile.table(geometry, config.allowed_tiers)) / geometry.native_bytes_per_token
    if len(tiers) < 2:
        return config.budget
    lowest, above = float(cost[tiers[-1]]), float(cost[tiers[-2]])
    return min(config.budget, max((lowest + above) / 2, config.reachable_budget * 1.02))


def write_policies(config: SpectrumKVConfig, geometry: KVGeometry, folder: Path) -> tuple[str, ...]:
    """Write one configuration file a policy into ``folder``; returns the policies' names, as the loopback server knows
    them. Policies for tiers that the profile does not define, or that are not allowed, are left out."""
    profile = config.loaded_profile
    tiers = profile.usable_tiers(config.allowed_tiers)
    written = [POLICY]
    policy = {**base_fields(config), "budget": probe_budget(config, geometry)}
    _write(folder / f"{POLICY}.yaml", policy)
    if len(tiers) > 1 and config.scorer != RANDOM:
        _write(folder / f"{RANDOM}.yaml", {**policy, "scorer": "random"})
        written.append(RANDOM)
    wanted: list[tuple[str, Tier, Part]] = [(MID, Tier.MID, "both"), (LOW, Tier.LOW, "both")]
    wanted += [(LOW_KEYS, Tier.LOW, "keys"), (LOW_VALUES, Tier.LOW, "values")]
    if any(precision is not Precision.NATIVE for precision in vars(profile.tiers[Tier.HIGH]).values()):
        wanted.insert(0, (HIGH, Tier.HIGH, "both"))
    for name, tier, part in wanted:
        if tier in tiers:
            derived = one_tier_profile(profile, tier, part)
            _write(folder / f"{name}-profile.yaml", derived.model_dump(mode="json", exclude_none=True))
            fields = {key: value for key, value in base_fields(config).items() if key in _SCORER_FIELDS}
            fields |= {"sink_tokens": config.sink_tokens, "recent_tokens": 0, "min_tokens": 0}
            _write(folder / f"{name}.yaml", {**fields, "profile": f"./{name}-profile.yaml"})
            written.append(name)
    return tuple(written)


def base_fields(config: SpectrumKVConfig) -> dict[str, object]:
    """Fields of the configuration file that judges as ``config`` serves, without a budget."""
    return {
        "profile": config.profile,
        "allowed_tiers": [tier.label for tier in config.allowed_tiers],
        "sink_tokens": config.sink_tokens,
        "recent_tokens": config.recent_tokens,
        "min_tokens": 0,
        "slot_bytes": config.slot_bytes,
        **{name: getattr(config, name) for name in _SCORER_FIELDS},
    }


def _of_tier(override: LayerOverride, tier: Tier, part: Part, place: Tier) -> LayerOverride | None:
    """The override as it applies to one tier and part, for the tier in whose ``place`` that is judged, or None where it
    does not."""
    if override.tiers is not None and tier not in override.tiers:
        return None
    keys = override.keys if part != "values" else None
    values = override.values if part != "keys" else None
    if keys is None and values is None:
        return None
    return override.model_copy(update={"tiers": [place], "keys": keys, "values": values})


def _write(path: Path, fields: dict[str, object]) -> None:
    path.write_text(yaml.safe_dump(fields, sort_keys=False), encoding="utf-8")
