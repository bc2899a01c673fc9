"""Prefill and decode use a tier only where both allow it; what decode forbids is never unpacked."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest
from conftest import MakePrefill, MakeRank, MakeRaw
from decode_peer import GEOMETRY
from prefill_side import assert_arrived, idle, next_room

from spectrumkv_sglang.observability.once import flush_log_once
from spectrumkv_sglang.profiles.profile import load_profile
from spectrumkv_sglang.transfer.errors import ControlMessageError
from spectrumkv_sglang.transfer.handshake import decode_handshake, encode_handshake
from spectrumkv_sglang.transfer.messages import PROTOCOL_VERSION, Close, Done, Failed, Refused, encode
from spectrumkv_sglang.transfer.tier_agreement import forbidden_in

pytestmark = pytest.mark.timeout(150)

HIGH_MID = ["high", "mid"]
NARROW_HIGH = "name: narrow\ntiers:\n  high: {keys: int8, values: int4}\n"


@pytest.fixture
def narrow_high(tmp_path: Path) -> str:
    """A profile that holds INT4 in its only tier."""
    path = tmp_path / "narrow.yaml"
    path.write_text(NARROW_HIGH)
    return str(path)


def test_the_handshake_tells_decodes_tiers(make_rank: MakeRank) -> None:
    assert make_rank().handshake.allowed_tiers == [0, 1, 2]
    assert make_rank(allowed_tiers=HIGH_MID, budget=0.6).handshake.allowed_tiers == [0, 1]


def test_prefill_leaves_out_what_decode_forbids(
    make_rank: MakeRank, make_prefill: MakePrefill, caplog: pytest.LogCaptureFixture
) -> None:
    flush_log_once()
    rank = make_rank(allowed_tiers=HIGH_MID, budget=0.6)
    source = make_prefill(profile="spectrum", budget=0.55)
    pages = source.some_pages(320)
    room_pages = rank.open_room(1, len(pages))
    with caplog.at_level(logging.WARNING):
        outcome = source.send(rank, 1, pages)
    assert (outcome.code, outcome.reason, outcome.failures) == (0, "peer_forbids_tier", {})
    assert outcome.record is not None
    assert outcome.record["tokens_by_tier"]["mid"] > 0
    assert outcome.record["tokens_by_tier"]["low"] == 0
    assert outcome.record["achieved_b"] <= 0.55
    assert not rank.is_untouched()
    assert rank.is_untouched(but=room_pages)
    [said] = [message for message in caplog.messages if "allows tiers high, mid, low" in message]
    assert "only high, mid" in said


def test_tiers_that_both_sides_allow_are_used(make_rank: MakeRank, make_prefill: MakePrefill) -> None:
    rank, source = make_rank(), make_prefill(profile="spectrum", budget=0.4)
    pages = source.some_pages(320)
    room_pages = rank.open_room(1, len(pages))
    planned = source.plan(1, pages, rank.handshake.slot_bytes)
    outcome = source.send(rank, 1, pages)
    assert outcome.reason == "tiered"
    assert outcome.record is not None
    assert outcome.record["tokens_by_tier"]["low"] > 0
    assert_arrived(source, pages, rank, room_pages, planned)


def test_decode_refuses_a_tier_that_it_forbids(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw
) -> None:
    rank, source = make_rank(allowed_tiers=HIGH_MID, budget=0.6), make_prefill()
    raw = make_raw(source, rank)
    rank.open_room(1, 4)
    for tiers, tier in (([0, 2], "low"), ([2], "low"), ([3], "3")):
        answer = raw.ask(raw.opening(1, 4, tiers=tiers))
        assert isinstance(answer, Refused)
        assert answer.code == "tier_forbidden"
        assert f"tier {tier}, but decode allows only high, mid" in answer.message
    assert idle(rank)
    next_room(rank, source)


def test_a_prefill_with_an_outdated_handshake_goes_native(make_rank: MakeRank, make_prefill: MakePrefill) -> None:
    """Decode has the last word: it may have been started anew with fewer tiers."""
    rank = make_rank(allowed_tiers=HIGH_MID, budget=0.6)
    source = make_prefill(profile="spectrum", budget=0.4)
    pages = source.some_pages(100)
    rank.open_room(1, len(pages))
    outdated = msgspec.structs.replace(rank.handshake, allowed_tiers=[0, 1, 2])
    outcome = source.send(rank, 1, pages, peer=outdated)
    assert (outcome.code, outcome.went_native, outcome.reason) == (0, True, "tier_forbidden")
    assert source.engine.writes == []
    assert rank.is_untouched()
    assert idle(rank)


@pytest.mark.parametrize("knows", [True, False], ids=["said by the handshake", "refused by decode"])
def test_a_narrow_precision_in_high_needs_decodes_low_tier(
    make_rank: MakeRank, make_prefill: MakePrefill, narrow_high: str, knows: bool
) -> None:
    rank = make_rank(allowed_tiers=HIGH_MID, budget=0.6)
    source = make_prefill(profile=narrow_high)
    pages = source.some_pages(60)
    rank.open_room(1, len(pages))
    peer = rank.handshake if knows else msgspec.structs.replace(rank.handshake, allowed_tiers=[0, 1, 2])
    outcome = source.send(rank, 1, pages, peer=peer)
    assert (outcome.code, outcome.went_native, outcome.reason) == (0, True, "tier_forbidden")
    assert rank.is_untouched()
    assert idle(rank)


def test_a_narrow_precision_in_high_is_unpacked_where_low_is_allowed(
    make_rank: MakeRank, make_prefill: MakePrefill, narrow_high: str
) -> None:
    rank, source = make_rank(), make_prefill(profile=narrow_high)
    pages = source.some_pages(60)
    rank.open_room(1, len(pages))
    assert source.send(rank, 1, pages).reason == "tiered"


def test_a_commit_with_an_undeclared_tier_writes_nothing(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw
) -> None:
    rank, source = make_rank(), make_prefill()
    raw, pages = make_raw(source, rank), source.some_pages(8)
    room_pages = rank.open_room(1, len(pages))
    [grant] = raw.grants(1, len(pages), tiers=[1, 2])
    commit = raw.land(grant, 1, pages)  # a sound payload, all of it HIGH
    answer = raw.ask(commit)
    assert isinstance(answer, Failed)
    assert answer.code == "tier_undeclared"
    assert "tiers [0] arrived, OPEN declared only [1, 2]" in answer.message
    assert rank.is_untouched()
    assert rank.counters() == {"tier_undeclared": 1}
    raw.send_frames(encode(Close(1, [])))
    [grant] = raw.grants(1, len(pages), chunk=2, tiers=[0])
    assert isinstance(raw.ask(raw.land(grant, 1, pages, chunk=2)), Done)
    assert_arrived(source, pages, rank, room_pages)
    raw.send_frames(encode(Close(2, [])))
    assert idle(rank)


def test_a_peer_of_the_former_protocol_gets_native_kv(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw
) -> None:
    former = (PROTOCOL_VERSION - 1).to_bytes(2, "little")
    rank, source = make_rank(), make_prefill()
    raw, pages = make_raw(source, rank), source.some_pages(8)
    rank.open_room(1, len(pages))
    frame = encode_handshake(rank.handshake)
    with pytest.raises(ControlMessageError) as refused:
        decode_handshake(frame[:4] + former + frame[6:])
    outcome = source.send(rank, 1, pages, peer=refused.value)
    assert (outcome.code, outcome.went_native, outcome.reason) == (0, True, "protocol_version")
    frame = encode(raw.opening(1, len(pages)))
    raw.send_frames(frame[:4] + former + frame[6:])
    next_room(rank, source)
    assert rank.counters() == {"garbage": 1}


@pytest.mark.parametrize(
    ("profile", "tiers", "allowed", "forbidden"),
    [
        ("spectrum", [0, 1, 2], [0, 1, 2], ""),
        ("spectrum", [0, 1], [0, 1], ""),
        ("spectrum", [0, 2], [0, 1], "tier low, but decode allows only high, mid"),
        ("spectrum", [0, 1, 2], [0], "tier mid, low, but decode allows only high"),
        ("spectrum", [0, 3], [0, 1, 2], "tier 3, but"),
        ("spectrum-safe", [0, 1], [0], "tier mid"),
        ("fp8", [0], [0, 1], ""),
        ("native-packed", [0], [0], ""),
    ],
)
def test_what_decode_forbids(profile: str, tiers: list[int], allowed: list[int], forbidden: str) -> None:
    found = forbidden_in(load_profile(profile).table(GEOMETRY), tiers, allowed)
    assert found.startswith(forbidden)
    assert bool(found) == bool(forbidden)
