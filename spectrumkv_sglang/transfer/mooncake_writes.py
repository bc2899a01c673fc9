"""Single-block Mooncake writes with a deadline and without a spinning core.

``transfer_submit_write`` + ``transfer_check_status`` poll at a slowly growing interval; the blocking call spins a
core for the whole transfer. A handle must not be asked again after a terminal answer (the engine crashes), and a
failed or timed-out write may still be going on: the caller quarantines both slots. A batch is freed by the engine when
it is asked after its end, so one that was given up is asked after again at later writes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from spectrumkv_sglang.observability.reasons import FailureCause
from spectrumkv_sglang.transfer.errors import ChunkFailedError
from spectrumkv_sglang.tuning.bandwidth import LinkClock

_FIRST_POLL_SECONDS = 0.0001
_LONGEST_POLL_SECONDS = 0.001
_MOST_GIVEN_UP = 4096


@dataclass
class PendingWrite:
    """A submitted write; ``started``, ``deadline`` and when it was last ``seen_going`` in monotonic seconds."""

    handle: int
    session: str
    length: int
    started: float
    deadline: float
    seen_going: float


class MooncakeWrites:
    """Submits writes to peers through one Mooncake TransferEngine.

    Args:
        engine: ``mooncake.engine.TransferEngine`` (not SGLang's wrapper, which swallows errors).
        timeout: seconds after which a write counts as failed.
        clock: is told of every write, by session.
    """

    def __init__(self, engine: Any, timeout: float, clock: LinkClock | None = None) -> None:
        self._engine = engine
        self._timeout = timeout
        self._clock = clock
        self._given_up: deque[int] = deque()
        self._lock = threading.Lock()

    @property
    def given_up(self) -> int:
        """Writes that took too long and have not ended since: the engine keeps a batch for each."""
        with self._lock:
            return len(self._given_up)

    def collect_ended(self) -> None:
        """Ask once after each write that was given up: the engine frees the batch of one that has ended."""
        for _ in range(self.given_up):
            with self._lock:
                if not self._given_up:
                    return
                handle = self._given_up.popleft()
            try:
                going = self._engine.transfer_check_status(handle) == 0
            except Exception:  # noqa: BLE001 (pybind errors have no common base; the batch is the engine's to free)
                continue
            if going:
                self._give_up(handle)

    def _give_up(self, handle: int) -> None:
        with self._lock:
            if len(self._given_up) < _MOST_GIVEN_UP:
                self._given_up.append(handle)

    def submit(self, session: str, source: int, destination: int, length: int) -> PendingWrite:
        """Start writing ``length`` bytes. Raises ChunkFailedError(write_failed) when the engine refuses."""
        self.collect_ended()
        now = time.monotonic()
        try:
            handle = self._engine.transfer_submit_write(session, source, destination, length)
        except Exception as error:  # pybind errors have no common base
            raise ChunkFailedError(
                FailureCause.WRITE_FAILED, f"Mooncake could not start a write to {session}: {error}", peer_suspect=True
            ) from error
        # Batch ids are pointers printed as signed numbers: negative ones are valid, 0 and -1 are failures.
        if handle in (0, -1):
            raise ChunkFailedError(
                FailureCause.WRITE_FAILED,
                f"Mooncake refused a write of {length} bytes to {session} (is the peer gone?)",
                peer_suspect=True,
            )
        if self._clock is not None:
            self._clock.started(session, length, now)
        return PendingWrite(handle, session, length, now, now + self._timeout, now)

    def wait(self, write: PendingWrite) -> float:
        """Wait for the end of ``write``; returns its duration in seconds. Not again after it returned or raised.

        Raises:
            ChunkFailedError: cause ``write_failed`` or ``write_timeout``, with ``peer_suspect`` set.
        """
        pause = _FIRST_POLL_SECONDS
        while (seconds := self.poll(write)) is None:
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_POLL_SECONDS)
        return seconds

    def poll(self, write: PendingWrite) -> float | None:
        """Duration of ``write`` in seconds if it has ended, None while it goes on. Not again after it has ended.

        Raises:
            ChunkFailedError: as :meth:`wait`.
        """
        try:
            status = self._engine.transfer_check_status(write.handle)
        except Exception as error:
            if self._clock is not None:
                self._clock.failed(write.session, write.length)
            raise ChunkFailedError(
                FailureCause.WRITE_FAILED,
                f"Mooncake does not say what became of a write of {write.length} bytes to {write.session}: {error}",
                peer_suspect=True,
            ) from error
        now = time.monotonic()
        if status == 1:
            if self._clock is not None:
                self._clock.ended(write.session, write.length, now, write.seen_going)
            return now - write.started
        if (status < 0 or now > write.deadline) and self._clock is not None:
            self._clock.failed(write.session, write.length)
        if status < 0:
            raise ChunkFailedError(
                FailureCause.WRITE_FAILED,
                f"Mooncake write of {write.length} bytes to {write.session} failed (status {status})",
                peer_suspect=True,
            )
        if now > write.deadline:
            self._give_up(write.handle)
            raise ChunkFailedError(
                FailureCause.WRITE_TIMEOUT,
                f"Mooncake write of {write.length} bytes to {write.session} did not end within {self._timeout} s",
                peer_suspect=True,
            )
        write.seen_going = now
        return None
