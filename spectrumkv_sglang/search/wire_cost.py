"""Bytes of a profile on the wire, exact for a chunk of the size that serves, and the budget that goes with them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spectrumkv_sglang.calibration.allocation import NominalChunk
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.profiles.chunk_plan import budget_of_upgrades, plan_chunk
from spectrumkv_sglang.profiles.profile import Profile
from spectrumkv_sglang.profiles.tier import Tier
from spectrumkv_sglang.search.space import Point
from spectrumkv_sglang.transfer.chunk_planner import CHUNK_MESSAGE_BYTES, SUBCHUNK_MESSAGE_BYTES


@dataclass(frozen=True)
class WireCost:
    """What a profile takes of a chunk.

    Attributes:
        budget: b that the profile is served with.
        wire_ratio: wire / native bytes that a chunk then takes, everything counted; at most ``budget``.
        tier_shares: share of the chunk's tokens in high, mid and low.
    """

    budget: float
    wire_ratio: float
    tier_shares: tuple[float, float, float]


def budget_of(point: Point, chunk: NominalChunk) -> float:
    """b with which a point's share of the tokens of chunks like ``chunk`` goes from the lowest tier to the next."""
    profile = point.profile(chunk.geometry.layers)
    table = profile.table(chunk.geometry)
    if Tier.MID not in profile.tiers:
        return chunk.wire_ratio(table.values[Tier.LOW], table.transforms)
    return budget_of_upgrades(
        upgraded_tokens(point, chunk),
        chunk.geometry,
        table,
        chunk.slot_bytes,
        _sinks(chunk),
        profile.tiers_defined,
        _message_bytes(table),
    )


def upgraded_tokens(point: Point, chunk: NominalChunk) -> int:
    """Tokens of a chunk that the point's budget moves up from the lowest tier."""
    return round(point.upgrade * chunk.low_tokens)


def wire_cost(point: Point, chunk: NominalChunk) -> WireCost:
    """Of ``point``'s profile in chunks like ``chunk``."""
    budget = budget_of(point, chunk)
    profile = point.profile(chunk.geometry.layers)
    table = profile.table(chunk.geometry)
    plan = _plan(profile, table, chunk, budget)
    high, mid, low = (np.bincount(plan.tiers, minlength=len(Tier)) / chunk.tokens).tolist()
    return WireCost(budget, plan.achieved, (high, mid, low))


def _plan(profile: Profile, table: PrecisionTable, chunk: NominalChunk, budget: float):  # type: ignore[no-untyped-def]
    return plan_chunk(
        np.ones(chunk.tokens, np.float32),
        chunk.geometry,
        table,
        budget,
        chunk.slot_bytes,
        _sinks(chunk),
        profile.tiers_defined,
        _message_bytes(table),
    )


def _sinks(chunk: NominalChunk) -> NDArray[np.bool_]:
    return np.arange(chunk.tokens) < chunk.sink_tokens


def _message_bytes(table: PrecisionTable) -> int:
    return SUBCHUNK_MESSAGE_BYTES + CHUNK_MESSAGE_BYTES + len(table.to_bytes())
