"""From importance and a budget to tiers and sub-chunks."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.layout import payload_bytes
from spectrumkv_sglang.profiles.chunk_plan import EXACT_SLOTS, ChunkPlan, last_page_rows, plan_chunk, protected_rows
from spectrumkv_sglang.profiles.profile import load_profile, shipped_profiles
from spectrumkv_sglang.profiles.tier import Tier

SMOL = KVGeometry(layers=30, kv_heads=3, head_dim=64, v_head_dim=64, page_size=1, dtype="float32")
MESSAGE_BYTES = 200


@dataclass(frozen=True)
class Chunk:
    geometry: KVGeometry
    profile: str
    importance: np.ndarray
    forced: np.ndarray
    preferred: np.ndarray
    slot_bytes: int

    def plan(self, budget: float) -> ChunkPlan:
        profile = load_profile(self.profile)
        return plan_chunk(
            self.importance,
            self.geometry,
            profile.table(self.geometry),
            budget,
            self.slot_bytes,
            self.forced,
            profile.usable_tiers(),
            MESSAGE_BYTES,
            preferred=self.preferred,
        )


@st.composite
def chunks(draw: st.DrawFn) -> Chunk:
    geometry = KVGeometry(
        layers=draw(st.integers(1, 4)),
        kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([8, 64, 128])),
        v_head_dim=draw(st.sampled_from([16, 64])),
        page_size=draw(st.sampled_from([1, 16])),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
    )
    rows = draw(st.integers(1, 300))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    profile = draw(st.sampled_from(shipped_profiles()))
    # One row costs most where it bears the parameters of a block alone, so native is not the largest page.
    table, page_rows = load_profile(profile).table(geometry), min(rows, geometry.page_size)
    one_page = sum(payload_bytes(geometry, table, np.eye(3, dtype=int)[tier] * page_rows) for tier in Tier)
    sinks, recent = protected_rows(0, rows, rows, draw(st.integers(0, 4)), draw(st.integers(0, 64)))
    return Chunk(
        geometry,
        profile,
        random.pareto(1.5, rows).astype(np.float32),
        sinks,
        recent,
        one_page + draw(st.sampled_from([1024, 16384, 1 << 20])),
    )


@given(chunks(), st.floats(0.01, 1.0))
@settings(max_examples=80, deadline=None)
def test_every_wire_byte_counts_and_the_budget_holds(chunk: Chunk, budget: float) -> None:
    plan = chunk.plan(budget)
    table = load_profile(chunk.profile).table(chunk.geometry)
    rows, page = len(chunk.importance), chunk.geometry.page_size

    control = 0
    next_page = 0
    for subchunk in plan.subchunks:
        assert subchunk.page_start == next_page
        next_page += subchunk.page_count
        tiers = plan.tiers[subchunk.page_start * page : next_page * page]
        assert tuple(np.bincount(tiers, minlength=3)) == subchunk.rows_per_tier
        assert subchunk.payload_bytes == payload_bytes(chunk.geometry, table, subchunk.rows_per_tier)
        assert subchunk.payload_bytes <= chunk.slot_bytes
        control += MESSAGE_BYTES + -(-len(tiers) // 4)
    assert next_page == -(-rows // page)

    assert plan.payload_bytes == sum(subchunk.payload_bytes for subchunk in plan.subchunks)
    assert plan.wire_bytes == plan.payload_bytes + control
    assert plan.native_bytes == rows * chunk.geometry.native_bytes_per_token
    assert plan.achieved == plan.wire_bytes / plan.native_bytes
    assert plan.reachable == (plan.achieved <= budget)
    assert (plan.tiers[chunk.forced] == Tier.HIGH).all()
    if not plan.reachable:
        assert (plan.tiers[~chunk.forced] == chunk.plan(1e-9).tiers[~chunk.forced]).all()


@given(chunks(), st.floats(0.01, 1.0), st.floats(0.01, 1.0))
@settings(max_examples=60, deadline=None)
def test_a_larger_budget_lowers_no_row(chunk: Chunk, one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert (chunk.plan(large).tiers <= chunk.plan(small).tiers).all()


def smol_chunk(rows: int = 900) -> Chunk:
    random = np.random.default_rng(0)
    sinks, recent = protected_rows(0, rows, rows, sink_tokens=4, recent_tokens=64)
    importance = random.pareto(1.5, rows).astype(np.float32)
    return Chunk(SMOL, "spectrum", importance, sinks, recent, slot_bytes=16 * 1024 * 1024)


@pytest.mark.parametrize("budget", [0.2, 0.3, 0.55, 0.8])
def test_most_of_the_budget_is_used(budget: float) -> None:
    plan = smol_chunk().plan(budget)
    assert plan.reachable
    assert budget - 0.004 < plan.achieved <= budget


def test_long_chunks_are_searched_by_bounds_and_lose_little() -> None:
    chunk = smol_chunk(rows=4000)
    assert len(chunk.importance) * SMOL.native_bytes_per_token > EXACT_SLOTS * chunk.slot_bytes
    plans = [chunk.plan(budget) for budget in (0.14, 0.2, 0.2001, 0.55, 0.5501, 1.0)]
    for plan, budget in zip(plans[1:-1], (0.2, 0.2001, 0.55, 0.5501), strict=True):
        assert plan.reachable
        assert budget - 0.003 < plan.achieved <= budget
    for lower, higher in itertools.pairwise(plans):
        assert (higher.tiers <= lower.tiers).all()
    assert not plans[0].reachable
    assert (plans[0].tiers[4:] == Tier.LOW).all()


@pytest.mark.parametrize(("profile", "budget"), [("spectrum", 0.55), ("balanced", 0.55), ("balanced", 0.3)])
def test_planning_8192_rows_takes_milliseconds_and_loses_little(profile: str, budget: float) -> None:
    geometry = KVGeometry(layers=32, kv_heads=8, head_dim=128, v_head_dim=128, page_size=1, dtype="bfloat16")
    chunk = replace(smol_chunk(rows=8192), geometry=geometry, profile=profile)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        plan = chunk.plan(budget)
        seconds.append(time.process_time() - start)
        assert budget - 0.002 < plan.achieved <= budget
    assert min(seconds) < 0.05  # measured: 5 ms; loading the profile is part of this


def test_recent_rows_leave_the_lowest_tier_first_but_do_not_break_the_budget() -> None:
    roomy = smol_chunk().plan(0.16)
    assert (roomy.tiers[-64:] < Tier.LOW).all()
    assert (roomy.tiers[4:-64] == Tier.LOW).mean() > 0.9
    tight = smol_chunk().plan(0.15)
    assert tight.reachable
    assert (tight.tiers[-64:] < Tier.LOW).any()
    assert (tight.tiers[4:-64] == Tier.LOW).all()


def test_importance_that_is_not_finite_counts_as_none() -> None:
    chunk = smol_chunk()
    chunk.importance[100:200] = np.nan
    chunk.importance[200:300] = np.inf
    chunk.importance[300:400] = -1.0
    plan = chunk.plan(0.4)
    assert plan.reachable
    worthless = np.zeros(900, dtype=bool)
    worthless[100:400] = True
    others = ~(worthless | chunk.forced | chunk.preferred)
    assert plan.tiers[worthless].min() >= plan.tiers[others].max()


def test_a_slot_below_one_page_names_the_bytes_needed() -> None:
    chunk = replace(smol_chunk(), geometry=replace(SMOL, page_size=64), slot_bytes=65536)
    with pytest.raises(PayloadError, match="slot_bytes"):
        chunk.plan(0.55)


def test_an_empty_chunk_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        smol_chunk(rows=0).plan(0.55)


def test_the_last_page_of_a_chunked_prefill() -> None:
    assert last_page_rows(first_position=0, rows=16, prompt_tokens=21, page_size=8).tolist() == [False] * 16
    for prompt_tokens in (17, 24):
        last = last_page_rows(first_position=8, rows=16, prompt_tokens=prompt_tokens, page_size=8)
        assert last.tolist() == [False] * 8 + [True] * 8


def test_protected_rows_of_a_chunked_prefill() -> None:
    sinks, recent = protected_rows(first_position=0, rows=6, prompt_tokens=10, sink_tokens=2, recent_tokens=5)
    assert sinks.tolist() == [True, True, False, False, False, False]
    assert recent.tolist() == [False, False, False, False, False, True]
    sinks, recent = protected_rows(first_position=6, rows=4, prompt_tokens=10, sink_tokens=2, recent_tokens=5)
    assert not sinks.any()
    assert recent.all()
