"""A real prefill rank in the test process, over a pool of random KV, and the comparison with what decode holds."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode_peer import Pages, PeerRank, eventually
from decode_process import counted
from key_angles import key_angles
from prometheus_client import CollectorRegistry

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.quantisers import quantiser_for
from spectrumkv_sglang.observability.metrics import TransferMetrics
from spectrumkv_sglang.payload.codec import KVBuffers
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.transfer.chunk_planner import PlannedChunk
from spectrumkv_sglang.transfer.outgoing_request import OutgoingRequest
from spectrumkv_sglang.transfer.pool_view import PoolView
from spectrumkv_sglang.transfer.prefill_rank import NativeResult, OutgoingChunk, PrefillRank
from spectrumkv_sglang.transfer.sending_policy import serve_candidates
from spectrumkv_sglang.transfer.shared_heads import RankHeads
from spectrumkv_sglang.transfer.unpacking import pool_slots_of_pages
from spectrumkv_sglang.verification.fingerprint import FingerprintError


def _no_model() -> Any:
    raise FingerprintError("the tests serve no model")


class TappedEngine:
    """The real engine; counts writes and calls ``on_submitted`` and ``on_written`` at the moments that tests need."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.writes: list[tuple[int, int]] = []  # destination and length
        self.refused = 0  # of these, those that never began
        self.on_submitted: Callable[[int], None] = lambda number: None
        self.on_written: Callable[[int], None] = lambda number: None
        self._numbers: dict[int, int] = {}

    def transfer_submit_write(self, session: str, source: int, destination: int, length: int) -> int:
        handle = self._engine.transfer_submit_write(session, source, destination, length)
        self.writes.append((destination, length))
        self.refused += handle in (0, -1)
        self._numbers[handle] = len(self.writes) - 1
        self.on_submitted(len(self.writes) - 1)
        return handle

    def transfer_check_status(self, handle: int) -> int:
        status = self._engine.transfer_check_status(handle)
        if status == 1:
            self.on_written(self._numbers[handle])
        return status

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@dataclass(frozen=True)
class Outcome:
    """What PrefillRank.send did."""

    code: int
    peer_suspect: bool
    went_native: bool
    seconds: float
    record: dict[str, Any] | None  # the chunk's line of the transfer log
    failures: dict[str, float]  # by cause, counted by this send

    @property
    def reason(self) -> str | None:
        return self.record["reason"] if self.record else None


class PrefillSide:
    """A real PrefillRank over a pool of random KV."""

    def __init__(
        self,
        engine: Any,
        geometry: KVGeometry,
        pages: int,
        log: Path,
        heads: RankHeads | None = None,
        **config: Any,
    ) -> None:
        self.geometry, self.pages, self.engine, self._log = geometry, pages, TappedEngine(engine), log
        slots, generator = pages * geometry.page_size, torch.Generator().manual_seed(pages)

        def pool(dim: int) -> list[torch.Tensor]:
            shape, dtype = (slots, geometry.kv_heads, dim), getattr(torch, geometry.dtype)
            return [torch.randn(shape, generator=generator).to(dtype) for _ in range(geometry.layers)]

        self.buffers = KVBuffers(pool(geometry.head_dim), pool(geometry.v_head_dim))
        self.view = PoolView(self.buffers, geometry, torch.device("cpu"), slots, key_angles(geometry))
        self._requests: dict[int, OutgoingRequest] = {}
        self._registry = CollectorRegistry()
        made = SpectrumKVConfig(**{"transfer_log": log, "scorer": "random", **config})
        self.rank = PrefillRank(
            view=self.view,
            config=made,
            served=serve_candidates(made, made, self.view, _no_model) if made.controller.enabled else None,
            engine=self.engine,
            page_size=geometry.page_size,
            page_bytes=geometry.page_size * geometry.native_bytes_per_token,
            metrics=TransferMetrics("prefill", 0, registry=self._registry),
            heads=heads,
        )

    def some_pages(self, count: int) -> Pages:
        return np.random.default_rng(count).permutation(self.pages)[:count].tolist()

    def chunk(self, to: PeerRank, room: int, pages: Pages, **changes: Any) -> OutgoingChunk:
        fields: dict[str, Any] = {
            "room": room,
            "session": to.peer.session,
            "pages": np.array(pages, dtype=np.int64),
            "page_start": 0,
            "room_pages": len(pages),
            "prefix_tokens": 0,
            "last_chunk": True,
            "peer": to.handshake,
            "room_is_live": lambda: True,
            "request": changes.get("request") or self._request(room, changes.get("page_start", 0)),
        }
        return OutgoingChunk(**{**fields, **changes})

    def _request(self, room: int, page_start: int) -> OutgoingRequest:
        """The request that ``room`` stands for: a chunk at page 0 is the first of another one."""
        if page_start == 0 or room not in self._requests:
            self._requests[room] = OutgoingRequest()
        return self._requests[room]

    def send(self, to: PeerRank, room: int, pages: Pages, **changes: Any) -> Outcome:
        native: list[int] = []

        def send_natively() -> NativeResult:
            native.append(room)
            return NativeResult(0, 1)

        before, lines = self.counters(), len(self._records())
        started = time.monotonic()
        code, suspect = self.rank.send(self.chunk(to, room, pages, **changes), send_natively)
        seconds = time.monotonic() - started
        failures = {name: n - before.get(name, 0) for name, n in self.counters().items() if n > before.get(name, 0)}
        mine = [record for record in self._records()[lines:] if record["room"] == room]
        return Outcome(code, suspect, bool(native), seconds, mine[0] if mine else None, failures)

    def counters(self) -> dict[str, float]:
        return counted(self._registry)

    def _records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.read_text().splitlines()] if self._log.exists() else []

    def staging(self) -> dict[str, int]:
        return asdict(self.rank._staging.counts())

    def plan(self, room: int, pages: Pages, slot_bytes: int) -> PlannedChunk:
        """The plan that `send` makes for a room's only chunk."""
        return self.rank._planner_of(self.view).plan(
            room=room,
            pages=np.array(pages, dtype=np.int64),
            first_position=0,
            prompt_tokens=len(pages) * self.geometry.page_size,
            slot_bytes=slot_bytes,
        )


def assert_arrived(
    source: PrefillSide, pages: Pages, rank: PeerRank, room_pages: Pages, plan: PlannedChunk | None = None
) -> None:
    """Every row of ``pages`` lies in ``room_pages``: bit by bit, or within its precision's bound under ``plan``."""
    size, pool = source.geometry.page_size, rank.read_pool()
    rows = pool_slots_of_pages(np.array(pages, dtype=np.int64), size)
    room_rows = pool_slots_of_pages(np.array(room_pages, dtype=np.int64), size)
    for layer, kv in itertools.product(range(source.geometry.layers), (0, 1)):
        sent, got = source.buffers.of(layer, kv)[rows], pool.of(layer, kv)[room_rows]
        if plan is None:
            assert torch.equal(sent, got), (layer, kv)
            continue
        # Rows that share parameters are those of one tier of one sub-chunk.
        for subchunk in plan.plan.subchunks:
            part = slice(subchunk.page_start * size, (subchunk.page_start + subchunk.page_count) * size)
            tiers = torch.from_numpy(plan.plan.tiers[part])
            for tier in tiers.unique().tolist():
                for low, high, precision in plan.table.head_runs(tier, layer, kv):
                    x, y = sent[part][tiers == tier, low:high], got[part][tiers == tier, low:high]
                    bound = quantiser_for(precision).error_bound(x)
                    assert bool(((x.float() - y.float()).abs() <= bound).all()), (layer, kv, tier)
                    assert precision is not Precision.NATIVE or torch.equal(x, y), (layer, kv, tier)


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
