"""The lossless stage between two processes: what arrives is what was packed, and what is written is shorter."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch
from conftest import MakePrefill, MakeRank, MakeRaw
from decode_peer import GEOMETRY
from prefill_side import PrefillSide, assert_arrived, idle, next_room

from spectrumkv_sglang.kernels.checksum import payload_checksum
from spectrumkv_sglang.lossless.codec import CodecName, make_codec
from spectrumkv_sglang.transfer.messages import Close, Done, Failed, encode
from spectrumkv_sglang.transfer.outgoing_request import OutgoingRequest
from spectrumkv_sglang.transfer.slot_memory import Placement

pytestmark = pytest.mark.timeout(150)

HALVES = replace(GEOMETRY, dtype="bfloat16")
SMALL_SLOT = 64 * 1024
SLOW = 10.0  # bytes a second: the codec pays however busy the machine is


def on_a_link_of(source: PrefillSide, monkeypatch: pytest.MonkeyPatch, rate: float | None) -> None:
    compressing = source.rank._compressing
    assert compressing is not None
    monkeypatch.setattr(compressing._links, "estimate", lambda peer: rate)


def codec_counters(source: PrefillSide) -> dict[str, float]:
    samples = [sample for family in source._registry.collect() for sample in family.samples]
    names = ("spectrumkv:codec_payloads_total", "spectrumkv:codec_bytes_total")
    return {s.labels.get("outcome") or s.labels["side"]: s.value for s in samples if s.name in names and s.value}


@pytest.mark.parametrize("geometry", [GEOMETRY, HALVES], ids=["float32", "bfloat16"])
def test_native_kv_arrives_bit_by_bit_in_fewer_bytes(
    make_rank: MakeRank, make_prefill: MakePrefill, monkeypatch: pytest.MonkeyPatch, geometry: object
) -> None:
    rank = make_rank(geometry, slot_bytes=SMALL_SLOT)
    source = make_prefill(geometry, slot_bytes=SMALL_SLOT, codec=CodecName.zstd)
    on_a_link_of(source, monkeypatch, SLOW)
    pages = source.some_pages(320)
    room_pages = rank.open_room(1, len(pages))

    outcome = source.send(rank, 1, pages)

    assert (outcome.code, outcome.reason, outcome.failures) == (0, "tiered", {})
    assert_arrived(source, pages, rank, room_pages)
    assert rank.is_untouched(but=room_pages)
    record, counted = outcome.record, codec_counters(source)
    assert record is not None
    assert record["subchunks"] == counted["compressed"] > 1
    assert sum(length for _, length in source.engine.writes) == counted["out"] < 0.98 * counted["in"]
    assert counted["out"] < record["wire_bytes"] < record["native_bytes"]
    assert idle(rank)
    next_room(rank, source)


def test_tiered_payloads_pass_the_stage_as_they_are(
    make_rank: MakeRank, make_prefill: MakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The codes of the random rows are as good as random bytes; compressed by force, they arrive all the same."""
    rank = make_rank(HALVES)
    source = make_prefill(HALVES, profile="spectrum", budget=0.4, codec=CodecName.zstd)
    on_a_link_of(source, monkeypatch, SLOW)
    pages = source.some_pages(320)
    for room, forced in ((1, False), (2, True)):
        room_pages = rank.open_room(room, len(pages))
        if forced:
            compressing = source.rank._compressing
            assert compressing is not None
            monkeypatch.setattr(compressing._worth, "judge", lambda kind, payload, link: None)
        planned = source.plan(room, pages, rank.handshake.slot_bytes)
        outcome = source.send(rank, room, pages)
        assert (outcome.code, outcome.reason, outcome.failures) == (0, "tiered", {})
        assert_arrived(source, pages, rank, room_pages, planned)
    counted = codec_counters(source)
    assert counted["no_gain"] >= 1
    assert idle(rank)


def test_it_rests_until_the_link_is_known_and_where_the_link_is_fast(
    make_rank: MakeRank, make_prefill: MakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, source = make_rank(), make_prefill(codec=CodecName.zstd)
    pages = source.some_pages(200)
    for room, rate, outcome in ((1, None, "link_unknown"), (2, 1e12, "link_fast"), (3, SLOW, "compressed")):
        on_a_link_of(source, monkeypatch, rate)
        before = codec_counters(source).get(outcome, 0)
        room_pages = rank.open_room(room, len(pages))
        assert source.send(rank, room, pages).reason == "tiered"
        assert_arrived(source, pages, rank, room_pages)
        assert codec_counters(source)[outcome] > before


def test_writes_teach_it_the_link(make_rank: MakeRank, make_prefill: MakePrefill) -> None:
    rank, source = make_rank(), make_prefill(codec=CodecName.zstd)
    compressing = source.rank._compressing
    assert compressing is not None
    pages = source.some_pages(400)
    for room in range(1, 40):
        rank.open_room(room, len(pages))
        assert source.send(rank, room, pages).reason == "tiered"
        rank.ask("close_room", room=room)
        if compressing._links.estimate(rank.peer.session) is not None:
            break
    rate = compressing._links.estimate(rank.peer.session)
    assert rate is not None
    assert 1e4 < rate < 1e12  # the writer may be kept waiting for a core
    assert codec_counters(source)["link_unknown"] >= 1


def test_a_peer_that_lacks_the_codec_gets_the_payload_itself(
    make_rank: MakeRank, make_prefill: MakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, source = make_rank(), make_prefill(codec=CodecName.zstd)
    assert rank.handshake.codecs == ["zstd"]
    on_a_link_of(source, monkeypatch, SLOW)
    pages = source.some_pages(60)
    room_pages = rank.open_room(1, len(pages))
    outcome = source.send(rank, 1, pages, peer=msgspec.structs.replace(rank.handshake, codecs=[]))
    assert (outcome.code, outcome.reason) == (0, "tiered")
    assert_arrived(source, pages, rank, room_pages)
    assert outcome.record is not None
    assert codec_counters(source) == {"peer_lacks_codec": outcome.record["subchunks"]}


def test_a_codec_that_fails_leaves_the_payload_as_it_is(
    make_rank: MakeRank, make_prefill: MakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, source = make_rank(), make_prefill(codec=CodecName.zstd)
    compressing = source.rank._compressing
    assert compressing is not None
    on_a_link_of(source, monkeypatch, SLOW)

    def out_of_memory(source: object, out: object) -> int:
        raise MemoryError

    monkeypatch.setattr(compressing._codec, "compress", out_of_memory)
    pages = source.some_pages(60)
    room_pages = rank.open_room(1, len(pages))
    outcome = source.send(rank, 1, pages)
    assert (outcome.code, outcome.reason, outcome.failures) == (0, "tiered", {})
    assert_arrived(source, pages, rank, room_pages)
    assert outcome.record is not None
    assert codec_counters(source) == {"failed": outcome.record["subchunks"]}


def test_what_a_codec_takes_off_is_not_spent_on_later_chunks(
    make_rank: MakeRank, make_prefill: MakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank(HALVES)
    source = make_prefill(HALVES, codec=CodecName.zstd)
    on_a_link_of(source, monkeypatch, SLOW)
    pages = source.some_pages(100)
    rank.open_room(1, len(pages))
    request = OutgoingRequest()
    first = source.send(rank, 1, pages[:60], last_chunk=False, room_pages=len(pages), request=request)
    assert first.record is not None
    assert first.record["codec_saved_bytes"] > 0
    [sent] = request.sent.values()
    assert sent.wire == first.record["wire_bytes"] + first.record["codec_saved_bytes"] > sent.native


def test_device_memory_is_left_alone(make_prefill: MakePrefill, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_prefill(codec=CodecName.zstd)
    compressing = source.rank._compressing
    assert compressing is not None
    monkeypatch.setattr(compressing._memory, "placement", Placement.device)
    assert compressing.shrink(0, 4096, 1, "10.0.0.1:1", ["zstd"]) == (4096, "")
    assert codec_counters(source) == {"wrong_memory": 1}


@pytest.mark.parametrize("damage", ["other codec", "no bytes", "more than a slot", "garbage", "cut", "other payload"])
def test_what_is_not_compressed_as_announced_is_refused(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw, damage: str
) -> None:
    rank, source = make_rank(), make_prefill()
    raw, pages = make_raw(source, rank), source.some_pages(8)
    room_pages = rank.open_room(1, len(pages))
    [grant] = raw.grants(1, len(pages))
    commit = raw.land(grant, 1, pages)
    codec = make_codec(CodecName.zstd)
    assert codec is not None
    slot = raw._memory.view(0, commit.length)
    payload = slot.clone()
    assert payload_checksum(payload) == commit.checksum
    if damage == "other payload":
        payload[300] ^= 1
    stored = codec.compress(payload, slot)
    assert stored is not None
    if damage == "garbage":
        slot[20:40] = torch.arange(20, dtype=torch.uint8)
    code = source.engine.transfer_sync_write(rank.peer.session, raw._memory.address(0), grant.address, stored)
    assert code == 0
    changes = {
        "other codec": {"codec": "lz77", "stored": stored},
        "no bytes": {"codec": "zstd", "stored": 0},
        "more than a slot": {"codec": "zstd", "stored": rank.handshake.slot_bytes + 1},
        "cut": {"codec": "zstd", "stored": stored - 3},
    }.get(damage, {"codec": "zstd", "stored": stored})
    answer = raw.ask(msgspec.structs.replace(commit, **changes))
    assert isinstance(answer, Failed), answer
    claims = ("other codec", "no bytes", "more than a slot")
    assert answer.code == ("bad_message" if damage in claims else "checksum_mismatch")
    assert rank.is_untouched()
    raw.send_frames(encode(Close(1, [])))
    assert idle(rank)
    # The same by the book, after all that.
    [grant] = raw.grants(1, len(pages), chunk=2)
    commit = raw.land(grant, 1, pages, chunk=2)
    stored = codec.compress(raw._memory.view(0, commit.length), raw._memory.view(0, commit.length))
    assert stored is not None
    assert source.engine.transfer_sync_write(rank.peer.session, raw._memory.address(0), grant.address, stored) == 0
    assert isinstance(raw.ask(msgspec.structs.replace(commit, codec="zstd", stored=stored)), Done)
    assert_arrived(source, pages, rank, room_pages)
    raw.send_frames(encode(Close(2, [])))
    assert idle(rank)
    next_room(rank, source)
