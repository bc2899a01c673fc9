"""Chunks between two processes over the real Mooncake engine: what arrives, in how many writes, at what size."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import MakePrefill, MakeRank, MakeRaw
from decode_peer import GEOMETRY, PeerRank, eventually
from prefill_side import Outcome, PrefillSide, assert_arrived

from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.profiles.tier import Tier
from spectrumkv_sglang.transfer import chunk_sender
from spectrumkv_sglang.transfer.messages import Close, Done, encode
from spectrumkv_sglang.transfer.unpacking import pool_slots_of_pages

pytestmark = pytest.mark.timeout(150)

PAGED_BFLOAT16 = replace(GEOMETRY, page_size=16, dtype="bfloat16")
SMALL_SLOT = 64 * 1024
SHARED_SCALES = """
name: shared-scales
tiers:
  high: {keys: native, values: native}
  mid: {keys: native, values: int8}
  low: {keys: int4_channel, values: int4}
"""


@pytest.mark.parametrize("geometry", [GEOMETRY, PAGED_BFLOAT16], ids=["page1-float32", "page16-bfloat16"])
@pytest.mark.parametrize("slots_per_chunk", [1, 2, 4])
def test_native_packed_is_bit_exact_with_more_subchunks_than_slots(
    make_rank: MakeRank, make_prefill: MakePrefill, geometry: KVGeometry, slots_per_chunk: int
) -> None:
    rank = make_rank(geometry, slot_bytes=SMALL_SLOT)
    source = make_prefill(geometry, slot_bytes=SMALL_SLOT, slots_per_chunk=slots_per_chunk)
    pages = source.some_pages(320 // rank.geometry.page_size)
    room_pages = rank.open_room(1, len(pages))

    outcome = source.send(rank, 1, pages)

    assert (outcome.code, outcome.went_native, outcome.failures) == (0, False, {})
    assert_arrived(source, pages, rank, room_pages)
    assert rank.is_untouched(but=room_pages)
    assert outcome.record is not None
    assert outcome.record["subchunks"] > slots_per_chunk
    # Scattered pages on both sides, and still one write a sub-chunk.
    assert outcome.record["writes"] == len(source.engine.writes) == outcome.record["subchunks"]


@pytest.mark.parametrize(("slots_per_chunk", "staging_slots"), [(1, 8), (2, 2), (6, 1), (6, 8)])
def test_payloads_that_are_queued_before_the_last_one_is_packed(
    make_rank: MakeRank,
    make_prefill: MakePrefill,
    monkeypatch: pytest.MonkeyPatch,
    slots_per_chunk: int,
    staging_slots: int,
) -> None:
    """The order of a GPU, with fewer slots than the pipeline would like, too."""
    monkeypatch.setattr(chunk_sender, "packs_ahead", lambda device: 1)
    rank = make_rank(slot_bytes=SMALL_SLOT)
    source = make_prefill(slot_bytes=SMALL_SLOT, slots_per_chunk=slots_per_chunk, staging_slots=staging_slots)
    pages = source.some_pages(320)
    room_pages = rank.open_room(1, len(pages))

    outcome = source.send(rank, 1, pages)

    assert (outcome.code, outcome.went_native, outcome.failures) == (0, False, {})
    assert_arrived(source, pages, rank, room_pages)
    assert rank.is_untouched(but=room_pages)
    assert source.staging() == {"free": staging_slots, "in_use": 0, "quarantined": 0}


@pytest.mark.parametrize("geometry", [GEOMETRY, PAGED_BFLOAT16], ids=["page1-float32", "page16-bfloat16"])
@pytest.mark.parametrize(("profile", "budget"), [("int8", 0.6), ("spectrum", 0.55), ("spectrum", 0.4)])
def test_lossy_profiles_stay_within_error_and_budget(
    make_rank: MakeRank, make_prefill: MakePrefill, geometry: KVGeometry, profile: str, budget: float
) -> None:
    rank = make_rank(geometry)
    source = make_prefill(geometry, profile=profile, budget=budget)
    pages = source.some_pages(320 // rank.geometry.page_size)
    room_pages = rank.open_room(2, len(pages))
    planned = source.plan(2, pages, rank.handshake.slot_bytes)

    outcome = source.send(rank, 2, pages)

    assert (outcome.code, outcome.reason) == (0, "tiered")
    assert_arrived(source, pages, rank, room_pages, planned)
    assert rank.is_untouched(but=room_pages)
    record = outcome.record
    assert record is not None
    assert planned.plan.reachable
    assert 0 < record["achieved_b"] <= budget
    assert planned.plan.payload_bytes < record["wire_bytes"] <= planned.plan.wire_bytes
    assert sum(length for _, length in source.engine.writes) == planned.plan.payload_bytes


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("dtype", "budget"), [("float32", 0.28), ("bfloat16", 0.36)])
def test_scales_that_rows_share_arrive_within_error_and_budget(
    make_rank: MakeRank, make_prefill: MakePrefill, dtype: str, budget: float, page_size: int, tmp_path: Path
) -> None:
    profile = tmp_path / "shared-scales.yaml"
    profile.write_text(SHARED_SCALES)
    geometry = replace(GEOMETRY, page_size=page_size, dtype=dtype)
    rank = make_rank(geometry)
    source = make_prefill(geometry, profile=str(profile), budget=budget)
    pages = source.some_pages(384 // page_size)
    last = pool_slots_of_pages(np.array(pages[-1:]), page_size)[-3:] if page_size > 1 else []
    for buffer in (*source.buffers.k, *source.buffers.v):
        buffer[last] = 1000.0  # what an earlier prompt left in the unused slots of the last page
    room_pages = rank.open_room(2, len(pages))
    planned = source.plan(2, pages, rank.handshake.slot_bytes)

    outcome = source.send(rank, 2, pages)

    assert (outcome.code, outcome.reason) == (0, "tiered")
    assert_arrived(source, pages, rank, room_pages, planned)
    assert rank.is_untouched(but=room_pages)
    record = outcome.record
    assert record is not None
    assert planned.plan.reachable
    assert 0 < record["achieved_b"] <= budget
    # Most rows share scales; those of the last page do not, or the 1000 would be all that its block resolves.
    tiers = planned.plan.tiers
    assert np.count_nonzero(tiers == Tier.LOW) > len(tiers) / 4
    if page_size > 1:
        assert (tiers[-page_size:] == Tier.HIGH).all()


def test_chunks_of_a_room_fill_their_own_pages(make_rank: MakeRank, make_prefill: MakePrefill) -> None:
    rank, source = make_rank(), make_prefill()
    pages = source.some_pages(150)
    room_pages = rank.open_room(3, len(pages))
    for start, end in ((0, 70), (70, 149), (149, 150)):
        outcome = source.send(
            rank, 3, pages[start:end], page_start=start, room_pages=len(pages), last_chunk=end == len(pages)
        )
        assert outcome.reason == "tiered"
        assert rank.is_untouched(but=room_pages[:end])
    assert_arrived(source, pages, rank, room_pages)


def send_together(source: PrefillSide, rank: PeerRank, rooms: list[int], pages: list[int]) -> list[Outcome]:
    """Send the same pages to two rooms from a thread each, both with a write on the way before either goes on."""
    outcomes: dict[int, Outcome] = {}
    both_write = threading.Barrier(len(rooms))

    def wait_for_the_other(number: int) -> None:
        if number < len(rooms):
            with contextlib.suppress(threading.BrokenBarrierError):
                both_write.wait(0.5)

    def send(room: int) -> None:
        outcomes[room] = source.send(rank, room, pages)

    source.engine.on_submitted = wait_for_the_other
    threads = [threading.Thread(target=send, args=(room,)) for room in rooms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return [outcomes[room] for room in rooms]


@pytest.mark.parametrize(("staging_slots", "landing_slots"), [(4, 8), (2, 4), (1, 1)])
def test_concurrent_senders_share_slots_without_blocking_each_other(
    make_rank: MakeRank, make_prefill: MakePrefill, staging_slots: int, landing_slots: int
) -> None:
    rank = make_rank(slot_bytes=SMALL_SLOT, landing_slots=landing_slots, slot_wait_s=20)
    source = make_prefill(
        slot_bytes=SMALL_SLOT,
        staging_slots=staging_slots,
        landing_slots=landing_slots,
        slots_per_chunk=min(2, landing_slots),
        slot_wait_s=20,
    )
    pages, rooms = source.some_pages(130), [11, 12]
    room_pages = list(range(260))  # one room's pages apart from the other's
    for room, own in zip(rooms, (room_pages[::2], room_pages[1::2]), strict=True):
        rank.ask("open_room", room=room, pages=own)

    outcomes = send_together(source, rank, rooms, pages)

    assert [outcome.reason for outcome in outcomes] == ["tiered", "tiered"]
    assert max(outcome.seconds for outcome in outcomes) < 15
    assert_arrived(source, pages, rank, room_pages[::2])
    assert_arrived(source, pages, rank, room_pages[1::2])


def test_one_staging_slot_is_enough(make_rank: MakeRank, make_prefill: MakePrefill) -> None:
    rank = make_rank(slot_bytes=SMALL_SLOT)
    source = make_prefill(slot_bytes=SMALL_SLOT, staging_slots=1)
    pages = source.some_pages(200)
    room_pages = rank.open_room(4, len(pages))
    outcome = source.send(rank, 4, pages)
    assert outcome.reason == "tiered"
    assert outcome.seconds < 15
    assert_arrived(source, pages, rank, room_pages)


def test_every_use_of_a_slot_has_a_higher_generation(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw
) -> None:
    rank, source = make_rank(landing_slots=1), make_prefill()
    raw, pages = make_raw(source, rank), source.some_pages(8)
    rank.open_room(5, len(pages))
    generations: list[int] = []
    for chunk in range(1, 4):
        [grant] = raw.grants(5, len(pages), chunk)
        done = raw.ask(raw.land(grant, 5, pages, chunk))
        assert isinstance(done, Done)
        assert done.slot == grant.slot
        generations += [grant.generation, done.generation]
        raw.send_frames(encode(Close(chunk, [])))
        assert eventually(lambda: rank.state()["free"], 1) == 1
    assert generations == sorted(set(generations))


def test_a_waiting_chunk_gets_the_slot_that_another_gives_back(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw
) -> None:
    rank, source = make_rank(landing_slots=1, slot_wait_s=20), make_prefill(slot_wait_s=20)
    raw, pages = make_raw(source, rank), source.some_pages(8)
    rank.open_room(6, len(pages))
    raw.grants(6, len(pages))
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(source.send(rank, 6, pages)))
    thread.start()
    assert eventually(lambda: rank.state()["open_chunks"], 2) == 2
    raw.send_frames(encode(Close(1, [])))
    thread.join(30)
    assert [outcome.code for outcome in outcomes] == [0]
    assert not outcomes[0].went_native


def test_a_room_being_unpacked_delays_no_grant(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw
) -> None:
    """Not even one for a further chunk of the same room."""
    rank, source = make_rank(), make_prefill()
    raw, pages = make_raw(source, rank), source.some_pages(8)
    rank.open_room(7, len(pages))
    rank.ask("hold_room", room=7)
    try:
        raw.grants(7, len(pages))
    finally:
        rank.ask("let_room_go", room=7)
    raw.send_frames(encode(Close(1, [])))


def test_the_payload_holds_what_was_in_the_pool_at_send_time(make_rank: MakeRank, make_prefill: MakePrefill) -> None:
    """The comparison above can fail: other bytes in prefill's pool are other bytes on decode."""
    rank, source = make_rank(), make_prefill()
    pages = source.some_pages(20)
    room_pages = rank.open_room(8, len(pages))
    assert source.send(rank, 8, pages).code == 0
    assert_arrived(source, pages, rank, room_pages)
    source.buffers.v[2][pages[7], 1, 3] += 1
    with pytest.raises(AssertionError):
        assert_arrived(source, pages, rank, room_pages)
    assert not torch.equal(source.buffers.v[2][pages], rank.read_pool().v[2][room_pages])
