"""Sends one chunk of a room as a tiered payload: plan, open, pack, write, commit, wait for decode to unpack.

The sub-chunks of a chunk form a pipeline: while Mooncake writes payload i, payload i + 1 is packed here and payload
i - 1 is unpacked on decode. Two writes may be under way, so that the link does not rest between them. One worker thread
runs it; nothing is shared between worker threads but the slot pool and the engine.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.observability.metrics import TransferMetrics
from spectrumkv_sglang.observability.reasons import FailureCause, Reason, Rejection, Wait
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.payload.subchunks import SubChunk
from spectrumkv_sglang.payload.tier_map import encode_tier_map
from spectrumkv_sglang.transfer.control_channel import ControlChannel, ControlChannels
from spectrumkv_sglang.transfer.errors import ChunkFailedError, ControlMessageError, GoNativeError
from spectrumkv_sglang.transfer.handshake import Handshake
from spectrumkv_sglang.transfer.messages import (
    MOST_GRANTED_SLOTS,
    Close,
    Commit,
    Done,
    Failed,
    Granted,
    Open,
    Refused,
    SlotGrant,
)
from spectrumkv_sglang.transfer.mooncake_writes import MooncakeWrites, PendingWrite
from spectrumkv_sglang.transfer.packing import PackJob, pack_into_slot
from spectrumkv_sglang.transfer.pool_view import PoolView
from spectrumkv_sglang.transfer.slot_memory import SlotMemory
from spectrumkv_sglang.transfer.slot_pool import Slot, SlotPool

logger = logging.getLogger(__name__)

_MOST_WRITES = 2
"""Writes of one chunk that are under way at once."""


@dataclass(frozen=True)
class ChunkTask:
    """One chunk to send. ``pages`` are prefill's own page ids; the destination is a page range of the room."""

    room: int
    session: str
    peer: Handshake
    pages: np.ndarray
    page_start: int
    tiers: np.ndarray
    table: PrecisionTable
    subchunks: list[SubChunk]
    room_is_live: Callable[[], bool]


@dataclass
class ChunkStats:
    """What sending one chunk took; seconds are sums over the sub-chunks, which overlap."""

    wire_bytes: int = 0
    writes: int = 0
    pack_seconds: float = 0.0
    write_seconds: float = 0.0
    wait_seconds: float = 0.0


@dataclass
class _Written:
    """A packed sub-chunk whose write has been submitted."""

    subchunk: SubChunk
    sequence: int
    staging: Slot
    remote: SlotGrant
    checksum: int
    tier_map: bytes
    write: PendingWrite


@dataclass
class _InFlight:
    """Everything of one chunk that must be released whatever happens."""

    chunk: int
    channel: ControlChannel
    remote: deque[SlotGrant] = field(default_factory=deque)
    addresses: dict[int, int] = field(default_factory=dict)  # of every granted landing slot
    packed: Slot | None = None  # staging slot that no write uses yet
    writing: deque[_Written] = field(default_factory=deque)  # oldest first
    failed_remote: list[int] = field(default_factory=list)
    unanswered: int = 0


class ChunkSender:
    """Sends chunks for one prefill worker thread. Not thread-safe.

    Args:
        memory, staging: this rank's registered staging slots and their bookkeeping (shared by the worker threads).
        writes: Mooncake.
        channels: control channels of this thread.
    """

    def __init__(
        self,
        *,
        view: PoolView,
        config: SpectrumKVConfig,
        memory: SlotMemory,
        staging: SlotPool,
        writes: MooncakeWrites,
        channels: ControlChannels,
        metrics: TransferMetrics,
    ) -> None:
        self._view, self._config, self._memory, self._staging = view, config, memory, staging
        self._writes, self._channels, self._metrics = writes, channels, metrics

    def send(self, task: ChunkTask) -> ChunkStats:
        """Send ``task``; returns after decode has unpacked all of it.

        Raises:
            GoNativeError: nothing of this chunk is being unpacked any more and SGLang's own path is safe.
            ChunkFailedError: the room must fail.
        """
        channel = self._channels.get(task.peer.control_endpoint)
        stats = ChunkStats()
        flight = _InFlight(random.getrandbits(63), channel)
        frame_bytes = channel.frame_bytes
        clean = False
        try:
            self._open(task, flight, stats)
            self._run(task, flight, stats)
            clean = True
        except GoNativeError:
            self._let_unpacks_end(flight)
            raise
        finally:
            self._finish(flight)
            stats.wire_bytes += channel.frame_bytes - frame_bytes
            for _ in range(channel.stale_messages):
                self._metrics.control_message_rejected(Rejection.STALE)
            channel.stale_messages = 0
            if not clean:
                self._channels.drop(task.peer.control_endpoint)
        return stats

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _open(self, task: ChunkTask, flight: _InFlight, stats: ChunkStats) -> None:
        wanted = min(len(task.subchunks), self._config.slots_per_chunk, task.peer.landing_slots, MOST_GRANTED_SLOTS)
        flight.channel.send(
            Open(
                chunk=flight.chunk,
                room=task.room,
                page_start=task.page_start,
                page_count=len(task.pages),
                geometry_digest=self._view.geometry.digest(),
                table=task.table.to_bytes(),
                tiers=np.unique(task.tiers).tolist(),
                slots_wanted=wanted,
                wait_seconds=self._config.slot_wait_s,
            )
        )
        started = time.perf_counter()
        timeout = self._config.open_timeout_s + self._config.slot_wait_s
        try:
            answer = flight.channel.receive(flight.chunk, timeout)
        except ControlMessageError as error:
            raise GoNativeError(Reason.CONTROL_ERROR, f"decode's answer to OPEN is unreadable: {error}") from error
        waited = time.perf_counter() - started
        stats.wait_seconds += waited
        self._metrics.wait(Wait.OPEN, waited)
        if isinstance(answer, Granted):
            largest = max(subchunk.payload_bytes for subchunk in task.subchunks)
            if answer.slot_bytes < largest:
                text = f"decode granted slots of {answer.slot_bytes} bytes, payloads take up to {largest}"
                raise GoNativeError(Reason.CONTROL_ERROR, f"{text}: its handshake is out of date")
            flight.remote.extend(answer.slots)
            flight.addresses.update({grant.slot: grant.address for grant in answer.slots})
            return
        if isinstance(answer, Refused):
            raise _refusal(answer)
        if answer is None:
            text = f"decode at {task.peer.control_endpoint} did not answer OPEN within {timeout} s"
            raise GoNativeError(Reason.OPEN_TIMEOUT, text)
        raise GoNativeError(Reason.CONTROL_ERROR, f"decode answered OPEN with {type(answer).__name__}")

    def _run(self, task: ChunkTask, flight: _InFlight, stats: ChunkStats) -> None:
        first_row = 0
        for sequence, subchunk in enumerate(task.subchunks):
            if not task.room_is_live():
                raise ChunkFailedError(FailureCause.ROOM_GONE, f"room {task.room} was aborted on prefill")
            self._commit_ended_writes(task, flight, stats)
            remote = self._next_remote_slot(task, flight, stats)
            staging = self._lend_staging(task, flight, stats)
            rows = subchunk.page_count * self._view.geometry.page_size
            tiers = task.tiers[first_row : first_row + rows]
            first_row += rows
            checksum = self._pack(task, subchunk, sequence, tiers, staging, remote, stats)
            self._commit_ended_writes(task, flight, stats)
            while len(flight.writing) >= _MOST_WRITES:
                self._commit(task, flight, stats)
            write = self._writes.submit(
                task.session, self._memory.address(staging.index), remote.address, subchunk.payload_bytes
            )
            stats.writes += 1
            stats.wire_bytes += subchunk.payload_bytes
            tier_map = encode_tier_map(tiers, task.table.tiers)
            flight.writing.append(_Written(subchunk, sequence, staging, remote, checksum, tier_map, write))
            flight.packed = None
        while flight.writing:
            self._commit(task, flight, stats)
        while flight.unanswered:
            self._take_answer(flight, stats)

    def _pack(
        self,
        task: ChunkTask,
        subchunk: SubChunk,
        sequence: int,
        tiers: np.ndarray,
        staging: Slot,
        remote: SlotGrant,
        stats: ChunkStats,
    ) -> int:
        """Fill ``staging`` with the sub-chunk's payload; returns its checksum."""
        started = time.perf_counter()
        job = PackJob(
            room=task.room,
            generation=remote.generation,
            sequence=sequence,
            pages=task.pages[subchunk.page_start : subchunk.page_start + subchunk.page_count],
            tiers=tiers,
            rows_per_tier=tuple(subchunk.rows_per_tier),
            table=task.table,
        )
        checksum = pack_into_slot(job, self._view, self._memory, staging.index)
        seconds = time.perf_counter() - started
        stats.pack_seconds += seconds
        self._metrics.pack(seconds)
        return checksum

    def _commit_ended_writes(self, task: ChunkTask, flight: _InFlight, stats: ChunkStats) -> None:
        """Tell decode of every payload that is complete by now, so that unpacking does not wait for the next pack."""
        while flight.writing and self._commit(task, flight, stats, wait=False):
            pass

    def _commit(self, task: ChunkTask, flight: _InFlight, stats: ChunkStats, *, wait: bool = True) -> bool:
        """Tell decode that the payload of the oldest write is complete; False: it is not, and was not waited for."""
        written = flight.writing[0]
        seconds = self._end_of_write(flight, wait=wait)
        if seconds is None:
            return False
        stats.write_seconds += seconds
        self._metrics.write(seconds)
        flight.channel.send(
            Commit(
                chunk=flight.chunk,
                sequence=written.sequence,
                slot=written.remote.slot,
                generation=written.remote.generation,
                page_start=task.page_start + written.subchunk.page_start,
                page_count=written.subchunk.page_count,
                rows_per_tier=list(written.subchunk.rows_per_tier),
                tier_map=written.tier_map,
                length=written.subchunk.payload_bytes,
                checksum=written.checksum,
            )
        )
        flight.unanswered += 1
        return True

    def _end_of_write(self, flight: _InFlight, *, wait: bool) -> float | None:
        """Seconds that the oldest write took, its staging slot given back; None: it goes on and was not waited for."""
        written = flight.writing[0]
        try:
            seconds = self._writes.wait(written.write) if wait else self._writes.poll(written.write)
        except ChunkFailedError:
            # The engine may go on reading the source and writing the destination ("ghost write").
            flight.writing.popleft()
            flight.failed_remote.append(written.remote.slot)
            self._staging.quarantine(written.staging)
            raise
        if seconds is not None:
            flight.writing.popleft()
            self._staging.give_back(written.staging)
        return seconds

    def _next_remote_slot(self, task: ChunkTask, flight: _InFlight, stats: ChunkStats) -> SlotGrant:
        while not flight.remote:
            if flight.unanswered:
                self._take_answer(flight, stats)
            else:  # all granted slots are being written: none comes back before its payload is committed
                self._commit(task, flight, stats)
        return flight.remote.popleft()

    def _lend_staging(self, task: ChunkTask, flight: _InFlight, stats: ChunkStats) -> Slot:
        lent = self._staging.lend(1)
        # A worker that waits for a slot must hold none, or all of them wait for each other.
        while not lent and flight.writing:
            self._commit(task, flight, stats)
        started = time.perf_counter()
        if not lent:
            # Nobody gives back a slot that rests after a failed write: then native transfer is sooner than waiting.
            someone_writes = self._staging.counts().in_use > 0
            timeout = self._config.write_timeout_s if someone_writes else self._config.slot_wait_s
            lent = self._staging.lend(1, timeout=timeout)
        waited = time.perf_counter() - started
        stats.wait_seconds += waited
        self._metrics.wait(Wait.SLOT, waited)
        if not lent:
            raise GoNativeError(Reason.POOL_EXHAUSTED, "no staging slot became free on prefill: raise staging_slots")
        flight.packed = lent[0]
        return lent[0]

    def _take_answer(self, flight: _InFlight, stats: ChunkStats) -> None:
        started = time.perf_counter()
        try:
            answer = flight.channel.receive(flight.chunk, self._config.unpack_timeout_s)
        except ControlMessageError as error:
            raise ChunkFailedError(FailureCause.BAD_MESSAGE, f"decode's answer is unreadable: {error}") from error
        waited = time.perf_counter() - started
        stats.wait_seconds += waited
        self._metrics.wait(Wait.DONE, waited)
        if isinstance(answer, Done) and answer.slot in flight.addresses:
            flight.unanswered -= 1
            flight.remote.append(SlotGrant(answer.slot, answer.generation, flight.addresses[answer.slot]))
            return
        if isinstance(answer, Failed):
            flight.unanswered -= 1
            raise _failure(answer, self._metrics)
        if answer is None:
            raise ChunkFailedError(
                FailureCause.COMMIT_TIMEOUT, f"decode did not answer COMMIT within {self._config.unpack_timeout_s} s"
            )
        raise ChunkFailedError(FailureCause.BAD_MESSAGE, f"decode answered COMMIT with {type(answer).__name__}")

    # ---- endings -------------------------------------------------------------------------------------------------

    def _let_unpacks_end(self, flight: _InFlight) -> None:
        """Before the chunk goes native: no earlier sub-chunk may be unpacked over what the native path writes."""
        deadline = time.monotonic() + self._config.unpack_timeout_s
        while flight.unanswered:
            try:
                answer = flight.channel.receive(flight.chunk, max(0.0, deadline - time.monotonic()))
            except ControlMessageError as error:
                raise ChunkFailedError(FailureCause.BAD_MESSAGE, f"decode's answer is unreadable: {error}") from error
            if isinstance(answer, Failed) and isinstance(failure := _failure(answer, self._metrics), ChunkFailedError):
                raise failure
            if answer is None:
                raise ChunkFailedError(
                    FailureCause.COMMIT_TIMEOUT,
                    f"decode did not end its unpacking within {self._config.unpack_timeout_s} s",
                )
            flight.unanswered -= 1

    def _finish(self, flight: _InFlight) -> None:
        """Release every slot of the chunk on both sides."""
        if flight.packed is not None:
            self._staging.give_back(flight.packed)
        while flight.writing:
            try:
                self._end_of_write(flight, wait=True)
            except ChunkFailedError as error:
                self._metrics.failure(error.cause)
        try:
            flight.channel.send(Close(chunk=flight.chunk, failed_slots=flight.failed_remote))
        except ChunkFailedError as error:
            logger.warning("landing slots return only when their lease ends: %s", error)


def _refusal(answer: Refused) -> GoNativeError | ChunkFailedError:
    """What a refused OPEN means: a cause that ends the room, or a reason to go native."""
    if answer.code in {cause.value for cause in FailureCause}:
        return ChunkFailedError(FailureCause(answer.code), answer.message)
    reasons = {reason.value for reason in Reason}
    reason = Reason(answer.code) if answer.code in reasons else Reason.CONTROL_ERROR
    return GoNativeError(reason, f"decode refused the chunk: {answer.message}")


def _failure(answer: Failed, metrics: TransferMetrics) -> GoNativeError | ChunkFailedError:
    """What a refused COMMIT means. A payload that arrived broken is sent again natively while its room lives."""
    causes = {cause.value for cause in FailureCause}
    cause = FailureCause(answer.code) if answer.code in causes else FailureCause.BAD_MESSAGE
    if cause in (FailureCause.ROOM_GONE, FailureCause.PAGE_RANGE):
        return ChunkFailedError(cause, answer.message)
    metrics.failure(cause)
    return GoNativeError(Reason.PAYLOAD_REJECTED, f"decode refused a payload ({cause.value}): {answer.message}")
