"""Decode never writes outside the room's pages, whatever a peer writes into landing slots and says about it.

A real decode rank, its control socket and its landing memory, which the peer may fill as it likes: any peer that can
reach Mooncake's port may. Every page of the pool that is none of the room's is a guard page, checked byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq
from decode_process import HOST
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from key_angles import key_angles
from prometheus_client import CollectorRegistry

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.kernels.checksum import payload_checksum
from spectrumkv_sglang.observability.metrics import TransferMetrics
from spectrumkv_sglang.payload.codec import KVBuffers, pack_payload, write_prologue
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.layout import plan_layout
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.payload.prologue import PROLOGUE_BYTES, Prologue
from spectrumkv_sglang.payload.tier_map import encode_tier_map
from spectrumkv_sglang.profiles.profile import load_profile
from spectrumkv_sglang.transfer.decode_rank import DecodeRank
from spectrumkv_sglang.transfer.messages import (
    Close,
    Commit,
    Done,
    Failed,
    Granted,
    Open,
    PrefillMessage,
    Refused,
    decode_from_decode,
    encode,
)
from spectrumkv_sglang.transfer.pool_view import PoolView
from spectrumkv_sglang.transfer.unpacking import pool_slots_of_pages

pytestmark = pytest.mark.timeout(120)

GEOMETRY = KVGeometry(layers=2, kv_heads=2, head_dim=32, v_head_dim=32, page_size=4, dtype="bfloat16")
POOL_PAGES = 24
ROOM = 77
GUARD = 7.0
PROFILES = ("native-packed", "int8", "spectrum", "balanced")


class Target:
    """A decode rank with one room, and a peer that can do anything with its landing slots."""

    def __init__(self, engine: Any) -> None:
        slots = POOL_PAGES * GEOMETRY.page_size
        shape = (slots, GEOMETRY.kv_heads, GEOMETRY.head_dim)
        self.buffers = KVBuffers(
            [torch.full(shape, GUARD, dtype=torch.bfloat16) for _ in range(GEOMETRY.layers)],
            [torch.full(shape, GUARD, dtype=torch.bfloat16) for _ in range(GEOMETRY.layers)],
        )
        self.rank = DecodeRank(
            view=PoolView(self.buffers, GEOMETRY, torch.device("cpu"), slots, key_angles(GEOMETRY)),
            config=SpectrumKVConfig(
                slot_bytes=65536, landing_slots=2, slots_per_chunk=1, quarantine_s=0, require_probe=False
            ),
            engine=engine,
            host=HOST,
            metrics=TransferMetrics("decode", 0, registry=CollectorRegistry()),
        )
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(self.rank.handshake.control_endpoint)
        self.chunk = 0

    def ask(self, message: PrefillMessage) -> Any:
        self._socket.send(encode(message))
        assert self._socket.poll(20_000), "decode did not answer"
        return decode_from_decode(self._socket.recv())

    @contextmanager
    def opening(
        self, pages: list[int], start: int, count: int, table: PrecisionTable, room: int = ROOM
    ) -> Iterator[Any]:
        """Open the room and ask for a slot for pages [start, start + count); yields the answer, closes all of it."""
        self.chunk += 1
        self.rank.open_room(ROOM, pages)
        try:
            yield self.ask(
                Open(
                    chunk=self.chunk,
                    boot_id=self.rank.handshake.boot_id,
                    room=room,
                    prompt=0,
                    page_start=start,
                    page_count=count,
                    geometry_digest=GEOMETRY.digest(),
                    first_head=0,
                    heads=GEOMETRY.kv_heads,
                    table=table.to_bytes(),
                    tiers=list(range(table.tiers)),
                    slots_wanted=1,
                    wait_seconds=5.0,
                )
            )
        finally:
            self._socket.send(encode(Close(self.chunk, [])))
            self.rank.close_room(ROOM)

    def slot(self, index: int) -> torch.Tensor:
        return self.rank._memory.view(index, 65536)

    def snapshot(self) -> list[torch.Tensor]:
        return [x.view(torch.uint8).clone() for x in (*self.buffers.k, *self.buffers.v)]

    def changed_rows(self, before: list[torch.Tensor]) -> set[int]:
        """Pool slots in which some byte of some layer differs from ``before``."""
        found: set[int] = set()
        for old, new in zip(before, (*self.buffers.k, *self.buffers.v), strict=True):
            differs = (old != new.view(torch.uint8)).flatten(1).any(1)
            found |= set(differs.nonzero().flatten().tolist())
        return found

    def close(self) -> None:
        self._context.destroy(linger=0)
        self.rank.close()


@pytest.fixture(scope="module")
def target(engine: Any) -> Iterator[Target]:
    target = Target(engine)
    yield target
    target.close()


def payload_of(
    profile: str, room_part: int, rng: np.random.Generator
) -> tuple[PrecisionTable, np.ndarray, torch.Tensor]:
    """Table, tiers and packed bytes of random KV for ``room_part`` pages."""
    table = load_profile(profile).table(GEOMETRY)
    rows = room_part * GEOMETRY.page_size
    tiers = rng.integers(0, table.tiers, rows).astype(np.uint8)
    counts = np.bincount(tiers, minlength=table.tiers).tolist()
    layout = plan_layout(GEOMETRY, table, counts)
    shape = (rows, GEOMETRY.kv_heads, GEOMETRY.head_dim)
    # Any bits at all: infinities, NaN, denormals.
    random = lambda: torch.from_numpy(rng.integers(0, 2**16, shape).astype(np.uint16).view(np.int16))  # noqa: E731
    kv = KVBuffers(
        [random().view(torch.bfloat16) for _ in range(GEOMETRY.layers)],
        [random().view(torch.bfloat16) for _ in range(GEOMETRY.layers)],
    )
    payload = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    pack_payload(kv, torch.arange(rows), tiers, layout, payload)
    return table, tiers, payload


def prologue_of(commit: Commit, table: PrecisionTable) -> Prologue:
    return Prologue(
        room=ROOM,
        generation=commit.generation,
        sequence=commit.sequence,
        first_position=commit.first_position,
        rows_per_tier=tuple(commit.rows_per_tier),
        total_bytes=commit.length,
        geometry_digest=GEOMETRY.digest(),
        table_digest=table.digest(),
    )


ROOM_PAGES = st.lists(st.integers(0, POOL_PAGES - 1), min_size=2, max_size=8, unique=True)
ODD_U32 = st.sampled_from([0, 1, 2, 3, 7, 8, 2**16, 2**31 - 1, 2**32 - 1])


@given(pages=ROOM_PAGES, profile=st.sampled_from(PROFILES), seed=st.integers(0, 2**32 - 1), data=st.data())
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_only_the_rooms_opened_pages_change(
    target: Target, pages: list[int], profile: str, seed: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    start = data.draw(st.integers(0, len(pages) - 1), "first page of the chunk")
    count = data.draw(st.integers(1, len(pages) - start), "pages of the chunk")
    table, tiers, payload = payload_of(profile, count, rng)
    before = target.snapshot()
    with target.opening(pages, start, count, table) as opened:
        assert isinstance(opened, Granted)
        [grant] = opened.slots
        commit = Commit(
            chunk=target.chunk,
            sequence=0,
            slot=grant.slot,
            generation=grant.generation,
            page_start=start,
            page_count=count,
            first_position=0,
            rows_per_tier=np.bincount(tiers, minlength=table.tiers).tolist(),
            tier_map=encode_tier_map(tiers, table.tiers),
            length=len(payload),
            checksum=0,
        )

        # What a hostile peer changes: its claims, the prologue and the bytes, with a checksum that fits them all.
        lies = data.draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "page_start": ODD_U32,
                    "page_count": st.sampled_from([1, 2, 8, 2**31 - 1]),
                    "first_position": ODD_U32,
                    "sequence": ODD_U32,
                    "slot": st.sampled_from([0, 1, 2, 2**32 - 1]),
                    "rows_per_tier": st.lists(ODD_U32, min_size=1, max_size=4),
                    "tier_map": st.binary(max_size=16),
                    "length": st.sampled_from([0, 255, 256, 65536, 65537, 2**40, 2**64 - 1]),
                    "generation": st.sampled_from([0, 1, 2**64 - 1]),
                },
            ),
            "lies",
        )
        claimed = msgspec.structs.replace(commit, **lies)
        honest_prologue = data.draw(st.booleans(), "prologue follows the claims")
        told = claimed if honest_prologue else commit
        prologue = prologue_of(told, table)
        slot = target.slot(grant.slot)
        slot[: len(payload)] = payload
        write_prologue(slot[:PROLOGUE_BYTES], prologue)
        if data.draw(st.booleans(), "random bytes behind the prologue"):
            noise = rng.integers(0, 256, len(payload) - PROLOGUE_BYTES).astype(np.uint8)
            slot[PROLOGUE_BYTES : len(payload)] = torch.from_numpy(noise)
        covered = min(claimed.length, 65536) // 8 * 8
        answer = target.ask(msgspec.structs.replace(claimed, checksum=payload_checksum(slot[:covered])))
        changed = target.changed_rows(before)
        allowed = set(pool_slots_of_pages(np.array(pages[start : start + count]), GEOMETRY.page_size).tolist())
        assert changed <= allowed
        if isinstance(answer, Failed):
            assert changed == set()
        else:
            assert isinstance(answer, Done)
            lo, n = claimed.page_start, claimed.page_count
            assert changed <= set(pool_slots_of_pages(np.array(pages[lo : lo + n]), GEOMETRY.page_size).tolist())
        if not lies:
            assert isinstance(answer, Done), answer


@given(
    pages=ROOM_PAGES,
    start=ODD_U32,
    count=st.sampled_from([1, 2, 8, 24, 2**31 - 1]),
    room=st.sampled_from([ROOM, 1]),
)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_slot_is_granted_for_pages_that_the_room_does_not_have(
    target: Target, pages: list[int], start: int, count: int, room: int
) -> None:
    table = load_profile("int8").table(GEOMETRY)
    with target.opening(pages, start, count, table, room) as answer:
        inside = room == ROOM and start + count <= len(pages)
        assert isinstance(answer, Granted if inside else Refused), answer


@pytest.mark.parametrize("pages", [[POOL_PAGES], [3, -1], [2**40], [0, POOL_PAGES + 5]])
def test_a_room_with_pages_outside_the_pool_is_not_written(target: Target, pages: list[int]) -> None:
    """Even if our own side named them."""
    table, tiers, payload = payload_of("native-packed", len(pages), np.random.default_rng(1))
    before = target.snapshot()
    with target.opening(pages, 0, len(pages), table) as opened:
        [grant] = opened.slots
        slot = target.slot(grant.slot)
        slot[: len(payload)] = payload
        commit = Commit(
            chunk=target.chunk,
            sequence=0,
            slot=grant.slot,
            generation=grant.generation,
            page_start=0,
            page_count=len(pages),
            first_position=0,
            rows_per_tier=np.bincount(tiers, minlength=table.tiers).tolist(),
            tier_map=encode_tier_map(tiers, table.tiers),
            length=len(payload),
            checksum=0,
        )
        write_prologue(slot[:PROLOGUE_BYTES], prologue_of(commit, table))
        answer = target.ask(msgspec.structs.replace(commit, checksum=payload_checksum(slot[: len(payload)])))
        assert isinstance(answer, Failed)
        assert answer.code == "page_range"
        assert target.changed_rows(before) == set()
