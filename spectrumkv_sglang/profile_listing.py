"""What each shipped profile costs a token: the table of `spectrumkv profiles`."""

from __future__ import annotations

import msgspec
from rich.table import Table

from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.layout import bytes_per_row
from spectrumkv_sglang.profiles.profile import Profile, load_profile, shipped_profiles


class TierCost(msgspec.Struct, frozen=True):
    """One tier of a profile: precisions, bytes a token without alignment, and their share of native bytes."""

    tier: str
    keys: str
    values: str
    bytes_per_token: int
    ratio: float


class ProfileCost(msgspec.Struct, frozen=True):
    """One profile; `tiers` are those that it defines, highest first."""

    name: str
    description: str
    native_bytes_per_token: int
    tiers: list[TierCost]


def list_profiles(geometry: KVGeometry) -> list[ProfileCost]:
    """Costs of every shipped profile on a KV geometry, by name."""
    return [profile_cost(load_profile(name), geometry) for name in shipped_profiles()]


def profile_cost(profile: Profile, geometry: KVGeometry) -> ProfileCost:
    """Cost of each tier of `profile`, scales included. ProfileError when the profile does not fit the geometry."""
    native = geometry.native_bytes_per_token
    costs = bytes_per_row(geometry, profile.table(geometry))
    tiers = [
        TierCost(
            tier=tier.label,
            keys=profile.tiers[tier].keys.name.lower(),
            values=profile.tiers[tier].values.name.lower(),
            bytes_per_token=int(costs[tier]),
            ratio=int(costs[tier]) / native,
        )
        for tier in profile.tiers_defined
    ]
    return ProfileCost(profile.name, profile.description.strip(), native, tiers)


def profile_table(profiles: list[ProfileCost], geometry: KVGeometry) -> Table:
    """The list as a table for a terminal."""
    table = Table(
        title=f"{geometry.layers} layers x {geometry.kv_heads} KV heads x {geometry.head_dim}, {geometry.dtype}: "
        f"{geometry.native_bytes_per_token:,} bytes a token",
        title_justify="left",
    )
    for header in ("profile", "tier", "keys", "values"):
        table.add_column(header)
    table.add_column("bytes/token", justify="right")
    table.add_column("of native", justify="right")
    for profile in profiles:
        for index, tier in enumerate(profile.tiers):
            name = profile.name if index == 0 else ""
            table.add_row(name, tier.tier, tier.keys, tier.values, f"{tier.bytes_per_token:,}", f"{tier.ratio:.3f}")
        table.add_section()
    return table
