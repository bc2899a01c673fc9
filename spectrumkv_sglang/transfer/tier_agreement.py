"""What prefill and decode allow each other: a tier is used only where both sides allow it."""

from __future__ import annotations

from collections.abc import Iterable

from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.profiles.tier import TIER_COUNT, Tier
from spectrumkv_sglang.verification.narrow_precisions import narrow_precisions


def forbidden_in(table: PrecisionTable, tiers: Iterable[int], allowed: Iterable[int]) -> str:
    """What a decode rank that allows ``allowed`` refuses in a chunk whose rows use ``tiers`` of ``table``; "" if
    nothing.

    Without LOW among the allowed tiers nothing may take under 8 bits: a profile with INT4 in HIGH is as unproven.
    """
    tiers, allowed = sorted(tiers), sorted(allowed)
    may_use = ", ".join(_label(tier) for tier in allowed)
    outside = [_label(tier) for tier in tiers if tier not in allowed]
    if outside:
        return f"tier {', '.join(outside)}, but decode allows only {may_use}: probe and configure both sides alike"
    narrow = narrow_precisions(table, tiers) if Tier.LOW not in allowed else []
    if narrow:
        names = ", ".join(precision.name for precision in narrow)
        return (
            f"{names} in tier {', '.join(_label(tier) for tier in tiers)}, but decode allows only {may_use} and "
            "therefore nothing under 8 bits: probe this profile on decode too"
        )
    return ""


def _label(tier: int) -> str:
    return Tier(tier).label if tier < TIER_COUNT else str(tier)
