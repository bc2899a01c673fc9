"""A profile's KV goes through the plan and the codec that serve, and its bytes are those of serving."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from spectrumkv_sglang.config import load_config
from spectrumkv_sglang.evaluation.methods import make_methods
from spectrumkv_sglang.evaluation.prefix import MovedKV, PrefixKV
from spectrumkv_sglang.evaluation.served_path import ProfileMethod
from spectrumkv_sglang.payload.codec import pack_payload, unpack_payload
from spectrumkv_sglang.payload.kv_buffers import KVBuffers
from spectrumkv_sglang.payload.layout import plan_layout
from spectrumkv_sglang.profiles.chunk_plan import plan_chunk, protected_rows
from spectrumkv_sglang.profiles.profile import load_profile
from spectrumkv_sglang.transfer.chunk_planner import CHUNK_MESSAGE_BYTES, SUBCHUNK_MESSAGE_BYTES

from .conftest import LAYERS, TOKENS


def moved(prefix: PrefixKV, spec: str, folder: Path) -> MovedKV:
    return make_methods([spec], [], budget=None, scorer="window", seed=0, folder=folder)[spec].move(prefix)


def same(a: KVBuffers, b: KVBuffers) -> bool:
    return all(torch.equal(a.of(layer, kv), b.of(layer, kv)) for layer in range(LAYERS) for kv in (0, 1))


def test_native_packed_arrives_bit_for_bit(prefix: PrefixKV, tmp_path: Path) -> None:
    result = moved(prefix, "native-packed", tmp_path)
    assert same(result.buffers, prefix.view.buffers)
    assert prefix.native_bytes < result.wire_bytes < prefix.native_bytes * 1.02


@pytest.mark.parametrize("profile", ["int8", "fp8"])
def test_a_profile_of_one_tier_is_the_codec_and_nothing_else(prefix: PrefixKV, tmp_path: Path, profile: str) -> None:
    result = moved(prefix, profile, tmp_path)
    assert not same(result.buffers, prefix.view.buffers)
    layout = plan_layout(prefix.geometry, load_profile(profile).table(prefix.geometry), [TOKENS, 0, 0])
    payload = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    slots, tiers = torch.arange(TOKENS), np.zeros(TOKENS, np.uint8)
    pack_payload(prefix.view.buffers, slots, tiers, layout, payload)
    expected = prefix.copied_view().buffers
    unpack_payload(payload, expected, slots, tiers, layout)
    assert same(result.buffers, expected)


@pytest.mark.parametrize("budget", [0.5, 0.4])
def test_bytes_and_tiers_are_the_planner_s(prefix: PrefixKV, tmp_path: Path, budget: float) -> None:
    result = moved(prefix, f"spectrum@{budget}", tmp_path)
    profile, config = load_profile("spectrum"), load_config(None, {})
    table = profile.table(prefix.geometry)
    sinks, recent = protected_rows(0, TOKENS, TOKENS, config.sink_tokens, config.recent_tokens)
    plan = plan_chunk(
        prefix.scores["window"].read(torch.arange(TOKENS)).numpy(),
        prefix.geometry,
        table,
        budget,
        config.slot_bytes,
        sinks,
        profile.usable_tiers(),
        SUBCHUNK_MESSAGE_BYTES + CHUNK_MESSAGE_BYTES + len(table.to_bytes()),
        recent,
    )
    assert result.wire_bytes == plan.wire_bytes <= budget * prefix.native_bytes
    assert result.tokens_by_tier == tuple(np.bincount(plan.tiers, minlength=3))


def test_small_slots_change_the_bytes_and_not_the_kv(prefix: PrefixKV) -> None:
    def through(slot_bytes: int) -> MovedKV:
        options = {"profile": ("", "int8"), "slot_bytes": ("", slot_bytes), "min_tokens": ("", 0)}
        return ProfileMethod(load_config(None, {}, options), "").move(prefix)

    one, many = through(16 * 1024 * 1024), through(64 * 1024)
    assert same(one.buffers, many.buffers)
    assert many.wire_bytes > one.wire_bytes + 2 * SUBCHUNK_MESSAGE_BYTES


def test_the_prefix_itself_stays_as_it_is(prefix: PrefixKV, tmp_path: Path) -> None:
    before = prefix.copied_view().buffers
    moved(prefix, "spectrum@0.4", tmp_path)
    assert same(before, prefix.view.buffers)


def test_random_tiers_are_the_same_again_and_others_for_another_text(prefix: PrefixKV, tmp_path: Path) -> None:
    other = PrefixKV("text-1", prefix.view, prefix.scores)
    first, again, third = (moved(kv, "spectrum@0.4:random", tmp_path) for kv in (prefix, prefix, other))
    assert same(first.buffers, again.buffers)
    assert not same(first.buffers, third.buffers)
