"""Reads the transfer log of a running prefill server: what was sent for a request, as the server counted it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.observability.transfer_log import ChunkRecord


class TransferLogError(SpectrumKVError):
    """The transfer log has no complete account of a request."""


@dataclass(frozen=True)
class RequestTransfer:
    """Sums over the chunks of one request.

    Attributes:
        native_bytes: size of the request's KV in the pool.
        wire_bytes: bytes sent for it, control messages included.
        writes: Mooncake writes.
        tokens_by_tier: tokens that travelled as "high", "mid" and "low".
        transfer_seconds: sum of the chunks' times from start to end.
        path: "tiered", "native", or "mixed" when its chunks differ.
    """

    native_bytes: int
    wire_bytes: int
    writes: int
    tokens_by_tier: dict[str, int]
    transfer_seconds: float
    path: str

    @property
    def achieved_b(self) -> float:
        """Wire bytes / native bytes."""
        return self.wire_bytes / self.native_bytes


class TransferLogReader:
    """Follows one log file and hands out the records of one request at a time.

    Requests must come one after the other, as in a demo or a test.

    Args:
        path: the server's ``transfer_log``; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._decoder = msgspec.json.Decoder(ChunkRecord)

    def skip(self) -> None:
        """Pass over everything that has been written so far."""
        self._offset = self.path.stat().st_size if self.path.exists() else 0

    def next_request(self, *, timeout_seconds: float = 10.0) -> tuple[ChunkRecord, ...]:
        """Return the chunks of the next request, waiting for its last one.

        Raises:
            TransferLogError: no last chunk was logged in time, or a line is not a chunk record.
        """
        deadline = time.monotonic() + timeout_seconds
        records: list[ChunkRecord] = []
        while not (records and records[-1].last_chunk):
            line = self._next_line()
            if line is None:
                if time.monotonic() > deadline:
                    raise TransferLogError(
                        f"{self.path}: no last chunk within {timeout_seconds:.0f} s after {len(records)} chunks; "
                        "does the prefill server run a SpectrumKV backend with this transfer_log?"
                    )
                time.sleep(0.05)
                continue
            try:
                records.append(self._decoder.decode(line))
            except msgspec.DecodeError as error:
                raise TransferLogError(f"{self.path}: not a chunk record ({error}): {line[:200]!r}") from error
        return tuple(records)

    def _next_line(self) -> bytes | None:
        if not self.path.exists():
            return None
        with self.path.open("rb") as file:
            file.seek(self._offset)
            line = file.readline()
        if not line.endswith(b"\n"):
            return None
        self._offset += len(line)
        return line


def request_transfer(records: tuple[ChunkRecord, ...]) -> RequestTransfer:
    """Add up the chunks of one request."""
    paths = {record.path.value for record in records}
    return RequestTransfer(
        native_bytes=sum(record.native_bytes for record in records),
        wire_bytes=sum(record.wire_bytes for record in records),
        writes=sum(record.writes for record in records),
        tokens_by_tier={
            tier: sum(getattr(record.tokens_by_tier, tier) for record in records) for tier in ("high", "mid", "low")
        },
        transfer_seconds=sum(record.transfer_seconds for record in records),
        path=paths.pop() if len(paths) == 1 else "mixed",
    )
