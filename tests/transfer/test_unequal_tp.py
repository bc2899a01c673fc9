"""Chunks between ranks of unequal TP sizes over the real Mooncake engine: each writes its own heads, and no other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from conftest import MakePrefill, MakeRank, MakeRaw
from decode_peer import Pages, PeerRank
from decode_process import UNTOUCHED
from prefill_side import Outcome, PrefillSide, assert_arrived, idle

from spectrumkv_sglang.payload.codec import KVBuffers
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.transfer.messages import Close, Done, Failed, Granted, Refused, encode
from spectrumkv_sglang.transfer.shared_heads import RankHeads, heads_of_rank
from spectrumkv_sglang.transfer.unpacking import pool_slots_of_pages

pytestmark = pytest.mark.timeout(150)

TOTAL = 4
MODEL = KVGeometry(layers=2, kv_heads=TOTAL, head_dim=64, v_head_dim=32, page_size=1, dtype="bfloat16")
SMALL_SLOT = 64 * 1024


def heads(tp_size: int, rank: int, total: int = TOTAL) -> RankHeads:
    found = heads_of_rank(total, tp_size, rank, max(1, total // tp_size))
    assert found is not None
    return found


def of(model: KVGeometry, held: RankHeads) -> KVGeometry:
    return replace(model, kv_heads=held.count)


class Split:
    """Prefill ranks that hold parts of one model's random KV, and what each decode rank must hold in the end."""

    def __init__(self, model: KVGeometry, prefill: list[RankHeads], make: MakePrefill, **config: Any) -> None:
        self.model = model
        self.ranks = [make(of(model, held), heads=held, **config) for held in prefill]
        slots = self.ranks[0].view.pool_slots
        generator = torch.Generator().manual_seed(5)

        def pool(dim: int) -> list[torch.Tensor]:
            shape, dtype = (slots, model.kv_heads, dim), getattr(torch, model.dtype)
            return [torch.randn(shape, generator=generator).to(dtype) for _ in range(model.layers)]

        self.whole = KVBuffers(pool(model.head_dim), pool(model.v_head_dim))
        for rank, held in zip(self.ranks, prefill, strict=True):
            for mine, all_heads in zip((*rank.buffers.k, *rank.buffers.v), self._tensors(), strict=True):
                mine.copy_(all_heads[:, held.first : held.end])

    def _tensors(self) -> list[torch.Tensor]:
        return [*self.whole.k, *self.whole.v]

    def assert_arrived(self, pages: Pages, rank: PeerRank, room_pages: Pages, got: range, held: RankHeads) -> None:
        """Heads ``got`` of the model lie bit by bit in the room; the rank's other heads, and pages, are untouched."""
        rows = pool_slots_of_pages(torch.tensor(pages).numpy(), self.model.page_size)
        room_rows = pool_slots_of_pages(torch.tensor(room_pages).numpy(), self.model.page_size)
        pool = rank.read_pool()
        others = [head for head in range(held.first, held.end) if head not in got]
        for sent, arrived in zip(self._tensors(), (*pool.k, *pool.v), strict=True):
            for head in got:
                assert torch.equal(sent[rows, head], arrived[room_rows, head - held.first]), head
            assert bool((arrived[:, [head - held.first for head in others]] == UNTOUCHED).all())
        assert rank.is_untouched(but=room_pages)


def sliced(source: PrefillSide, rank: PeerRank, room: int, pages: Pages, **changes: Any) -> Outcome:
    outcome = source.send(rank, room, pages, sliced=True, **changes)
    assert (outcome.code, outcome.went_native, outcome.failures) == (0, False, {})
    assert outcome.reason == "tiered"
    return outcome


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("prefill_tp", "total"), [(2, 4), (4, 4), (2, 2)])
def test_several_prefill_ranks_fill_one_decode_rank(
    make_rank: MakeRank, make_prefill: MakePrefill, prefill_tp: int, total: int, page_size: int
) -> None:
    model = replace(MODEL, kv_heads=total, page_size=page_size)
    own = heads(1, 0, total)
    rank = make_rank(model, heads=own, slot_bytes=SMALL_SLOT)
    parts = [heads(prefill_tp, number, total) for number in range(prefill_tp)]
    split = Split(model, parts, make_prefill, slot_bytes=SMALL_SLOT)
    pages = split.ranks[0].some_pages(160 // page_size)
    room_pages = rank.open_room(1, len(pages))

    for source, part in zip(split.ranks, parts, strict=True):
        record = sliced(source, rank, 1, pages).record
        assert record is not None
        share = part.count * model.native_bytes_per_token // total
        assert record["native_bytes"] == len(pages) * page_size * share
        split.assert_arrived(pages, rank, room_pages, range(part.end), own)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("decode_tp", "total"), [(2, 4), (4, 4), (2, 2)])
def test_one_prefill_rank_gives_each_decode_rank_its_own_heads(
    make_rank: MakeRank, make_prefill: MakePrefill, decode_tp: int, total: int, page_size: int
) -> None:
    model = replace(MODEL, kv_heads=total, page_size=page_size)
    split = Split(model, [heads(1, 0, total)], make_prefill)
    [source] = split.ranks
    pages = source.some_pages(160 // page_size)
    for number in range(decode_tp):
        own = heads(decode_tp, number, total)
        rank = make_rank(of(model, own), heads=own)
        room_pages = rank.open_room(1, len(pages))
        sliced(source, rank, 1, pages)
        split.assert_arrived(pages, rank, room_pages, range(own.first, own.end), own)


def test_ranks_in_between(make_rank: MakeRank, make_prefill: MakePrefill) -> None:
    """Prefill TP 4 to decode TP 2, lossy, in chunks: each row stays within its precision's bound."""
    own = heads(2, 1)
    rank = make_rank(of(MODEL, own), heads=own)
    for number in (2, 3):
        part = heads(4, number)
        source = make_prefill(of(MODEL, part), heads=part, profile="int8", budget=0.6)
        pages = source.some_pages(100)
        room_pages = rank.open_room(number, len(pages))
        planned = source.plan(number, pages, rank.handshake.slot_bytes)
        outcome = sliced(source, rank, number, pages)
        record = outcome.record
        assert record is not None
        assert record["achieved_b"] < 0.6
        at = part.first - own.first
        assert_arrived(source, pages, _Heads(rank, at, part.count), room_pages, planned)
        rank.ask("close_room", room=number)


class _Heads:
    """Some heads of a rank's pool."""

    def __init__(self, rank: PeerRank, first: int, count: int) -> None:
        self._rank, self._first, self._count = rank, first, count

    def read_pool(self) -> KVBuffers:
        pool = self._rank.read_pool()
        return KVBuffers(*([x[:, self._first :][:, : self._count] for x in part] for part in (pool.k, pool.v)))


def test_ranks_whose_heads_do_not_lie_in_each_other_go_native(make_rank: MakeRank, make_prefill: MakePrefill) -> None:
    own = RankHeads(0, 2, TOTAL)
    rank = make_rank(of(MODEL, own), heads=own)
    unknown = make_rank(of(MODEL, own))
    cases = [
        (RankHeads(2, 2, TOTAL), rank),  # nothing in common
        (RankHeads(1, 2, TOTAL), rank),  # half of it
        (RankHeads(0, 1, 2), rank),  # another model
        (RankHeads(0, 1, TOTAL), unknown),  # decode does not say
        (None, rank),  # we do not know
    ]
    for number, (held, peer) in enumerate(cases):
        source = make_prefill(replace(MODEL, kv_heads=held.count if held else 1), heads=held)
        pages = source.some_pages(10)
        peer.open_room(number, len(pages))
        outcome = source.send(peer, number, pages, sliced=True, page_bytes=100)
        assert (outcome.code, outcome.went_native, outcome.reason) == (0, True, "tp_mismatch"), held
        assert outcome.record is not None
        assert outcome.record["native_bytes"] == 10 * 100
        peer.ask("close_room", room=number)
    assert rank.is_untouched()
    assert unknown.is_untouched()


def test_whole_pages_are_not_sent_to_a_rank_with_other_heads(make_rank: MakeRank, make_prefill: MakePrefill) -> None:
    """As SGLang never asks: it sends heads where the TP sizes differ."""
    own = heads(2, 0)
    rank = make_rank(of(MODEL, own), heads=own)
    source = make_prefill(MODEL, heads=heads(1, 0))
    pages = source.some_pages(10)
    rank.open_room(1, len(pages))
    assert source.send(rank, 1, pages).reason == "geometry_mismatch"
    assert rank.is_untouched()


@pytest.mark.parametrize(
    ("first", "count"), [(4, 1), (3, 2), (0, 1), (0, 4), (1, 3), (2**32 - 1, 2), (2**32 - 2, 2), (0, 2**16 - 1)]
)
def test_a_head_range_that_decode_does_not_have_is_refused(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw, first: int, count: int
) -> None:
    """Outside the pool, or of another number of heads than the geometry's digest says."""
    refuses_heads(make_rank, make_prefill, make_raw, heads(2, 1), first, count)


@pytest.mark.parametrize("part", [RankHeads(1, 2, TOTAL), RankHeads(0, 3, TOTAL), RankHeads(1, 3, TOTAL)], ids=str)
def test_a_head_range_that_no_split_gives_is_refused(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw, part: RankHeads
) -> None:
    """Of which a peer could name hundreds, each with kernels and a view of its own."""
    refuses_heads(make_rank, make_prefill, make_raw, part, part.first, part.count)


def refuses_heads(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw, part: RankHeads, first: int, count: int
) -> None:
    rank = make_rank(MODEL, heads=heads(1, 0))
    source = make_prefill(of(MODEL, part), heads=part)
    raw, pages = make_raw(source, rank), source.some_pages(8)
    rank.open_room(1, len(pages))
    answer = raw.ask(raw.opening(1, len(pages), first_head=first, heads=count))
    assert isinstance(answer, Refused)
    assert answer.code == "geometry_mismatch"
    assert rank.is_untouched()
    assert idle(rank)


@pytest.mark.parametrize("first", [0, 2])
def test_a_commit_writes_the_heads_of_its_open_and_no_other(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw, first: int
) -> None:
    part = RankHeads(first, 2, TOTAL)
    rank = make_rank(MODEL, heads=heads(1, 0))
    split = Split(MODEL, [part], make_prefill)
    [source] = split.ranks
    raw, pages = make_raw(source, rank), source.some_pages(8)
    room_pages = rank.open_room(1, len(pages))
    opened = raw.ask(raw.opening(1, len(pages), first_head=first))
    assert isinstance(opened, Granted)
    [grant] = opened.slots
    commit = raw.land(grant, 1, pages)
    wider = raw.ask(msgspec.structs.replace(commit, length=2 * commit.length))  # as of all four heads
    assert isinstance(wider, Failed)
    assert rank.is_untouched()
    raw.send_frames(encode(Close(1, [])))

    opened = raw.ask(raw.opening(1, len(pages), chunk=2, first_head=first))
    assert isinstance(opened, Granted)
    done = raw.ask(raw.land(opened.slots[0], 1, pages, chunk=2))
    assert isinstance(done, Done)
    split.assert_arrived(pages, rank, room_pages, range(part.first, part.end), heads(1, 0))
    raw.send_frames(encode(Close(2, [])))
    assert idle(rank)


def test_a_rank_whose_peer_dies_leaves_the_other_heads_of_the_room_to_the_others(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw
) -> None:
    """Chunks of one room from two ranks are apart: one that is given up takes nothing from the other."""
    rank = make_rank(MODEL, heads=heads(1, 0), lease_s=3, write_timeout_s=2)
    parts = [heads(2, 0), heads(2, 1)]
    split = Split(MODEL, parts, make_prefill)
    pages = split.ranks[0].some_pages(20)
    room_pages = rank.open_room(1, len(pages))
    raw = make_raw(split.ranks[0], rank)
    raw.grants(1, len(pages))
    raw.vanish()
    sliced(split.ranks[1], rank, 1, pages)
    split.assert_arrived(pages, rank, room_pages, range(2, 4), heads(1, 0))


def test_a_payload_that_arrives_broken_goes_natively_and_leaves_the_other_heads(
    make_rank: MakeRank, make_prefill: MakePrefill
) -> None:
    rank = make_rank(MODEL, heads=heads(1, 0))
    parts = [heads(2, 0), heads(2, 1)]
    split = Split(MODEL, parts, make_prefill)
    pages = split.ranks[0].some_pages(20)
    room_pages = rank.open_room(1, len(pages))
    sliced(split.ranks[1], rank, 1, pages)

    broken = split.ranks[0]
    broken.engine.on_written = lambda number: [
        rank.ask("flip_byte", slot=slot, offset=300) for slot in range(rank.handshake.landing_slots)
    ]
    outcome = broken.send(rank, 1, pages, sliced=True)
    assert (outcome.went_native, outcome.reason) == (True, "payload_rejected")
    split.assert_arrived(pages, rank, room_pages, range(2, 4), heads(1, 0))
