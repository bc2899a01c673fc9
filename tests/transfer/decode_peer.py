"""The test's handle on the decode process and on its ranks."""

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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode_process import UNTOUCHED

from spectrumkv_sglang.payload.codec import KVBuffers
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.transfer.handshake import Handshake, decode_handshake
from spectrumkv_sglang.transfer.shared_heads import RankHeads
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
ANSWER_SECONDS = 60.0
START_SECONDS = 140.0
"""The first answer: torch and Mooncake are imported, maybe while servers start beside."""

Pages = list[int]
_rank_numbers = itertools.count()


def eventually(check: Callable[[], Any], wanted: Any, seconds: float = 10.0) -> Any:
    """Poll ``check`` until it gives ``wanted``; returns what it gave last."""
    deadline = time.monotonic() + seconds
    while (got := check()) != wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    return got


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
        self.session: str = self.ask("session", wait=START_SECONDS)

    def ask(self, do: str, wait: float = ANSWER_SECONDS, **arguments: Any) -> Any:
        """Answer of the process to one command, which comes within ``wait`` seconds."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        stdin.flush()
        if not select.select([stdout], [], [], wait)[0]:
            raise TimeoutError(f"the decode process did not answer {do!r}; its log is {self._log}")
        line = stdout.readline()
        if not line:
            raise EOFError(f"the decode process ended at {do!r}: {self._log.read_text(errors='replace')[-2000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{do}: {answer['error']}")
        return answer["answer"]

    def log_text(self) -> str:
        return self._log.read_text(errors="replace")

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

    def __init__(
        self,
        peer: DecodePeer,
        geometry: KVGeometry,
        pages: int,
        config: dict[str, Any],
        knows_rotation: bool = True,
        heads: RankHeads | None = None,
    ) -> None:
        self.peer, self.geometry, self.pages = peer, geometry, pages
        self._rank = next(_rank_numbers)
        frame = peer.ask(
            "start_rank",
            rank=self._rank,
            geometry=asdict(geometry),
            pages=pages,
            config=config,
            knows_rotation=knows_rotation,
            heads=[heads.first, heads.count, heads.total] if heads is not None else None,
        )
        self.handshake: Handshake = decode_handshake(bytes.fromhex(frame))

    def ask(self, do: str, **arguments: Any) -> Any:
        return self.peer.ask(do, rank=self._rank, **arguments)

    def open_room(self, room: int, count: int, prompt: int = 0) -> Pages:
        """Open a room over ``count`` scattered pages, which are returned, for the request with a prompt's digest."""
        pages: Pages = np.random.default_rng(room).permutation(self.pages)[:count].tolist()
        self.ask("open_room", room=room, pages=pages, prompt=prompt)
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
