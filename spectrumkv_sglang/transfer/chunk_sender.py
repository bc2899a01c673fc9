"""Sends one chunk of a room as a tiered payload: plan, open, pack, write, commit, wait for decode to unpack.

The sub-chunks of a chunk form a pipeline: while Mooncake writes some payloads, the next ones are packed here and
earlier ones are unpacked on decode. On a GPU the next payload is queued before the last one is waited for, so that
neither the GPU nor the link rests while the other is at work. One worker thread runs it; nothing is shared between
worker threads but the slot pool and the engine.
"""

from __future__ import annotations

import logging
import random
import time

import numpy as np
import torch

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.observability.metrics import TransferMetrics
from spectrumkv_sglang.observability.reasons import FailureCause, Reason, Rejection, Wait
from spectrumkv_sglang.transfer.chunk_state import ChunkStats, ChunkTask, InFlight, Packing, Writing
from spectrumkv_sglang.transfer.control_channel import ControlChannels
from spectrumkv_sglang.transfer.decode_answers import failure, refusal
from spectrumkv_sglang.transfer.errors import ChunkFailedError, ControlMessageError, GoNativeError
from spectrumkv_sglang.transfer.lossless_stage import Compressing, Stored
from spectrumkv_sglang.transfer.messages import (
    MOST_GRANTED_SLOTS,
    Close,
    Done,
    Failed,
    Granted,
    Open,
    Refused,
    SlotGrant,
)
from spectrumkv_sglang.transfer.mooncake_writes import MooncakeWrites
from spectrumkv_sglang.transfer.packing import PackJob, Piece, pack_into_slot, pieces_of
from spectrumkv_sglang.transfer.slot_memory import SlotMemory
from spectrumkv_sglang.transfer.slot_pool import Slot, SlotPool

logger = logging.getLogger(__name__)

MOST_WRITES = 3
"""Writes of one chunk that are under way at once."""


def packs_ahead(device: torch.device) -> int:
    """Payloads that are queued for packing before the one in front of them is waited for.

    On a CPU packing is done when the call returns: holding a payload back would gain nothing.
    """
    return 1 if device.type == "cuda" else 0


class ChunkSender:
    """Sends chunks for one prefill worker thread. Not thread-safe.

    Args:
        device: of the KV pool.
        memory, staging: this rank's registered staging slots and their bookkeeping (shared by the worker threads).
        writes: Mooncake.
        channels: control channels of this thread.
        compressing: the lossless stage; None: there is none.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        config: SpectrumKVConfig,
        memory: SlotMemory,
        staging: SlotPool,
        writes: MooncakeWrites,
        channels: ControlChannels,
        metrics: TransferMetrics,
        compressing: Compressing | None = None,
    ) -> None:
        self._device, self._config, self._memory, self._staging = device, config, memory, staging
        self._writes, self._channels, self._metrics = writes, channels, metrics
        self._compressing = compressing
        self._packs_ahead = packs_ahead(device)

    def send(self, task: ChunkTask) -> ChunkStats:
        """Send ``task``; returns after decode has unpacked all of it.

        Raises:
            GoNativeError: nothing of this chunk is being unpacked any more and SGLang's own path is safe.
            ChunkFailedError: the room must fail.
        """
        channel = self._channels.get(task.peer.control_endpoint)
        stats = ChunkStats()
        flight = InFlight(random.getrandbits(63), channel)
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

    def _open(self, task: ChunkTask, flight: InFlight, stats: ChunkStats) -> None:
        wanted = min(len(task.subchunks), self._config.slots_per_chunk, task.peer.landing_slots, MOST_GRANTED_SLOTS)
        flight.channel.send(
            Open(
                chunk=flight.chunk,
                boot_id=task.peer.boot_id,
                room=task.room,
                prompt=task.prompt,
                page_start=task.page_start,
                page_count=len(task.pages),
                geometry_digest=task.view.geometry.digest(),
                first_head=task.decode_head,
                heads=task.view.geometry.kv_heads,
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
            raise refusal(answer)
        if answer is None:
            text = f"decode at {task.peer.control_endpoint} did not answer OPEN within {timeout} s"
            raise GoNativeError(Reason.OPEN_TIMEOUT, text)
        raise GoNativeError(Reason.CONTROL_ERROR, f"decode answered OPEN with {type(answer).__name__}")

    def _run(self, task: ChunkTask, flight: InFlight, stats: ChunkStats) -> None:
        page_size = task.view.geometry.page_size
        for piece in pieces_of(task.pages, task.tiers, task.subchunks, page_size, task.first_position):
            if not task.room_is_live():
                raise ChunkFailedError(FailureCause.ROOM_GONE, f"room {task.room} was aborted on prefill")
            self._commit_ended_writes(task, flight, stats)
            remote = self._next_remote_slot(task, flight, stats)
            staging = self._lend_staging(task, flight, stats)
            self._queue_pack(task, piece, staging, remote, flight)
            while len(flight.packing) > self._packs_ahead:
                self._write(task, flight, stats)
        while flight.packing:
            self._write(task, flight, stats)
        while flight.writing:
            self._commit(task, flight, stats)
        while flight.unanswered:
            self._take_answer(flight, stats)

    def _queue_pack(self, task: ChunkTask, piece: Piece, staging: Slot, remote: SlotGrant, flight: InFlight) -> None:
        """Begin to fill ``staging`` with the payload of a sub-chunk that is meant for ``remote``."""
        job = PackJob(task.room, remote.generation, piece, task.table)
        try:
            payload = pack_into_slot(job, task.view, self._memory, staging.index)
        except BaseException:
            if self._device.type == "cuda":  # what was queued before the error may still write to the slot
                torch.cuda.current_stream(self._device).synchronize()
            self._staging.give_back(staging)
            raise
        flight.packing.append(Packing(job, staging, remote, payload))

    def _write(self, task: ChunkTask, flight: InFlight, stats: ChunkStats) -> None:
        """Submit the write of the payload that was queued for packing first, once it is packed."""
        packing = flight.packing[0]
        packed = packing.payload.wait()
        stats.pack_seconds += packed.seconds
        self._metrics.pack(packed.seconds)
        self._commit_ended_writes(task, flight, stats)
        while len(flight.writing) >= MOST_WRITES:
            self._commit(task, flight, stats)
        stored = self._stored(task, packing)
        source = self._memory.address(packing.staging.index)
        write = self._writes.submit(task.session, source, packing.remote.address, stored.length)
        flight.packing.popleft()
        flight.writing.append(Writing(packing.job, packing.staging, packing.remote, packed.checksum, stored, write))
        stats.writes += 1
        stats.wire_bytes += stored.length
        stats.saved_bytes += packing.job.piece.subchunk.payload_bytes - stored.length

    def _stored(self, task: ChunkTask, packing: Packing) -> Stored:
        """How the packed payload is to be written: as it is, or compressed in its slot."""
        length = packing.job.piece.subchunk.payload_bytes
        if self._compressing is None:
            return Stored(length)
        return self._compressing.shrink(
            packing.staging.index, length, task.table.digest(), task.session, task.peer.codecs
        )

    def _commit_ended_writes(self, task: ChunkTask, flight: InFlight, stats: ChunkStats) -> None:
        """Tell decode of every payload that is complete by now, so that unpacking does not wait for the next pack."""
        while flight.writing and self._commit(task, flight, stats, wait=False):
            pass

    def _commit(self, task: ChunkTask, flight: InFlight, stats: ChunkStats, *, wait: bool = True) -> bool:
        """Tell decode that the payload of the oldest write is complete; False: it is not, and was not waited for."""
        written = flight.writing[0]
        seconds = self._end_of_write(flight, wait=wait)
        if seconds is None:
            return False
        stats.write_seconds += seconds
        self._metrics.write(seconds)
        flight.channel.send(
            written.job.commit(
                chunk=flight.chunk,
                slot=written.remote.slot,
                page_start=task.page_start,
                checksum=written.checksum,
                codec=written.stored.codec,
                stored=written.stored.length if written.stored.codec else 0,
            )
        )
        flight.unanswered[written.job.piece.sequence] = written.remote.slot
        return True

    def _end_of_write(self, flight: InFlight, *, wait: bool) -> float | None:
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

    def _next_remote_slot(self, task: ChunkTask, flight: InFlight, stats: ChunkStats) -> SlotGrant:
        while not flight.remote:
            if flight.unanswered:
                self._take_answer(flight, stats)
            else:  # none comes back before its payload is written and committed
                self._move_on(task, flight, stats)
        return flight.remote.popleft()

    def _move_on(self, task: ChunkTask, flight: InFlight, stats: ChunkStats) -> None:
        """Take the oldest payload one step further."""
        if flight.writing:
            self._commit(task, flight, stats)
        else:
            self._write(task, flight, stats)

    def _lend_staging(self, task: ChunkTask, flight: InFlight, stats: ChunkStats) -> Slot:
        lent = self._staging.lend(1)
        # A worker that waits for a slot must hold none, or all of them wait for each other.
        while not lent and (flight.packing or flight.writing):
            self._move_on(task, flight, stats)
            lent = self._staging.lend(1)
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
        return lent[0]

    def _take_answer(self, flight: InFlight, stats: ChunkStats) -> None:
        started = time.perf_counter()
        answer = self._next_answer(flight, self._config.unpack_timeout_s)
        waited = time.perf_counter() - started
        stats.wait_seconds += waited
        self._metrics.wait(Wait.DONE, waited)
        if isinstance(answer, Done):
            stats.unpack_seconds += answer.unpack_seconds
            flight.remote.append(SlotGrant(answer.slot, answer.generation, flight.addresses[answer.slot]))
            return
        if answer is not None:
            raise failure(answer, self._metrics)
        raise ChunkFailedError(
            FailureCause.COMMIT_TIMEOUT, f"decode did not answer COMMIT within {self._config.unpack_timeout_s} s"
        )

    def _next_answer(self, flight: InFlight, timeout: float) -> Done | Failed | None:
        """The answer to some commit that has none yet; None after ``timeout`` seconds.

        An answer that came before, or to what was not asked, is counted as stale: a slot that was taken for free twice
        would be written while decode still reads it.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                answer = flight.channel.receive(flight.chunk, max(0.0, deadline - time.monotonic()))
            except ControlMessageError as error:
                raise ChunkFailedError(FailureCause.BAD_MESSAGE, f"decode's answer is unreadable: {error}") from error
            if answer is None:
                return None
            if isinstance(answer, (Done, Failed)):
                slot = flight.unanswered.get(answer.sequence)
                if slot is not None and (isinstance(answer, Failed) or answer.slot == slot):
                    del flight.unanswered[answer.sequence]
                    return answer
            flight.channel.stale_messages += 1
            if time.monotonic() > deadline:  # a peer that floods us must not keep us here
                return None

    # ---- endings -------------------------------------------------------------------------------------------------

    def _let_unpacks_end(self, flight: InFlight) -> None:
        """Before the chunk goes native: no earlier sub-chunk may be unpacked over what the native path writes."""
        deadline = time.monotonic() + self._config.unpack_timeout_s
        while flight.unanswered:
            answer = self._next_answer(flight, max(0.0, deadline - time.monotonic()))
            if isinstance(answer, Failed) and isinstance(cause := failure(answer, self._metrics), ChunkFailedError):
                raise cause
            if answer is None:
                raise ChunkFailedError(
                    FailureCause.COMMIT_TIMEOUT,
                    f"decode did not end its unpacking within {self._config.unpack_timeout_s} s",
                )

    def _finish(self, flight: InFlight) -> None:
        """Release every slot of the chunk on both sides."""
        while flight.packing:
            packing = flight.packing.popleft()
            try:
                packing.payload.wait()  # until then the GPU may write to the slot
                self._staging.give_back(packing.staging)
            except Exception:
                self._staging.quarantine(packing.staging)
                logger.exception("packing did not end; its staging slot rests")
        while flight.writing:
            try:
                self._end_of_write(flight, wait=True)
            except ChunkFailedError as error:
                self._metrics.failure(error.cause)
        try:
            flight.channel.send(Close(chunk=flight.chunk, failed_slots=flight.failed_remote))
        except ChunkFailedError as error:
            logger.warning("landing slots return only when their lease ends: %s", error)
