"""A decode process for the two-process tests: a real Mooncake engine, synthetic CPU KV pools and real DecodeRanks.

Commands arrive as JSON lines on stdin, answers leave as JSON lines on stdout; the process ends at the end of stdin or
with its parent. One process serves many ranks, each with a pool, landing slots and a configuration of its own.
"""

from __future__ import annotations

import base64
import collections
import ctypes
import faulthandler
import gc
import json
import logging
import os
import signal
import sys
import threading
from typing import Any

import numpy as np
import torch
from key_angles import key_angles
from mooncake.engine import TransferEngine
from prometheus_client import CollectorRegistry

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.observability.metrics import TransferMetrics
from spectrumkv_sglang.payload.codec import KVBuffers
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.key_rotation import KeyRotation
from spectrumkv_sglang.transfer.decode_rank import DecodeRank
from spectrumkv_sglang.transfer.pool_view import PoolView
from spectrumkv_sglang.transfer.shared_heads import RankHeads

HOST = "127.0.0.1"
UNTOUCHED = 7.0  # what every element of a new pool holds
MOONCAKE_PORTS = range(15000, 18000)
PR_SET_PDEATHSIG = 1
SLOW_COMMAND_SECONDS = 8


class ServedRank:
    """One DecodeRank with its pool."""

    def __init__(
        self,
        geometry: KVGeometry,
        pages: int,
        config: dict[str, Any],
        engine: Any,
        rotation: KeyRotation | None,
        heads: RankHeads | None,
    ) -> None:
        slots, dtype = pages * geometry.page_size, getattr(torch, geometry.dtype)

        def pool(dim: int) -> list[torch.Tensor]:
            return [torch.full((slots, geometry.kv_heads, dim), UNTOUCHED, dtype=dtype) for _ in range(geometry.layers)]

        self.buffers = KVBuffers(pool(geometry.head_dim), pool(geometry.v_head_dim))
        self.registry = CollectorRegistry()
        self.rank = DecodeRank(
            view=PoolView(self.buffers, geometry, torch.device("cpu"), slots, rotation),
            config=SpectrumKVConfig(**config),
            engine=engine,
            host=HOST,
            metrics=TransferMetrics("decode", 0, registry=self.registry),
            heads=heads,
        )
        self.held: dict[int, threading.Event] = {}

    def hold_room(self, room: int) -> None:
        """Keep a room busy, as an unpack that does not end would."""
        holding, let_go = threading.Event(), threading.Event()

        def hold() -> None:
            rooms = self.rank.rooms
            with rooms.pages(room, rooms.registration(room, 0, 1), 0, 1):
                holding.set()
                let_go.wait()

        threading.Thread(target=hold, name="hold-room", daemon=True).start()
        if not holding.wait(5):
            raise TimeoutError(f"room {room} is busy")
        self.held[room] = let_go


class DecodeProcess:
    """The commands."""

    def __init__(self) -> None:
        self.engine = TransferEngine()
        if self.engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("Mooncake does not start")
        self.ranks: dict[int, ServedRank] = {}

    def session(self) -> str:
        return f"{HOST}:{self.engine.get_rpc_port()}"

    def start_rank(
        self,
        rank: int,
        geometry: dict[str, Any],
        pages: int,
        config: dict[str, Any],
        knows_rotation: bool,
        heads: list[int] | None,
    ) -> str:
        kept = KVGeometry(**geometry)
        rotation = key_angles(kept) if knows_rotation else None
        served = self.ranks[rank] = ServedRank(
            kept, pages, config, self.engine, rotation, RankHeads(*heads) if heads else None
        )
        return served.rank.handshake_frame.hex()

    def stop_rank(self, rank: int) -> None:
        served = self.ranks.pop(rank)
        for let_go in served.held.values():
            let_go.set()
        served.rank.close()
        left = [thread.name for thread in served.rank.server._threads if thread.is_alive()]
        if left:
            raise RuntimeError(f"threads outlived the rank: {left}")

    def open_room(self, rank: int, room: int, pages: list[int], prompt: int = 0) -> None:
        self.ranks[rank].rank.open_room(room, pages, prompt)

    def close_room(self, rank: int, room: int) -> None:
        self.ranks[rank].rank.close_room(room)

    def hold_room(self, rank: int, room: int) -> None:
        self.ranks[rank].hold_room(room)

    def let_room_go(self, rank: int, room: int) -> None:
        self.ranks[rank].held.pop(room).set()

    def read_pool(self, rank: int) -> dict[str, list[str]]:
        buffers = self.ranks[rank].buffers
        return {
            name: [base64.b64encode(x.view(torch.uint8).numpy().tobytes()).decode() for x in tensors]
            for name, tensors in (("k", buffers.k), ("v", buffers.v))
        }

    def flip_byte(self, rank: int, slot: int, offset: int) -> None:
        """Change one byte of a landing slot, as late bytes of an earlier write would."""
        region = self.ranks[rank].rank._memory.view(slot, offset + 1)
        region[offset] ^= 0xFF

    def state(self, rank: int) -> dict[str, int]:
        served = self.ranks[rank].rank
        counts = served._pool.counts()
        return {
            "free": counts.free,
            "in_use": counts.in_use,
            "quarantined": counts.quarantined,
            "open_chunks": served.server.open_chunks(),
            "rooms": len(served.rooms),
        }

    def counters(self, rank: int) -> dict[str, float]:
        """Failures by cause and rejected control messages by kind that were counted, those at 0 left out."""
        return counted(self.ranks[rank].registry)

    def resources(self) -> dict[str, int]:
        return count_resources()

    def collect_garbage(self) -> None:
        gc.collect()


def counted(registry: CollectorRegistry) -> dict[str, float]:
    """Non-zero failure and rejection counters of a registry, by label value."""
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            label = sample.labels.get("cause") or sample.labels.get("kind")
            if label and sample.name.endswith("_total") and sample.value:
                found[label] = sample.value
    return found


def count_resources() -> dict[str, int]:
    """Threads of this process and open descriptors by kind, without Mooncake's own connections."""
    kinds: collections.Counter[str] = collections.Counter()
    _seen_at_mooncakes_ports.update(_mooncake_sockets())
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:  # the directory's own
            continue
        if target not in _seen_at_mooncakes_ports:
            kinds[target.split(":[")[0] if ":[" in target else "file"] += 1
    return {"threads": len(os.listdir("/proc/self/task")), **kinds}


_seen_at_mooncakes_ports: set[str] = set()
"""By any count so far: the kernel no longer lists a connection that was reset, and the engine may keep it."""


def _mooncake_sockets() -> set[str]:
    """Link targets of the host's TCP sockets at Mooncake's ports: its engine opens and keeps them as it likes."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as rows:
            for row in list(rows)[1:]:
                fields = row.split()
                ports = [int(address.rpartition(":")[2], 16) for address in fields[1:3]]
                if any(port in MOONCAKE_PORTS for port in ports):
                    found.add(f"socket:[{fields[9]}]")
    return found


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints goes to the log
    logging.basicConfig(level=logging.DEBUG)
    torch.set_num_threads(1)
    process = DecodeProcess()
    for line in sys.stdin:
        command = json.loads(line)
        faulthandler.dump_traceback_later(SLOW_COMMAND_SECONDS)  # a command that hangs says where in the log
        try:
            answer = {"answer": getattr(process, command.pop("do"))(**command)}
        except Exception as error:  # noqa: BLE001 (the test that asked reports it)
            answer = {"error": repr(error)}
        answers.write(json.dumps(answer, default=lambda x: x.item() if isinstance(x, np.generic) else repr(x)) + "\n")
        answers.flush()
        faulthandler.cancel_dump_traceback_later()
    os._exit(0)  # Mooncake's engine may not end while a peer is stopped


if __name__ == "__main__":
    main()
