"""What decode refuses between two processes: claims, bytes and garbage. The next room is unaffected, nothing leaks."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from urllib.parse import urlsplit

import msgspec
import pytest
import zmq
from conftest import MakePrefill, MakeRank, MakeRaw
from decode_peer import GEOMETRY, SLOT_BYTES, eventually
from prefill_side import assert_arrived, idle, next_room

from spectrumkv_sglang.transfer.messages import MAX_MESSAGE_BYTES, Close, Done, Failed, Granted, Refused, encode

pytestmark = pytest.mark.timeout(150)

SMALL_SLOT = 64 * 1024


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


def test_a_room_that_is_open_for_another_prompt_takes_no_payload(
    make_rank: MakeRank, make_prefill: MakePrefill
) -> None:
    """The former request's KV under an id that is used again: it goes into the later one's pages on no path."""
    rank, source = make_rank(), make_prefill()
    pages = source.some_pages(30)
    for count in (len(pages), len(pages) + 5):
        rank.open_room(1, count, prompt=2**64 - 1)
        outcome = source.send(rank, 1, pages, prompt=5, room_pages=count)
        assert (outcome.code, outcome.peer_suspect, outcome.went_native) == (-1, False, False)
        assert outcome.failures == {"other_request": 1}
        assert rank.is_untouched()
    assert rank.counters() == {"other_request": 2}
    room_pages = rank.open_room(1, len(pages), prompt=5)
    assert source.send(rank, 1, pages, prompt=5).reason == "tiered"
    assert_arrived(source, pages, rank, room_pages)
    rank.ask("close_room", room=1)
    for ours, theirs in ((0, 5), (5, 0)):  # one side could not tell
        rank.open_room(2, len(pages), prompt=theirs)
        assert source.send(rank, 2, pages, prompt=ours).reason == "tiered"
        rank.ask("close_room", room=2)
    assert idle(rank)
    next_room(rank, source)


def test_another_geometry_digest_is_refused(make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw) -> None:
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


def test_a_peer_whose_pages_have_another_size_is_never_sent_to_natively(
    make_rank: MakeRank, make_prefill: MakePrefill
) -> None:
    """Also one without this package, whose dtype and model nobody told us: an FP8 pool, another model."""
    rank, source = make_rank(), make_prefill()
    rank.open_room(1, 10)
    for peer in (None, rank.handshake, msgspec.structs.replace(rank.handshake, kv_heads=1)):
        fits = peer is rank.handshake  # what is tiered was checked against the handshake
        outcome = source.send(rank, 1, source.some_pages(10), peer=peer, native_misfit="a page has other bytes")
        if fits:
            assert (outcome.code, outcome.reason) == (0, "tiered")
            continue
        assert (outcome.code, outcome.peer_suspect, outcome.went_native) == (-1, False, False)
        assert outcome.failures == {"dtype_mismatch": 1}
    assert idle(rank)


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
    assert rank.counters() == {"garbage": 1}
    assert idle(rank)


def test_claims_that_contradict_each_other_are_refused(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw
) -> None:
    rank, source = make_rank(), make_prefill()
    raw, pages = make_raw(source, rank), source.some_pages(8)
    rank.open_room(1, len(pages))
    [grant] = raw.grants(1, len(pages), tiers=[0, 1, 2])
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
    rank, source = make_rank(), make_prefill(open_timeout_s=2, slot_wait_s=0)
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    liar = msgspec.structs.replace(rank.handshake, control_endpoint=f"tcp://127.0.0.1:{port}")
    answers: list[Callable[[int], bytes]] = [
        lambda chunk: b"SKVC garbage",
        lambda chunk: encode(Done(chunk, 0, 0, 1, 0.0)),
        lambda chunk: encode(Refused(chunk, "a code of the future", "?")),
        lambda chunk: encode(Refused(chunk, "bypass", "?")),  # of prefill's own decisions
        lambda chunk: encode(Refused(chunk, "internal_error", "?")),
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
    assert source.staging()["in_use"] == 0
    next_room(rank, source)


def test_a_grant_of_smaller_slots_than_promised_is_not_used(make_prefill: MakePrefill, make_rank: MakeRank) -> None:
    """Another decode process may have got the port since: a payload must never reach beyond its slot."""
    big, small = make_rank(), make_rank(slot_bytes=SMALL_SLOT)
    source = make_prefill()
    pages = source.some_pages(40)
    small.open_room(1, len(pages))
    outdated = msgspec.structs.replace(
        big.handshake, control_endpoint=small.handshake.control_endpoint, boot_id=small.handshake.boot_id
    )
    outcome = source.send(small, 1, pages, peer=outdated)
    assert (outcome.code, outcome.went_native, outcome.reason) == (0, True, "control_error")
    assert source.engine.writes == []
    assert idle(small)
    next_room(small, source)
