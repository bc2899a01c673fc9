"""Peers that hang, die or vanish: an error in time, nothing leaks, and the next room is unaffected.

The fixtures check that slots, chunks, threads and sockets of both processes return.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from conftest import MakePrefill, MakeRank, MakeRaw
from decode_peer import DecodePeer, eventually
from prefill_side import Outcome, idle, next_room

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.observability.transfer_spans import Span, TransferSpans, trace_transfers
from spectrumkv_sglang.transfer.messages import Close, Done, Failed, encode

pytestmark = pytest.mark.timeout(150)

SMALL_SLOT = 64 * 1024
ALL_SLOTS = SpectrumKVConfig().landing_slots
ALL_STAGING_SLOTS = SpectrumKVConfig().staging_slots


def test_a_stopped_peer_costs_no_more_than_the_open_timeout(
    make_rank: MakeRank, make_prefill: MakePrefill, peer: DecodePeer
) -> None:
    rank, source = make_rank(), make_prefill(open_timeout_s=0.5, slot_wait_s=0.1)
    rank.open_room(1, 10)
    next_room(rank, source)  # once over a connection that stands, once over a new one
    peer.stop()
    try:
        for _ in range(2):
            outcome = source.send(rank, 1, source.some_pages(10))
            assert (outcome.code, outcome.went_native, outcome.reason) == (0, True, "open_timeout")
            assert 0.6 <= outcome.seconds < 3
    finally:
        peer.resume()
    assert idle(rank)
    next_room(rank, source)


def test_writes_that_do_not_end_rest_their_slots_on_both_sides(
    make_rank: MakeRank, make_prefill: MakePrefill, peer: DecodePeer
) -> None:
    """The engine goes on with the writes when the peer wakes up, long after they were given up."""
    rank = make_rank(slot_bytes=SMALL_SLOT, quarantine_s=4)
    source = make_prefill(slot_bytes=SMALL_SLOT, write_timeout_s=0.5, quarantine_s=4)
    pages = source.some_pages(100)
    rank.open_room(1, len(pages))
    source.engine.on_written = lambda number: peer.stop()  # those that are under way then find nobody
    try:
        outcome = source.send(rank, 1, pages)
        unended = source.staging()["quarantined"]
    finally:
        peer.resume()
    assert unended >= 1
    assert (outcome.code, outcome.peer_suspect, outcome.went_native) == (-1, True, False)
    assert outcome.failures == {"write_timeout": unended}
    assert source.rank._writes.given_up == unended
    assert 0.5 <= outcome.seconds < 5
    wanted = {"in_use": 0, "quarantined": unended}
    assert eventually(lambda: {name: rank.state()[name] for name in wanted}, wanted, 3.9) == wanted
    source.engine.on_written = lambda number: None
    next_room(rank, source)

    def batches_kept() -> int:
        source.rank._writes.collect_ended()
        return source.rank._writes.given_up

    assert eventually(batches_kept, 0) == 0  # the engine was asked after the writes had ended: it frees their batches
    assert eventually(lambda: source.staging()["free"], ALL_STAGING_SLOTS, 20) == ALL_STAGING_SLOTS
    assert eventually(lambda: idle(rank), True, 20)


@pytest.fixture
def spans() -> Iterator[list[Span]]:
    """Spans of room 1."""
    emitted: list[Span] = []
    recorder = TransferSpans(lambda trace, thread, span: emitted.append(span))
    recorder.expect(1, "its trace")
    trace_transfers(recorder)
    yield emitted
    trace_transfers(None)


def test_an_unanswered_commit_times_out(
    make_rank: MakeRank, make_prefill: MakePrefill, peer: DecodePeer, spans: list[Span]
) -> None:
    rank, source = make_rank(), make_prefill(unpack_timeout_s=0.5)
    rank.open_room(1, 10)
    source.engine.on_written = lambda number: peer.stop()
    try:
        outcome = source.send(rank, 1, source.some_pages(10))
    finally:
        peer.resume()
    assert (outcome.code, outcome.peer_suspect, outcome.went_native) == (-1, False, False)
    assert outcome.failures == {"commit_timeout": 1}
    assert 0.5 <= outcome.seconds < 5
    [span] = spans
    assert span.error.startswith("commit_timeout: decode did not answer COMMIT")
    assert span.attributes["spectrumkv.cause"] == "commit_timeout"
    assert {"spectrumkv_pack", "spectrumkv_write"} <= {phase.name for phase in span.children}
    assert 0.5 <= span.end - span.start <= outcome.seconds
    source.engine.on_written = lambda number: None
    assert idle(rank)
    next_room(rank, make_prefill())


def test_an_unpack_that_hangs_keeps_its_slot_until_it_ends(make_rank: MakeRank, make_prefill: MakePrefill) -> None:
    rank, source = make_rank(), make_prefill(unpack_timeout_s=0.5)
    rank.open_room(1, 10)
    rank.ask("hold_room", room=1)
    try:
        outcome = source.send(rank, 1, source.some_pages(10))
        assert (outcome.code, outcome.failures) == (-1, {"commit_timeout": 1})
        assert eventually(lambda: rank.state()["in_use"], 1) == 1
        time.sleep(0.2)
        assert rank.state()["in_use"] == 1
    finally:
        rank.ask("let_room_go", room=1)
    assert idle(rank)
    next_room(rank, make_prefill())


def test_a_chunk_that_is_closed_while_it_is_unpacked_gives_its_slot_back_afterwards(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw
) -> None:
    rank, source = make_rank(), make_prefill()
    raw, pages = make_raw(source, rank), source.some_pages(8)
    rank.open_room(1, len(pages))
    [grant] = raw.grants(1, len(pages))
    commit = raw.land(grant, 1, pages)
    rank.ask("hold_room", room=1)
    try:
        raw.send_frames(encode(commit))
        raw.send_frames(encode(Close(1, [])))
        other = raw.grants(1, len(pages), chunk=2)  # so the COMMIT and the CLOSE have been read
        assert other[0].slot != grant.slot
        assert rank.state()["in_use"] == 2
    finally:
        rank.ask("let_room_go", room=1)
    assert isinstance(raw.receive(), Done)
    raw.send_frames(encode(Close(2, [])))
    assert idle(rank)


@pytest.fixture
def doomed(tmp_path: Path, resources_return: None) -> Iterator[DecodePeer]:
    """A decode process of this test's own."""
    doomed = DecodePeer(tmp_path / "doomed.log")
    yield doomed
    doomed.end()


def test_a_peer_killed_mid_write_is_suspect_and_its_successor_works(
    make_rank: MakeRank, make_prefill: MakePrefill, doomed: DecodePeer
) -> None:
    rank = make_rank(on=doomed, slot_bytes=SMALL_SLOT)
    source = make_prefill(
        slot_bytes=SMALL_SLOT, slots_per_chunk=8, open_timeout_s=1, slot_wait_s=0, unpack_timeout_s=5, quarantine_s=10
    )
    next_room(rank, source)
    pages = source.some_pages(380)
    rank.open_room(1, len(pages))
    standing_still = threading.Event()

    def stop(number: int) -> None:
        if not standing_still.is_set():
            doomed.stop()  # the next write cannot end before the kill, however fast it is
            standing_still.set()

    def kill(number: int) -> None:
        if standing_still.is_set():
            doomed.kill()

    source.engine.on_written, source.engine.on_submitted = stop, kill
    outcome = source.send(rank, 1, pages)
    source.engine.on_written = source.engine.on_submitted = lambda number: None
    assert (outcome.code, outcome.peer_suspect, outcome.went_native) == (-1, True, False)
    assert outcome.seconds < 15
    staging = source.staging()
    assert staging["in_use"] == 0
    assert staging["quarantined"] >= 1  # of the writes that were under way at once
    assert outcome.failures == {"write_failed": staging["quarantined"] + source.engine.refused}
    assert source.engine.refused <= 1  # to a peer that is gone already, where the engine looked it up again

    # The dead peer's rooms fail fast or go native; rooms of other peers are as before.
    again = source.send(rank, 2, pages[:10], peer=rank.handshake)
    assert again.went_native
    next_room(make_rank(), source)
    assert eventually(lambda: source.staging()["free"], ALL_STAGING_SLOTS, 30) == ALL_STAGING_SLOTS


@pytest.mark.parametrize("stage", ["before COMMIT", "mid unpack"])
def test_a_peer_killed_after_the_write_fails_the_room_in_time(
    make_rank: MakeRank, make_prefill: MakePrefill, doomed: DecodePeer, stage: str
) -> None:
    rank = make_rank(on=doomed)
    source = make_prefill(unpack_timeout_s=3)
    next_room(rank, source)
    rank.open_room(1, 10)
    killers: list[threading.Timer] = []

    def kill(number: int) -> None:
        if stage == "before COMMIT":
            doomed.kill()
            return
        killers.append(threading.Timer(0.3, doomed.kill))  # the COMMIT is out, and its room is held
        killers[-1].start()

    if stage == "mid unpack":
        rank.ask("hold_room", room=1)
    source.engine.on_written = kill
    outcome = source.send(rank, 1, source.some_pages(10))
    source.engine.on_written = lambda number: None
    for killer in killers:
        killer.join()
    assert (outcome.code, outcome.peer_suspect, outcome.went_native) == (-1, False, False)
    assert outcome.failures == {"commit_timeout": 1}
    assert outcome.seconds < 20
    next_room(make_rank(), source)


def test_a_prefill_that_vanishes_mid_unpack_leaves_nothing(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw
) -> None:
    rank, source = make_rank(write_timeout_s=2, lease_s=8, quarantine_s=0.2), make_prefill()
    raw, pages = make_raw(source, rank), source.some_pages(8)
    room_pages = rank.open_room(1, len(pages))
    [grant] = raw.grants(1, len(pages))
    rank.ask("hold_room", room=1)
    raw.send_frames(encode(raw.land(grant, 1, pages)))
    raw.grants(1, len(pages), chunk=2)  # so the COMMIT has been read
    raw.vanish()
    assert rank.state()["in_use"] == 2
    rank.ask("let_room_go", room=1)
    rank.ask("close_room", room=1)  # waits for an unpack that runs; one that had not begun is refused
    assert rank.is_untouched(but=room_pages)
    assert eventually(lambda: rank.state()["free"], ALL_SLOTS, 20) == ALL_SLOTS
    assert eventually(lambda: rank.state()["open_chunks"], 0, 20) == 0
    next_room(rank, source)


def test_a_new_decode_process_takes_over(make_rank: MakeRank, make_prefill: MakePrefill, doomed: DecodePeer) -> None:
    source = make_prefill()
    next_room(make_rank(), source)
    next_room(make_rank(on=doomed), source)


def test_a_write_to_nobody_fails_at_once(make_rank: MakeRank, make_prefill: MakePrefill) -> None:
    rank, source = make_rank(), make_prefill()
    rank.open_room(1, 10)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    outcome = source.send(rank, 1, source.some_pages(10), session=f"127.0.0.1:{port}")
    assert (outcome.code, outcome.peer_suspect, outcome.failures) == (-1, True, {"write_failed": 1})
    assert outcome.seconds < 15
    assert eventually(lambda: rank.state()["free"], ALL_SLOTS) == ALL_SLOTS
    next_room(rank, source)


def test_slots_of_a_prefill_that_vanished_come_back(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw
) -> None:
    rank, source = make_rank(lease_s=1.0, write_timeout_s=0.5, quarantine_s=1.5), make_prefill()
    raw = make_raw(source, rank)
    rank.open_room(1, 10)
    grants = raw.grants(1, 10, slots_wanted=ALL_SLOTS)
    assert len(grants) == ALL_SLOTS
    raw.vanish()
    started = time.monotonic()
    assert eventually(lambda: rank.state()["quarantined"], ALL_SLOTS, 5) == ALL_SLOTS
    assert time.monotonic() - started >= 0.9
    assert rank.counters() == {"slot_lease_expired": 1}
    assert rank.state()["open_chunks"] == 0
    outcome = source.send(rank, 1, source.some_pages(10))  # while they rest, chunks go native
    assert (outcome.went_native, outcome.reason) == (True, "pool_exhausted")
    assert eventually(lambda: rank.state()["free"], ALL_SLOTS, 5) == ALL_SLOTS
    next_room(rank, source)


def test_slots_of_a_dead_prefill_rest_as_soon_as_its_room_has_closed(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw
) -> None:
    """SGLang fails the rooms of a prefill that it hears nothing of: the slots do not wait for the lease as well."""
    rank, source = make_rank(lease_s=20, quarantine_s=1.5), make_prefill()
    raw = make_raw(source, rank)
    rank.open_room(1, 10)
    assert len(raw.grants(1, 10, slots_wanted=ALL_SLOTS)) == ALL_SLOTS
    raw.vanish()
    rank.ask("close_room", room=1)
    assert eventually(lambda: rank.state()["quarantined"], ALL_SLOTS, 15) == ALL_SLOTS
    assert rank.counters() == {"room_gone": 1}
    assert eventually(lambda: rank.state()["free"], ALL_SLOTS, 10) == ALL_SLOTS
    next_room(rank, source)
    assert rank.state()["open_chunks"] == 1  # without slots; it is known until its lease ends
    assert eventually(lambda: rank.state()["open_chunks"], 0, 30) == 0


def test_a_slow_prefill_whose_room_has_closed_is_told_so_and_never_to_go_native(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw
) -> None:
    rank, source = make_rank(quarantine_s=0.2), make_prefill()
    raw, pages = make_raw(source, rank), source.some_pages(8)
    rank.open_room(1, len(pages))
    [grant] = raw.grants(1, len(pages))
    commit = raw.land(grant, 1, pages)
    rank.ask("close_room", room=1)
    assert eventually(lambda: rank.state()["free"], ALL_SLOTS, 15) == ALL_SLOTS
    answer = raw.ask(commit)
    assert isinstance(answer, Failed)
    assert answer.code == "room_gone"
    assert rank.is_untouched()
    raw.send_frames(encode(Close(1, [grant.slot])))
    assert idle(rank)


@pytest.mark.parametrize("claim", [{}, {"page_start": 77}], ids=["for a room that is gone", "outside its pages"])
def test_a_prefill_that_goes_on_talking_does_not_hold_the_slots_of_a_closed_room(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw, claim: dict[str, int]
) -> None:
    rank, source = make_rank(lease_s=1.0, write_timeout_s=0.5, quarantine_s=0.2), make_prefill()
    raw, pages = make_raw(source, rank), source.some_pages(8)
    rank.open_room(1, len(pages))
    grants = raw.grants(1, len(pages), slots_wanted=ALL_SLOTS)
    assert len(grants) == ALL_SLOTS
    commit = msgspec.structs.replace(raw.land(grants[0], 1, pages), **claim)
    rank.ask("close_room", room=1)

    def slots_after_one_more_word() -> int:
        nonlocal commit
        answer = raw.ask(commit)
        assert isinstance(answer, Failed)
        assert answer.code in ("room_gone", "page_range", "stale_generation")
        commit = msgspec.structs.replace(commit, generation=commit.generation + (answer.code == "room_gone"))
        return rank.state()["in_use"]

    assert eventually(slots_after_one_more_word, 0) == 0
    assert rank.is_untouched()
    assert idle(rank)
    next_room(rank, source)


def test_a_commit_after_the_lease_is_refused(make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw) -> None:
    rank, source = make_rank(lease_s=0.6, write_timeout_s=0.5, quarantine_s=0.2), make_prefill()
    raw, pages = make_raw(source, rank), source.some_pages(8)
    rank.open_room(1, len(pages))
    [grant] = raw.grants(1, len(pages))
    commit = raw.land(grant, 1, pages)
    assert eventually(lambda: rank.state()["open_chunks"], 0) == 0
    answer = raw.ask(commit)
    assert isinstance(answer, Failed)
    assert answer.code == "stale_generation"
    assert rank.is_untouched()
    assert idle(rank)


def test_an_exhausted_pool_sends_the_chunk_native_after_its_wait(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw
) -> None:
    rank, source = make_rank(slot_wait_s=0.5), make_prefill(slot_wait_s=0.5)
    raw = make_raw(source, rank)
    rank.open_room(1, 10)
    grants = raw.grants(1, 10, slots_wanted=ALL_SLOTS)
    outcome = source.send(rank, 1, source.some_pages(10))
    assert (outcome.code, outcome.went_native, outcome.reason) == (0, True, "pool_exhausted")
    assert 0.5 <= outcome.seconds < 4
    raw.send_frames(encode(Close(1, [grants[0].slot])))
    wanted = {"in_use": 0, "quarantined": 1}
    assert eventually(lambda: {name: rank.state()[name] for name in wanted}, wanted, 3) == wanted
    next_room(rank, source)


def test_a_room_that_closes_while_its_chunk_waits_for_slots_does_not_go_native(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw
) -> None:
    rank, source = make_rank(slot_wait_s=20), make_prefill(slot_wait_s=20)
    raw = make_raw(source, rank)
    rank.open_room(1, 10)
    raw.grants(1, 10, slots_wanted=ALL_SLOTS)
    rank.open_room(2, 10)
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(source.send(rank, 2, source.some_pages(10))))
    thread.start()
    assert eventually(lambda: rank.state()["open_chunks"], 2) == 2
    rank.ask("close_room", room=2)
    thread.join(10)
    assert [(outcome.code, outcome.went_native, outcome.failures) for outcome in outcomes] == [
        (-1, False, {"room_gone": 1})
    ]
    raw.send_frames(encode(Close(1, [])))
    assert idle(rank)
    next_room(rank, source)


def test_a_room_aborted_on_prefill_while_it_waits_does_not_go_native(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw
) -> None:
    rank, source = make_rank(slot_wait_s=0.3), make_prefill(slot_wait_s=0.3)
    raw = make_raw(source, rank)
    rank.open_room(1, 10)
    raw.grants(1, 10, slots_wanted=ALL_SLOTS)
    outcome = source.send(rank, 1, source.some_pages(10), room_is_live=lambda: False)
    assert (outcome.code, outcome.went_native, outcome.failures) == (-1, False, {"room_gone": 1})
    raw.send_frames(encode(Close(1, [])))
    assert idle(rank)


def test_staging_slots_in_quarantine_are_not_waited_for(make_rank: MakeRank, make_prefill: MakePrefill) -> None:
    """With every staging slot resting until long after the wait, a chunk goes native at once, not a minute later."""
    rank, source = make_rank(), make_prefill(quarantine_s=60, staging_slots=2)
    for slot in source.rank._staging.lend(2):
        source.rank._staging.quarantine(slot)
    rank.open_room(1, 10)
    outcome = source.send(rank, 1, source.some_pages(10))
    assert (outcome.code, outcome.went_native, outcome.reason) == (0, True, "pool_exhausted")
    assert outcome.seconds < 3
    assert idle(rank)


def test_a_room_aborted_on_prefill_stops_between_subchunks(make_rank: MakeRank, make_prefill: MakePrefill) -> None:
    rank = make_rank(slot_bytes=SMALL_SLOT)
    source = make_prefill(slot_bytes=SMALL_SLOT)
    pages = source.some_pages(300)
    rank.open_room(1, len(pages))
    outcome = source.send(rank, 1, pages, room_is_live=lambda: len(source.engine.writes) < 3)
    assert (outcome.code, outcome.went_native, outcome.failures) == (-1, False, {"room_gone": 1})
    assert len(source.engine.writes) == 3
    assert idle(rank)
    next_room(rank, source)
