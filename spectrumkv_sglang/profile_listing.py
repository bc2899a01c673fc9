"""What each profile costs a token: the table of `spectrumkv profiles`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from spectrumkv_sglang.kernels.precision import Precision, labels_by_bits
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.layout import bytes_per_row
from spectrumkv_sglang.profiles.errors import ProfileError
from spectrumkv_sglang.profiles.profile import Profile, load_profile, shipped_profiles


class TierCost(msgspec.Struct, frozen=True):
    """One tier of a profile: precisions, bytes a token without alignment, and their share of native bytes.

    ``keys``, ``values``: where layers or heads differ, "least to most bits".
    """

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


def list_profiles(geometry: KVGeometry, given: Sequence[str] = ()) -> list[ProfileCost]:
    """Costs on a KV geometry of the ``given`` profiles, names or files, then of every other shipped one, by name.

    Raises:
        ProfileError: no such profile or file, or it is for layers or KV heads that the geometry does not have.
    """
    names = dict.fromkeys([*given, *shipped_profiles()])
    return [profile_cost(load_profile(name), geometry) for name in names]


def profile_cost(profile: Profile, geometry: KVGeometry) -> ProfileCost:
    """Cost of each tier of `profile`, scales included. ProfileError when the profile does not fit the geometry."""
    native = geometry.native_bytes_per_token
    try:
        table = profile.table(geometry)
    except ProfileError as error:
        raise ProfileError(f"{error}, or state its size (--layers, --kv-heads)") from error
    costs = bytes_per_row(geometry, table)
    tiers = [
        TierCost(
            tier=tier.label,
            keys=_precisions(table.values[tier, :, 0]),
            values=_precisions(table.values[tier, :, 1]),
            bytes_per_token=int(costs[tier]),
            ratio=int(costs[tier]) / native,
        )
        for tier in profile.tiers_defined
    ]
    return ProfileCost(profile.name, profile.description.strip(), native, tiers)


def _precisions(cells: NDArray[np.uint8]) -> str:
    """The precision of a tier's keys or values; the least and the most bits where layers or heads differ."""
    found = [label for label in labels_by_bits() if Precision[label.upper()] in cells]
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


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
