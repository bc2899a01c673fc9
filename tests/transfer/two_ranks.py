"""Both ends of the two-process tests: a handle on the decode process, and a prefill rank in the test process."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq
from decode_process import HOST, UNTOUCHED, counted
from prometheus_client import CollectorRegistry

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.kernels.checksum import payload_checksum
from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.quantisers import quantiser_for
from spectrumkv_sglang.observability.metrics import TransferMetrics
from spectrumkv_sglang.payload.codec import KVBuffers, pack_payload, write_prologue
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.layout import plan_layout
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.payload.prologue import Prologue
from spectrumkv_sglang.payload.tier_map import encode_tier_map
from spectrumkv_sglang.profiles.profile import load_profile
from spectrumkv_sglang.transfer.chunk_planner import PlannedChunk
from spectrumkv_sglang.transfer.handshake import Handshake, decode_handshake
from spectrumkv_sglang.transfer.messages import (
    Commit,
    DecodeMessage,
    Granted,
    Open,
    PrefillMessage,
    SlotGrant,
    decode_from_decode,
    encode,
)
from spectrumkv_sglang.transfer.pool_view import PoolView
from spectrumkv_sglang.transfer.prefill_rank import NativeResult, OutgoingChunk, PrefillRank
from spectrumkv_sglang.transfer.slot_memory import SlotMemory
from spectrumkv_sglang.transfer.unpacking import pool_slots_of_pages

MOONCAKE_ENVIRONMENT = {
    "MC_FORCE_TCP": "1",
    "MC_TRANSFER_TIMEOUT": "5",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS": "1",
    "OMP_NUM_THREADS": "1",
}
GEOMETRY = KVGeometry(layers=3, kv_heads=2, head_dim=64, v_head_dim=32, page_size=1, dtype="float32")
SLOT_BYTES = 128 * 1024
ANSWER_SECONDS = 30.0

Pages = list[int]
_rank_numbers = itertools.count()


class DecodePeer:
    """The decode process."""

    def __init__(self, log: Path) -> None:
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).parent / "decode_process.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env={**os.environ, **MOONCAKE_ENVIRONMENT},
            )
        self._log = log
        self.session: str = self.ask("session")

    def ask(self, do: str, **arguments: Any) -> Any:
        """Answer of the process to one command."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        stdin.flush()
        if not select.select([stdout], [], [], ANSWER_SECONDS)[0]:
            raise TimeoutError(f"the decode process did not answer {do!r}; its log is {self._log}")
        line = stdout.readline()
        if not line:
            raise EOFError(f"the decode process ended at {do!r}: {self._log.read_text(errors='replace')[-2000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{do}: {answer['error']}")
        return answer["answer"]

    def stop(self) -> None:
        """Stop the process; returns once every thread of it stands still."""
        self._process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self._process.pid}/task")

        def running() -> list[str]:
            states = {task.name: (task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()}
            return [name for name, state in states.items() if state != "T"]

        assert eventually(running, []) == []

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def end(self) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class PeerRank:
    """One rank of the decode process."""

    def __init__(self, peer: DecodePeer, geometry: KVGeometry, pages: int, config: dict[str, Any]) -> None:
        self.peer, self.geometry, self.pages = peer, geometry, pages
        self._rank = next(_rank_numbers)
        frame = peer.ask("start_rank", rank=self._rank, geometry=asdict(geometry), pages=pages, config=config)
        self.handshake: Handshake = decode_handshake(bytes.fromhex(frame))

    def ask(self, do: str, **arguments: Any) -> Any:
        return self.peer.ask(do, rank=self._rank, **arguments)

    def open_room(self, room: int, count: int) -> Pages:
        """Open a room over ``count`` scattered pages, which are returned."""
        pages: Pages = np.random.default_rng(room).permutation(self.pages)[:count].tolist()
        self.ask("open_room", room=room, pages=pages)
        return pages

    def state(self) -> dict[str, int]:
        return self.ask("state")

    def counters(self) -> dict[str, float]:
        return self.ask("counters")

    def read_pool(self) -> KVBuffers:
        """A copy of the rank's pool."""
        answer, dtype = self.ask("read_pool"), getattr(torch, self.geometry.dtype)

        def tensors(name: str, dim: int) -> list[torch.Tensor]:
            raw = [torch.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype) for text in answer[name]]
            return [x.view(-1, self.geometry.kv_heads, dim) for x in raw]

        return KVBuffers(tensors("k", self.geometry.head_dim), tensors("v", self.geometry.v_head_dim))

    def is_untouched(self, but: Sequence[int] = ()) -> bool:
        """Whether no page was written, ``but`` the given ones."""
        rows = torch.ones(self.pages * self.geometry.page_size, dtype=torch.bool)
        rows[pool_slots_of_pages(np.array(but, dtype=np.int64), self.geometry.page_size)] = False
        pool = self.read_pool()
        return all(bool((x[rows] == UNTOUCHED).all()) for x in (*pool.k, *pool.v))


class TappedEngine:
    """The real engine; counts writes and calls ``on_submitted`` and ``on_written`` at the moments that tests need."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.writes: list[tuple[int, int]] = []  # destination and length
        self.on_submitted: Callable[[int], None] = lambda number: None
        self.on_written: Callable[[int], None] = lambda number: None
        self._numbers: dict[int, int] = {}

    def transfer_submit_write(self, session: str, source: int, destination: int, length: int) -> int:
        handle = self._engine.transfer_submit_write(session, source, destination, length)
        self.writes.append((destination, length))
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

    def __init__(self, engine: Any, geometry: KVGeometry, pages: int, log: Path, **config: Any) -> None:
        self.geometry, self.pages, self.engine, self._log = geometry, pages, TappedEngine(engine), log
        slots, generator = pages * geometry.page_size, torch.Generator().manual_seed(pages)
        self.buffers = KVBuffers(
            *(
                [
                    torch.randn((slots, geometry.kv_heads, dim), generator=generator).to(getattr(torch, geometry.dtype))
                    for _ in range(geometry.layers)
                ]
                for dim in (geometry.head_dim, geometry.v_head_dim)
            )
        )
        self.view = PoolView(self.buffers, geometry, torch.device("cpu"), slots)
        self._registry = CollectorRegistry()
        self.rank = PrefillRank(
            view=self.view,
            config=SpectrumKVConfig(transfer_log=log, scorer="random", **config),
            engine=self.engine,
            page_size=geometry.page_size,
            page_bytes=geometry.page_size * geometry.native_bytes_per_token,
            metrics=TransferMetrics("prefill", 0, registry=self._registry),
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
        }
        return OutgoingChunk(**{**fields, **changes})

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
        return self.rank._planner.plan(
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
    tiers = torch.zeros(len(rows), dtype=torch.uint8) if plan is None else torch.from_numpy(plan.plan.tiers)
    for layer, kv in itertools.product(range(source.geometry.layers), (0, 1)):
        sent, got = source.buffers.of(layer, kv)[rows], pool.of(layer, kv)[room_rows]
        for tier in tiers.unique().tolist():
            runs = [(0, sent.shape[1], Precision.NATIVE)] if plan is None else plan.table.head_runs(tier, layer, kv)
            for low, high, precision in runs:
                x, y = sent[tiers == tier, low:high], got[tiers == tier, low:high]
                if precision is Precision.NATIVE:
                    assert torch.equal(x, y), (layer, kv, tier)
                else:
                    bound = quantiser_for(precision).error_bound(x)
                    assert bool(((x.float() - y.float()).abs() <= bound).all()), (layer, kv, tier)


class RawPrefill:
    """Speaks the control protocol message by message, and so can break it."""

    def __init__(self, source: PrefillSide, to: PeerRank) -> None:
        self.source, self.to = source, to
        self.table: PrecisionTable = load_profile("native-packed").table(source.geometry)
        self._memory = SlotMemory(source.engine, 1, to.handshake.slot_bytes, torch.device("cpu"))
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(to.handshake.control_endpoint)

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._memory.close()

    def send_frames(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def ask(self, message: PrefillMessage) -> DecodeMessage:
        self.send_frames(encode(message))
        return self.receive()

    def receive(self) -> DecodeMessage:
        if not self._socket.poll(ANSWER_SECONDS * 1000):
            raise TimeoutError("decode did not answer")
        return decode_from_decode(self._socket.recv())

    def opening(self, room: int, pages: int, chunk: int = 1, **changes: Any) -> Open:
        fields: dict[str, Any] = {
            "chunk": chunk,
            "room": room,
            "page_start": 0,
            "page_count": pages,
            "geometry_digest": self.source.geometry.digest(),
            "table": self.table.to_bytes(),
            "slots_wanted": 1,
            "wait_seconds": 1.0,
        }
        return Open(**{**fields, **changes})

    def grants(self, room: int, pages: int, chunk: int = 1, **changes: Any) -> list[SlotGrant]:
        answer = self.ask(self.opening(room, pages, chunk, **changes))
        assert isinstance(answer, Granted), answer
        return answer.slots

    def land(self, grant: SlotGrant, room: int, pages: Pages, chunk: int = 1, prologue: dict[str, Any] | None = None) -> Commit:
        """Write the payload of ``pages`` into a granted slot; returns the COMMIT that fits it but for ``prologue``."""
        geometry = self.source.geometry
        rows = len(pages) * geometry.page_size
        tiers = np.zeros(rows, dtype=np.uint8)
        layout = plan_layout(geometry, self.table, [rows] + [0] * (self.table.tiers - 1))
        payload = self._memory.view(0, layout.total_bytes)
        slots = pool_slots_of_pages(np.array(pages, dtype=np.int64), geometry.page_size)
        pack_payload(self.source.buffers, slots, tiers, layout, payload)
        fields: dict[str, Any] = {
            "room": room,
            "generation": grant.generation,
            "sequence": 0,
            "rows_per_tier": layout.rows_per_tier,
            "total_bytes": layout.total_bytes,
            "geometry_digest": geometry.digest(),
            "table_digest": self.table.digest(),
        }
        write_prologue(payload, Prologue(**{**fields, **(prologue or {})}))
        code = self.source.engine.transfer_sync_write(
            self.to.peer.session, self._memory.address(0), grant.address, layout.total_bytes
        )
        assert code == 0
        return Commit(
            chunk=chunk,
            sequence=0,
            slot=grant.slot,
            generation=grant.generation,
            page_start=0,
            page_count=len(pages),
            rows_per_tier=list(layout.rows_per_tier),
            tier_map=encode_tier_map(tiers, self.table.tiers),
            length=layout.total_bytes,
            checksum=payload_checksum(payload),
        )


def eventually(check: Callable[[], Any], wanted: Any, seconds: float = 10.0) -> Any:
    """Poll ``check`` until it gives ``wanted``; returns what it gave last."""
    deadline = time.monotonic() + seconds
    while (got := check()) != wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    return got


__all__ = ["GEOMETRY", "HOST", "SLOT_BYTES", "DecodePeer", "PeerRank", "PrefillSide", "RawPrefill"]
