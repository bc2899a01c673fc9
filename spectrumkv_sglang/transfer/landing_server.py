"""Decode's side of the control channel: lends landing slots, unpacks what is committed, answers.

One thread owns the ROUTER socket and all chunk state. Unpacking runs on a thread of its own, so that a long unpack
never delays a grant; its results come back through a queue and an in-process socket pair that wakes the first one.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import zmq

from spectrumkv_sglang.observability.metrics import TransferMetrics
from spectrumkv_sglang.observability.once import log_once
from spectrumkv_sglang.observability.reasons import FailureCause, Reason, Rejection
from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.profiles.tier import Tier
from spectrumkv_sglang.transfer.control_keys import ControlKeys
from spectrumkv_sglang.transfer.control_listener import ControlListener
from spectrumkv_sglang.transfer.errors import ChunkFailedError, ControlMessageError
from spectrumkv_sglang.transfer.lossless_stage import Restoring
from spectrumkv_sglang.transfer.messages import (
    MOST_UNPACK_SECONDS,
    Close,
    Commit,
    DecodeMessage,
    Done,
    Failed,
    Granted,
    Open,
    Refused,
    SlotGrant,
    decode_from_prefill,
    encode,
)
from spectrumkv_sglang.transfer.pool_view import PoolView
from spectrumkv_sglang.transfer.rooms import RoomRegistry
from spectrumkv_sglang.transfer.slot_memory import SlotMemory
from spectrumkv_sglang.transfer.slot_pool import Slot, SlotPool
from spectrumkv_sglang.transfer.tier_agreement import forbidden_in
from spectrumkv_sglang.transfer.unpacking import UnpackJob, unpack_commit

logger = logging.getLogger(__name__)

_IDLE_POLL_SECONDS = 0.5
_WAITING_POLL_SECONDS = 0.005
_MOST_WAITING = 4096
_CLOSED_ROOM_SECONDS = 5.0  # a live prefill that writes for a closed room says CLOSE, or COMMIT, sooner

ChunkKey = tuple[bytes, int]


@dataclass
class _OpenChunk:
    open: Open
    registration: int  # of the room, see RoomRegistry
    view: PoolView  # of the heads that it may write
    table: PrecisionTable
    slots: dict[int, Slot] = field(default_factory=dict)
    unpacking: set[int] = field(default_factory=set)
    last_seen: float = 0.0
    closed: bool = False
    failed_slots: frozenset[int] = frozenset()


@dataclass
class _Waiting:
    key: ChunkKey
    chunk: _OpenChunk
    deadline: float


@dataclass
class _Result:
    key: ChunkKey
    commit: Commit
    seconds: float
    failure: ChunkFailedError | None


class LandingServer:
    """Serves one decode rank's landing slots.

    Args:
        allowed_tiers: token tiers that may be unpacked here. Without LOW, no tier may hold a precision under 8 bits.
        boot_id: what the handshake calls this process; an OPEN that names another is refused.
        bind_host, advertised_host, ports, rank, keys: see ControlListener.
        lease_seconds: a chunk from which nothing was heard for this long is given up and its slots quarantined.
        slot_wait_seconds: upper bound for how long an OPEN may wait for a free slot.

    Raises:
        SpectrumKVError: the control socket cannot be bound.
    """

    def __init__(
        self,
        *,
        view: PoolView,
        memory: SlotMemory,
        pool: SlotPool,
        rooms: RoomRegistry,
        metrics: TransferMetrics,
        allowed_tiers: tuple[Tier, ...],
        boot_id: int,
        bind_host: str,
        advertised_host: str,
        lease_seconds: float,
        slot_wait_seconds: float,
        ports: range = range(0),
        rank: int = 0,
        keys: ControlKeys | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view, self._memory, self._pool, self._rooms, self._metrics = view, memory, pool, rooms, metrics
        self._allowed_tiers, self._boot_id = allowed_tiers, boot_id
        self._restoring = Restoring(memory)
        self._lease_seconds, self._slot_wait_seconds, self._clock = lease_seconds, slot_wait_seconds, clock
        self._chunks: dict[ChunkKey, _OpenChunk] = {}
        self._waiting: list[_Waiting] = []
        self._jobs: queue.SimpleQueue[tuple[ChunkKey, UnpackJob, PoolView] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[_Result] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._context = zmq.Context()
        try:
            self._listener = ControlListener(
                self._context, bind_host=bind_host, advertised_host=advertised_host, ports=ports, rank=rank, keys=keys
            )
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._router, self.endpoint = self._listener.socket, self._listener.endpoint
        self._wake_receiver = self._context.socket(zmq.PAIR)
        self._wake_receiver.bind("inproc://unpacked")
        self._threads = [
            threading.Thread(target=self._serve, name="spectrumkv-control", daemon=True),
            threading.Thread(target=self._unpack_loop, name="spectrumkv-unpack", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def codecs(self) -> list[str]:
        """Lossless codecs whose payloads can be brought back."""
        return list(self._restoring.codecs)

    def open_chunks(self) -> int:
        """Number of chunks that hold or await slots."""
        return len(self._chunks) + len(self._waiting)

    def close(self, timeout: float = 10.0) -> None:
        """End both threads and close the sockets; waits at most ``timeout`` seconds for each thread."""
        self._stopping.set()
        self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout)
        self._context.destroy(linger=0)

    # ---- unpack thread -------------------------------------------------------------------------------------------

    def _unpack_loop(self) -> None:
        wake = self._context.socket(zmq.PAIR)
        wake.connect("inproc://unpacked")
        device = self._view.device
        # Of high priority: unpacking is short, and a request's first token waits for it.
        stream = torch.cuda.stream(torch.cuda.Stream(device, priority=-1)) if device.type == "cuda" else nullcontext()
        with stream:
            while (item := self._jobs.get()) is not None:
                self._results.put(self._unpack(*item))
                wake.send(b"")
        wake.send(b"")  # the control thread is to see at once that the server is stopping
        wake.close()

    def _unpack(self, key: ChunkKey, job: UnpackJob, view: PoolView) -> _Result:
        failure: ChunkFailedError | None = None
        seconds = 0.0
        try:
            seconds = unpack_commit(job, view, self._memory, self._rooms, self._restoring)
        except ChunkFailedError as error:
            failure = error
        except Exception as error:
            logger.exception("unpacking a payload of room %d failed", job.room)
            failure = ChunkFailedError(FailureCause.UNPACK_FAILED, f"unpacking failed on decode: {error!r}")
        return _Result(key, job.commit, seconds, failure)

    # ---- control thread ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        poller = zmq.Poller()
        self._listener.register(poller)
        poller.register(self._wake_receiver, zmq.POLLIN)
        while not self._stopping.is_set():
            pause = _WAITING_POLL_SECONDS if self._waiting else _IDLE_POLL_SECONDS
            ready = dict(poller.poll(int(pause * 1000)))
            try:
                self._count_refused(self._listener.refusals())
                if self._wake_receiver in ready:
                    self._drain_results()
                if self._router in ready:
                    self._drain_requests()
                self._serve_waiting()
                self._expire_leases()
                self._report_slots()
            except Exception:
                logger.exception("landing server: unexpected error; the server goes on")
                self._metrics.failure(FailureCause.INTERNAL_ERROR)

    def _drain_requests(self) -> None:
        for _ in range(64):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 2:
                self._reject_garbage(f"expected 1 frame behind the identity, got {len(frames) - 1}")
                continue
            try:
                message = decode_from_prefill(frames[1])
            except ControlMessageError as error:
                self._reject_garbage(str(error))
                continue
            key = (frames[0], message.chunk)
            if isinstance(message, Open):
                self._on_open(key, message)
            elif isinstance(message, Commit):
                self._on_commit(key, message)
            else:
                self._on_close(key, message)

    def _reject_garbage(self, detail: str) -> None:
        self._metrics.control_message_rejected(Rejection.GARBAGE)
        log_once(logger, logging.WARNING, "bad-control-message", f"dropped a control message: {detail}")

    def _count_refused(self, connections: int) -> None:
        for _ in range(connections):
            self._metrics.control_message_rejected(Rejection.UNAUTHENTICATED)
        if connections:
            log_once(
                logger,
                logging.WARNING,
                "control-unauthenticated",
                f"refused {connections} connections to the control port by peers without its control secret: "
                "give every prefill and decode server the same control_secret_file, and open the port to no one else",
            )

    def _on_open(self, key: ChunkKey, message: Open) -> None:
        if message.boot_id != self._boot_id:
            self._metrics.control_message_rejected(Rejection.UNKNOWN_PEER)
            text = (
                "this OPEN is for another decode process than the one that listens here: its handshake is needed first"
            )
            log_once(
                logger,
                logging.WARNING,
                "unknown-peer",
                f"refused a chunk of a peer that never got our handshake: {text}",
            )
            self._reply(key, Refused(key[1], Reason.CONTROL_ERROR.value, text))
            return
        if key in self._chunks or any(waiting.key == key for waiting in self._waiting):
            self._metrics.control_message_rejected(Rejection.STALE)  # a second copy: the first is answered
            return
        view = self._named_heads(message)
        if view is None or message.geometry_digest != view.geometry.digest():
            text = f"{message.heads} heads from {message.first_head} on were named, decode has {self._view.geometry}"
            self._reply(key, Refused(key[1], Reason.GEOMETRY_MISMATCH.value, text))
            return
        try:
            table = PrecisionTable.from_bytes(message.table, view.geometry)
            forbidden = forbidden_in(table, message.tiers, self._allowed_tiers)
            registration = self._rooms.registration(
                message.room, message.page_start, message.page_count, message.prompt
            )
        except PayloadError as error:
            self._reject_garbage(f"OPEN of room {message.room}: {error}")
            self._reply(key, Refused(key[1], Reason.CONTROL_ERROR.value, str(error)))
            return
        except ChunkFailedError as error:
            self._metrics.failure(error.cause)
            self._reply(key, Refused(key[1], error.cause.value, str(error)))
            return
        if forbidden:
            text = f"room {message.room} was to be sent with {forbidden}"
            log_once(logger, logging.WARNING, "tier-forbidden", f"refused a chunk, which then travels natively: {text}")
            self._reply(key, Refused(key[1], Reason.TIER_FORBIDDEN.value, text[:1024]))
            return
        if table.needs_rotation and self._view.rotation is None:
            text = f"decode does not know the angles of keys that travel unrotated: {self._view.why_no_rotation}"
            self._reply(key, Refused(key[1], Reason.ROTATION_UNKNOWN.value, text[:1024]))
            return
        chunk = _OpenChunk(message, registration, view, table, last_seen=self._clock())
        if not self._waiting and self._grant(key, chunk):
            return
        if len(self._waiting) >= _MOST_WAITING:
            self._reply(key, Refused(key[1], Reason.POOL_EXHAUSTED.value, "too many chunks wait for a landing slot"))
            return
        wait = min(message.wait_seconds, self._slot_wait_seconds)
        self._waiting.append(_Waiting(key, chunk, self._clock() + wait))

    def _named_heads(self, message: Open) -> PoolView | None:
        """The part of our pool that the chunk may be written to; None: we do not have these heads, or no even split
        gives them. Kernels are compiled for each number of heads, and views of few parts are kept."""
        if self._view.geometry.kv_heads % message.heads or message.first_head % message.heads:
            return None
        try:
            return self._view.of_heads(message.first_head, message.heads)
        except PayloadError:
            return None

    def _grant(self, key: ChunkKey, chunk: _OpenChunk) -> bool:
        lent = self._pool.lend(chunk.open.slots_wanted)
        if not lent:
            return False
        chunk.slots = {slot.index: slot for slot in lent}
        chunk.last_seen = self._clock()
        self._chunks[key] = chunk
        grants = [SlotGrant(slot.index, slot.generation, self._memory.address(slot.index)) for slot in lent]
        self._reply(key, Granted(key[1], grants, self._memory.slot_bytes))
        return True

    def _serve_waiting(self) -> None:
        gone = [waiting for waiting in self._waiting if not self._room_is_open(waiting.chunk)]
        if gone:
            keys = {waiting.key for waiting in gone}
            self._waiting = [waiting for waiting in self._waiting if waiting.key not in keys]
            for waiting in gone:
                # Not "pool exhausted": that would send the chunk natively, into pages that may be freed by now.
                self._metrics.failure(FailureCause.ROOM_GONE)
                text = f"room {waiting.chunk.open.room} was closed while its chunk waited for a landing slot"
                self._reply(waiting.key, Refused(waiting.key[1], FailureCause.ROOM_GONE.value, text))
        while self._waiting and self._grant(self._waiting[0].key, self._waiting[0].chunk):
            self._waiting.pop(0)
        now = self._clock()
        expired = [waiting for waiting in self._waiting if waiting.deadline <= now]
        if expired:
            self._waiting = [waiting for waiting in self._waiting if waiting.deadline > now]
            counts = self._pool.counts()
            text = f"no landing slot became free ({counts.in_use} in use, {counts.quarantined} quarantined)"
            for waiting in expired:
                self._reply(waiting.key, Refused(waiting.key[1], Reason.POOL_EXHAUSTED.value, text))

    def _room_is_open(self, chunk: _OpenChunk) -> bool:
        try:
            registration = self._rooms.registration(chunk.open.room, chunk.open.page_start, chunk.open.page_count)
        except ChunkFailedError:
            return False
        return registration == chunk.registration

    def _on_commit(self, key: ChunkKey, commit: Commit) -> None:
        chunk = self._chunks.get(key)
        slot = chunk.slots.get(commit.slot) if chunk else None
        if chunk is None or slot is None or slot.generation != commit.generation:
            if chunk is not None and not self._room_is_open(chunk):
                # Not "stale": that would send the chunk natively, into pages that may be freed by now.
                self._fail(key, commit, FailureCause.ROOM_GONE, f"room {chunk.open.room} is closed")
                return
            held = slot.generation if slot else None
            self._fail(
                key,
                commit,
                FailureCause.STALE_GENERATION,
                f"slot {commit.slot} generation {commit.generation} is not granted to this chunk (held: {held})",
            )
            return
        if slot.index in chunk.unpacking:
            self._metrics.control_message_rejected(Rejection.STALE)  # a second copy: the first is answered
            return
        self._prolong(chunk)
        begin, end = chunk.open.page_start, chunk.open.page_start + chunk.open.page_count
        if commit.page_start < begin or commit.page_start + commit.page_count > end:
            self._fail(
                key,
                commit,
                FailureCause.PAGE_RANGE,
                f"pages {commit.page_start}+{commit.page_count} lie outside the opened range {begin}..{end - 1}",
            )
            return
        undeclared = [tier for tier, rows in enumerate(commit.rows_per_tier) if rows and tier not in chunk.open.tiers]
        if undeclared:
            self._fail(
                key,
                commit,
                FailureCause.TIER_UNDECLARED,
                f"rows of tiers {undeclared} arrived, OPEN declared only {chunk.open.tiers}",
            )
            return
        chunk.unpacking.add(commit.slot)
        job = UnpackJob(commit, chunk.open.room, chunk.registration, chunk.table)
        self._jobs.put((key, job, chunk.view))

    def _prolong(self, chunk: _OpenChunk) -> None:
        """Begin its lease anew; not once its room has closed, or a peer that goes on talking would keep the slots."""
        if self._room_is_open(chunk):
            chunk.last_seen = self._clock()

    def _drain_results(self) -> None:
        while self._wake_receiver.poll(0):
            self._wake_receiver.recv()
        while not self._results.empty():
            result = self._results.get_nowait()
            chunk = self._chunks.get(result.key)
            if chunk is None:
                continue
            index = result.commit.slot
            chunk.unpacking.discard(index)
            self._prolong(chunk)
            renewed = chunk.slots[index] = self._pool.renew(chunk.slots[index])
            if result.failure is None:
                self._metrics.unpack(result.seconds, chunk.open.room)
                self._reply(
                    result.key,
                    Done(
                        result.key[1],
                        result.commit.sequence,
                        index,
                        renewed.generation,
                        min(result.seconds, MOST_UNPACK_SECONDS),
                    ),
                )
            else:
                self._fail(result.key, result.commit, result.failure.cause, str(result.failure))
            if chunk.closed:
                self._release(result.key, chunk)

    def _on_close(self, key: ChunkKey, message: Close) -> None:
        self._waiting = [waiting for waiting in self._waiting if waiting.key != key]
        chunk = self._chunks.get(key)
        if chunk is not None:
            chunk.closed = True
            chunk.failed_slots = frozenset(message.failed_slots)
            self._release(key, chunk)

    def _release(self, key: ChunkKey, chunk: _OpenChunk) -> None:
        """Return the slots of a closed chunk, except those that are still being unpacked."""
        for index in [index for index in chunk.slots if index not in chunk.unpacking]:
            slot = chunk.slots.pop(index)
            if index in chunk.failed_slots:
                self._pool.quarantine(slot)
            else:
                self._pool.give_back(slot)
        if not chunk.slots:
            self._chunks.pop(key, None)

    def _expire_leases(self) -> None:
        now = self._clock()
        for chunk in list(self._chunks.values()):
            silent = now - chunk.last_seen > min(_CLOSED_ROOM_SECONDS, self._lease_seconds)
            if silent and not chunk.closed and chunk.slots.keys() - chunk.unpacking and not self._room_is_open(chunk):
                self._take_slots_back(chunk)
        late = [key for key, chunk in self._chunks.items() if now - chunk.last_seen > self._lease_seconds]
        for key in late:
            chunk = self._chunks[key]
            if chunk.closed:
                continue
            if not chunk.slots:  # taken back when its room closed
                del self._chunks[key]
                continue
            self._metrics.failure(FailureCause.SLOT_LEASE_EXPIRED)
            log_once(
                logger,
                logging.WARNING,
                "slot-lease-expired",
                f"nothing heard for {self._lease_seconds} s about a chunk of room {chunk.open.room}; "
                f"its {len(chunk.slots)} landing slots go into quarantine (is the prefill rank dead?)",
            )
            chunk.closed = True
            chunk.failed_slots = frozenset(chunk.slots)
            self._release(key, chunk)

    def _take_slots_back(self, chunk: _OpenChunk) -> None:
        """Of a chunk whose room has closed and whose prefill does not say CLOSE: dead, most likely. Its last write may
        still be going on. The chunk stays known until its lease ends, so that a COMMIT gets a clear answer."""
        indices = [index for index in chunk.slots if index not in chunk.unpacking]
        for index in indices:
            self._pool.quarantine(chunk.slots.pop(index))
        self._metrics.failure(FailureCause.ROOM_GONE)
        log_once(
            logger,
            logging.WARNING,
            "slots-of-closed-room",
            f"room {chunk.open.room} has closed and its prefill does not give its slots back (dead?): "
            f"{len(indices)} landing slots go into quarantine",
        )

    def _fail(self, key: ChunkKey, commit: Commit, cause: FailureCause, text: str) -> None:
        self._metrics.failure(cause)
        log_once(logger, logging.WARNING, f"commit-{cause.value}", f"refused a payload: {text}")
        self._reply(key, Failed(key[1], commit.sequence, cause.value, text[:1024]))

    def _reply(self, key: ChunkKey, message: DecodeMessage) -> None:
        try:
            self._router.send_multipart([key[0], encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # the peer is gone or its queue is full; its lease will expire
            log_once(logger, logging.WARNING, "control-reply", f"could not answer a prefill rank: {error}")

    def _report_slots(self) -> None:
        counts = self._pool.counts()
        self._metrics.landing_slots(in_use=counts.in_use, free=counts.free, quarantined=counts.quarantined)
