"""Requests that run on pairs of a cluster whose servers are of different kinds, and what came of them."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spectrumkv_sglang.launch.client import MAX_ROOM, HttpError, generate_on_pair
from spectrumkv_sglang.launch.servers import SGLangServer

TOKENS = 16
REQUEST_TIMEOUT_SECONDS = 150.0


@dataclass(frozen=True)
class Exam:
    """Prompts and what a plain server answers to them."""

    prompts: Sequence[str]
    right: Sequence[tuple[int, ...]]


@dataclass
class Traffic:
    """One request after the other on a prefill and a decode server, as a router would send them.

    Attributes:
        results: "right", "wrong" or the error, by how often.
        rooms: the requests' room ids, by which prefill's transfer log tells its pairs apart.
    """

    prefill: SGLangServer
    decode: SGLangServer
    exam: Exam
    results: Counter[str] = field(default_factory=Counter)
    rooms: set[int] = field(default_factory=set)

    def run(self, least: int, until: threading.Event) -> None:
        """Ask until ``until`` is set and ``least`` requests have been answered."""
        number = random.randrange(len(self.exam.prompts))
        while sum(self.results.values()) < least or not until.is_set():
            number = (number + 1) % len(self.exam.prompts)
            self.results[self._ask(number)] += 1

    def _ask(self, number: int) -> str:
        room = random.randint(0, MAX_ROOM)
        self.rooms.add(room)
        try:
            answer = generate_on_pair(
                self.prefill,
                self.decode,
                self.exam.prompts[number],
                max_new_tokens=TOKENS,
                bootstrap_room=room,
                timeout_seconds=REQUEST_TIMEOUT_SECONDS,
            )
        except HttpError as error:
            return f"error {error.status}" if error.status else "no answer"
        return "right" if answer.output_ids == self.exam.right[number] else "wrong"

    def chunks(self, log: Path) -> Counter[str]:
        """Chunks of these requests in prefill's transfer log, by path and reason; a plain prefill has no such log."""
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        mine = [record for record in map(json.loads, lines) if record["room"] in self.rooms]
        return Counter(
            record["path"] if record["path"] == record["reason"] else f"{record['path']}, {record['reason']}"
            for record in mine
        )
