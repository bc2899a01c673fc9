"""Faults between two processes: each ends in a counted error within its time, leaks nothing and spares the next room.

Every test checks through its fixtures that slots, chunks, threads and sockets of both processes return; the
``next_room`` at its end shows that the same two ranks go on.
"""

from __future__ import annotations

import itertools
import random
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from conftest import MakePrefill, MakeRank, MakeRaw
from two_ranks import (
    GEOMETRY,
    SLOT_BYTES,
    DecodePeer,
    PeerRank,
    PrefillSide,
    assert_arrived,
    eventually,
)

from spectrumkv_sglang.transfer.messages import MAX_MESSAGE_BYTES, Close, Done, Failed, Granted, Refused, encode

pytestmark = pytest.mark.timeout(90)

SMALL_SLOT = 64 * 1024
ALL_SLOTS = 8
_rooms = itertools.count(1000)


def next_room(rank: PeerRank, source: PrefillSide) -> None:
    """A fresh room between the same two ranks goes through, tiered and bit-exact, and soon."""
    room, pages = next(_rooms), source.some_pages(60)
    room_pages = rank.open_room(room, len(pages))
    outcome = source.send(rank, room, pages)
    assert (outcome.code, outcome.reason, outcome.failures) == (0, "tiered", {})
    assert outcome.seconds < 10
    assert_arrived(source, pages, rank, room_pages)
    rank.ask("close_room", room=room)


def idle(rank: PeerRank) -> bool:
    """Whether the rank holds no chunk, and no slot is lent or in quarantine, at once or very soon."""
    wanted = {"free": rank.handshake.landing_slots, "in_use": 0, "quarantined": 0, "open_chunks": 0}
    return eventually(lambda: {name: rank.state()[name] for name in wanted}, wanted, 5) == wanted


# ---- what decode refuses ---------------------------------------------------------------------------------------------


def test_an_unknown_room_fails(make_rank: MakeRank, make_prefill: MakePrefill) -> None:
    rank, source = make_rank(), make_prefill()
    outcome = source.send(rank, 404, source.some_pages(10))
    assert (outcome.code, outcome.peer_suspect, outcome.went_native) == (-1, False, False)
    assert outcome.failures == {"room_gone": 1}
    assert idle(rank)
    next_room(rank, source)


def test_pages_outside_the_room_fail(make_rank: MakeRank, make_prefill: MakePrefill) -> None:
    rank, source = make_rank(), make_prefill()
    rank.open_room(1, 10)
    for start, count in ((0, 11), (1, 10), (10, 1), (2**31, 1)):
        outcome = source.send(rank, 1, source.some_pages(count), page_start=start)
        assert (outcome.code, outcome.peer_suspect, outcome.went_native) == (-1, False, False)
        assert outcome.failures == {"page_range": 1}
    assert rank.is_untouched()
    assert idle(rank)
    next_room(rank, source)


@pytest.mark.parametrize(("start", "count"), [(0, 5), (1, 8), (9, 1), (3, 2**31 - 1), (2**32 - 1, 1)])
def test_a_commit_outside_the_opened_pages_is_refused(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw, start: int, count: int
) -> None:
    rank, source = make_rank(), make_prefill()
    raw, pages = make_raw(source, rank), source.some_pages(8)
    rank.open_room(1, 12)
    [grant] = raw.grants(1, 4, page_start=1)  # pages 1 to 4 of the room's 12
    commit = raw.land(grant, 1, pages[:4])
    answer = raw.ask(msgspec.structs.replace(commit, page_start=start, page_count=count))
    assert isinstance(answer, Failed)
    assert answer.code == "page_range"
    assert rank.is_untouched()
    assert rank.counters() == {"page_range": 1}
    raw.send_frames(encode(Close(1, [])))
    assert idle(rank)
    next_room(rank, source)


def test_a_room_retired_before_commit_is_not_written(make_rank: MakeRank, make_prefill: MakePrefill) -> None:
    rank, source = make_rank(), make_prefill()
    pages = source.some_pages(30)
    rank.open_room(1, len(pages))
    source.engine.on_written = lambda number: rank.ask("close_room", room=1)
    outcome = source.send(rank, 1, pages)
    assert (outcome.code, outcome.peer_suspect, outcome.went_native) == (-1, False, False)
    assert outcome.failures == {"room_gone": 1}
    assert rank.is_untouched()
    source.engine.on_written = lambda number: None
    assert idle(rank)
    next_room(rank, source)


def test_a_room_that_was_opened_anew_takes_no_payload_of_its_former_self(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw
) -> None:
    rank, source = make_rank(), make_prefill()
    raw, pages = make_raw(source, rank), source.some_pages(8)
    rank.open_room(1, len(pages))
    [grant] = raw.grants(1, len(pages))
    commit = raw.land(grant, 1, pages)
    rank.ask("close_room", room=1)
    rank.open_room(1, len(pages))  # another request under the same room id
    answer = raw.ask(commit)
    assert isinstance(answer, Failed)
    assert answer.code == "room_gone"
    assert rank.is_untouched()
    raw.send_frames(encode(Close(1, [])))
    assert idle(rank)
    next_room(rank, source)


def test_another_geometry_digest_is_refused(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw
) -> None:
    rank, source = make_rank(), make_prefill()
    raw = make_raw(source, rank)
    rank.open_room(1, 4)
    answer = raw.ask(raw.opening(1, 4, geometry_digest=GEOMETRY.digest() ^ 1))
    assert isinstance(answer, Refused)
    assert answer.code == "geometry_mismatch"
    assert idle(rank)
    next_room(rank, source)


def test_another_geometry_goes_native_and_another_dtype_fails(make_rank: MakeRank, make_prefill: MakePrefill) -> None:
    rank = make_rank()
    rank.open_room(1, 10)
    fewer_heads = make_prefill(replace(GEOMETRY, kv_heads=1))
    outcome = fewer_heads.send(rank, 1, fewer_heads.some_pages(10))
    assert (outcome.code, outcome.went_native, outcome.reason) == (0, True, "geometry_mismatch")
    halves = make_prefill(replace(GEOMETRY, dtype="float16"))
    outcome = halves.send(rank, 1, halves.some_pages(10))
    assert (outcome.code, outcome.went_native, outcome.failures) == (-1, False, {"dtype_mismatch": 1})
    next_room(rank, make_prefill())


@pytest.mark.parametrize("table", [b"", b"\x03", b"\x05" + b"\0" * 36, b"\x03" + b"\xee" * 36])
def test_a_wrong_precision_table_is_refused(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw, table: bytes
) -> None:
    rank, source = make_rank(), make_prefill()
    raw = make_raw(source, rank)
    rank.open_room(1, 4)
    answer = raw.ask(raw.opening(1, 4, table=table))
    assert isinstance(answer, Refused)
    assert answer.code == "control_error"
    assert idle(rank)


def test_claims_that_contradict_each_other_are_refused(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw
) -> None:
    rank, source = make_rank(), make_prefill()
    raw, pages = make_raw(source, rank), source.some_pages(8)
    rank.open_room(1, len(pages))
    [grant] = raw.grants(1, len(pages))
    for lie in (
        {"tier_map": b""},
        {"tier_map": b"\xff\xff"},
        {"rows_per_tier": [7, 1, 0]},
        {"rows_per_tier": [8]},
        {"length": 2**64 - 1},
        {"length": 256},
    ):
        commit = msgspec.structs.replace(raw.land(grant, 1, pages), **lie)
        answer = raw.ask(commit)
        assert isinstance(answer, Failed), lie
        assert answer.code == "bad_message", lie
        grant = msgspec.structs.replace(grant, generation=grant.generation + 1)
    assert rank.is_untouched()
    answer = raw.ask(raw.land(grant, 1, pages))
    assert isinstance(answer, Done)
    raw.send_frames(encode(Close(1, [])))
    assert idle(rank)


# ---- late and broken bytes -------------------------------------------------------------------------------------------


def test_bytes_that_change_after_the_write_are_noticed(make_rank: MakeRank, make_prefill: MakePrefill) -> None:
    rank, source = make_rank(), make_prefill()
    pages = source.some_pages(40)
    rank.open_room(1, len(pages))

    def late_byte(number: int) -> None:
        slot = (source.engine.writes[number][0] - source.engine.writes[0][0]) // SLOT_BYTES
        rank.ask("flip_byte", slot=slot, offset=5000)

    source.engine.on_written = late_byte
    outcome = source.send(rank, 1, pages)
    assert (outcome.code, outcome.went_native, outcome.reason) == (0, True, "payload_rejected")
    assert outcome.failures == {"checksum_mismatch": 1}
    assert rank.counters() == {"checksum_mismatch": 1}
    assert rank.is_untouched()
    assert idle(rank)
    source.engine.on_written = lambda number: None
    next_room(rank, source)


def test_a_replayed_commit_is_refused(make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw) -> None:
    rank, source = make_rank(), make_prefill()
    raw, pages = make_raw(source, rank), source.some_pages(8)
    room_pages = rank.open_room(1, len(pages))
    [grant] = raw.grants(1, len(pages))
    commit = raw.land(grant, 1, pages)
    done = raw.ask(commit)
    assert isinstance(done, Done)
    assert_arrived(source, pages, rank, room_pages)

    for stale in (
        commit,  # its generation is over
        msgspec.structs.replace(commit, generation=done.generation),  # the bytes are of the generation before
        msgspec.structs.replace(commit, slot=grant.slot + 1),
        msgspec.structs.replace(commit, slot=2**32 - 1),
        msgspec.structs.replace(commit, chunk=2),
    ):
        answer = raw.ask(stale)
        assert isinstance(answer, Failed)
        assert answer.code == "stale_generation"
    raw.send_frames(encode(Close(1, [])))
    assert idle(rank)
    answer = raw.ask(commit)
    assert isinstance(answer, Failed)
    assert answer.code == "stale_generation"
    assert rank.counters() == {"stale_generation": 6}
    next_room(rank, source)


@pytest.mark.parametrize("wrong", [{"room": 2}, {"sequence": 1}, {"generation": 99}, {"table_digest": 0}])
def test_a_payload_whose_prologue_is_anothers_is_refused(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw, wrong: dict[str, int]
) -> None:
    rank, source = make_rank(), make_prefill()
    raw, pages = make_raw(source, rank), source.some_pages(8)
    rank.open_room(1, len(pages))
    [grant] = raw.grants(1, len(pages))
    answer = raw.ask(raw.land(grant, 1, pages, prologue=wrong))
    assert isinstance(answer, Failed)
    assert answer.code == "stale_generation"
    assert next(iter(wrong)) in answer.message
    assert rank.is_untouched()
    raw.send_frames(encode(Close(1, [])))
    assert idle(rank)
    next_room(rank, source)


def test_a_rejected_payload_of_a_room_that_is_gone_does_not_go_native(
    make_rank: MakeRank, make_prefill: MakePrefill
) -> None:
    """The first payload breaks; before its answer is read, the room goes and the second payload is refused for it."""
    rank = make_rank(slot_bytes=SMALL_SLOT)
    source = make_prefill(slot_bytes=SMALL_SLOT, slots_per_chunk=4)
    pages = source.some_pages(80)  # more than two payloads, fewer than slots
    rank.open_room(1, len(pages))

    def break_first_then_close(number: int) -> None:
        if number == 0:
            rank.ask("flip_byte", slot=0, offset=5000)
        elif number == 1:
            eventually(rank.counters, {"checksum_mismatch": 1})
            rank.ask("close_room", room=1)

    source.engine.on_written = break_first_then_close
    outcome = source.send(rank, 1, pages)
    assert (outcome.code, outcome.went_native) == (-1, False)
    assert outcome.failures == {"checksum_mismatch": 1, "room_gone": 1}
    assert idle(rank)
    source.engine.on_written = lambda number: None
    next_room(rank, source)


# ---- garbage on the control port -------------------------------------------------------------------------------------


def test_garbage_on_the_control_port_disturbs_nobody(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw
) -> None:
    rank, source = make_rank(), make_prefill()
    raw, pages = make_raw(source, rank), source.some_pages(4)
    rank.open_room(1, len(pages))
    numbers = random.Random(0)
    good = encode(raw.opening(1, len(pages)))
    bad = [numbers.randbytes(numbers.randrange(200)) for _ in range(100)]
    bad += [good[:end] for end in range(len(good))]
    bad += [good + b"\0", good[:4] + b"\xff\xff" + good[6:], encode(Granted(1, [], 1)), b"x" * MAX_MESSAGE_BYTES]
    for frame in bad:
        raw.send_frames(frame)
    raw.send_frames(good, good)
    raw.send_frames(*[b""] * 50)
    assert eventually(rank.counters, {"garbage": len(bad) + 2}, 30) == {"garbage": len(bad) + 2}
    [grant] = raw.grants(1, len(pages), chunk=5)  # the same socket is served as before
    raw.send_frames(encode(Close(5, [grant.slot])))

    # Not even ZMQ: another protocol, half a greeting, and a message that announces 2^60 bytes.
    host, port = urlsplit(rank.handshake.control_endpoint).netloc.split(":")
    for raw_bytes in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\0\0\0", b"\xff" + b"\0" * 8 + b"\x7f\x03" + b"\xff" * 200):
        with socket.create_connection((host, int(port)), 5) as connection:
            connection.sendall(raw_bytes)
    next_room(rank, source)
    assert idle(rank)


def test_a_message_beyond_the_limit_only_costs_its_sender_the_connection(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw
) -> None:
    rank, source = make_rank(), make_prefill()
    raw = make_raw(source, rank)
    raw.send_frames(b"x" * (MAX_MESSAGE_BYTES + 1))
    next_room(rank, source)
    assert idle(rank)


def test_answers_that_cannot_be_read_or_were_not_asked_for(make_prefill: MakePrefill, make_rank: MakeRank) -> None:
    """A decode that answers OPEN with garbage, or with a message for another moment: the chunk goes native."""
    import threading

    import zmq

    rank, source = make_rank(), make_prefill(open_timeout_s=2, slot_wait_s=0)
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    liar = msgspec.structs.replace(rank.handshake, control_endpoint=f"tcp://127.0.0.1:{port}")
    answers = [
        lambda chunk: b"SKVC garbage",
        lambda chunk: encode(Done(chunk, 0, 0, 1, 0.0)),
        lambda chunk: encode(Refused(chunk, "a code of the future", "?")),
        lambda chunk: encode(Granted(chunk + 1, [], 1)),  # too few slots to be valid
    ]

    def answer() -> None:
        for make in answers:
            while True:
                identity, frame = router.recv_multipart()
                message = msgspec.msgpack.decode(frame[8:])
                if message["type"] == "Open":
                    break
            router.send_multipart([identity, make(message["chunk"])])

    thread = threading.Thread(target=answer)
    thread.start()
    for _ in answers:
        outcome = source.send(rank, 1, source.some_pages(4), peer=liar)
        assert (outcome.code, outcome.went_native, outcome.reason) == (0, True, "control_error")
    thread.join(10)
    context.destroy(linger=0)
    assert source.staging()["free"] == 4
    next_room(rank, source)


def test_a_grant_of_smaller_slots_than_promised_is_not_used(make_prefill: MakePrefill, make_rank: MakeRank) -> None:
    """Another decode process may have got the port since: a payload must never reach beyond its slot."""
    big, small = make_rank(), make_rank(slot_bytes=SMALL_SLOT)
    source = make_prefill()
    pages = source.some_pages(40)
    small.open_room(1, len(pages))
    outdated = msgspec.structs.replace(big.handshake, control_endpoint=small.handshake.control_endpoint)
    outcome = source.send(small, 1, pages, peer=outdated)
    assert (outcome.code, outcome.went_native, outcome.reason) == (0, True, "control_error")
    assert source.engine.writes == []
    assert idle(small)
    next_room(small, source)


# ---- peers that hang, die or vanish ----------------------------------------------------------------------------------


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


def test_an_unanswered_commit_times_out(make_rank: MakeRank, make_prefill: MakePrefill, peer: DecodePeer) -> None:
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


def test_closing_a_room_stops_what_waits_to_be_unpacked(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw
) -> None:
    rank, source = make_rank(), make_prefill()
    raw, pages = make_raw(source, rank), source.some_pages(8)
    rank.open_room(1, len(pages))
    rank.open_room(2, 1)
    [grant] = raw.grants(1, len(pages))
    commit = raw.land(grant, 1, pages)
    rank.ask("hold_room", room=1)
    try:
        raw.send_frames(encode(commit))
        time.sleep(0.2)  # the unpack waits for the room
        raw.send_frames(encode(Close(1, [])))
    finally:
        rank.ask("let_room_go", room=1)
    assert isinstance(raw.receive(), Done)
    rank.ask("close_room", room=1)
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
    source = make_prefill(slot_bytes=SMALL_SLOT, open_timeout_s=1, slot_wait_s=0, unpack_timeout_s=5, quarantine_s=1.5)
    next_room(rank, source)
    pages = source.some_pages(380)
    rank.open_room(1, len(pages))
    written = len(source.engine.writes)

    def kill_at_third(number: int) -> None:
        if number == written + 2:
            doomed.kill()

    source.engine.on_submitted = kill_at_third
    outcome = source.send(rank, 1, pages)
    source.engine.on_submitted = lambda number: None
    assert (outcome.code, outcome.peer_suspect, outcome.went_native) == (-1, True, False)
    assert outcome.failures == {"write_failed": 1}
    assert outcome.seconds < 15
    staging = source.staging()
    assert staging["in_use"] == 0
    assert staging["quarantined"] == 1

    # The dead peer's rooms fail fast or go native; rooms of other peers are as before.
    again = source.send(rank, 2, pages[:10], peer=rank.handshake)
    assert again.went_native
    next_room(make_rank(), source)
    assert eventually(lambda: source.staging()["free"], 4) == 4


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
    raw._socket.close(linger=0)
    raw._socket = raw._context.socket(6)
    started = time.monotonic()
    assert eventually(lambda: rank.state()["quarantined"], ALL_SLOTS, 5) == ALL_SLOTS
    assert time.monotonic() - started >= 0.9
    assert rank.counters() == {"slot_lease_expired": 1}
    assert rank.state()["open_chunks"] == 0
    outcome = source.send(rank, 1, source.some_pages(10))  # while they rest, chunks go native
    assert (outcome.went_native, outcome.reason) == (True, "pool_exhausted")
    assert eventually(lambda: rank.state()["free"], ALL_SLOTS, 5) == ALL_SLOTS
    next_room(rank, source)


def test_a_commit_after_the_lease_is_refused(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw
) -> None:
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
