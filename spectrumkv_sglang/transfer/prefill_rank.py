"""The prefill side of one rank: decides for each chunk between the tiered and the native path, and keeps the books."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
import zmq

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.importance.scorers import AttentionScorer
from spectrumkv_sglang.importance.scores import SlotScores
from spectrumkv_sglang.lossless.codec import make_codec
from spectrumkv_sglang.observability.metrics import TransferMetrics
from spectrumkv_sglang.observability.once import log_once
from spectrumkv_sglang.observability.reasons import FailureCause, Path, Reason
from spectrumkv_sglang.observability.transfer_log import ChunkRecord, TokensByTier, TransferLog
from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.profiles.tier import Tier
from spectrumkv_sglang.transfer.chunk_planner import ChunkPlanner, PlannedChunk
from spectrumkv_sglang.transfer.chunk_sender import ChunkSender
from spectrumkv_sglang.transfer.chunk_state import ChunkTask
from spectrumkv_sglang.transfer.control_channel import ControlChannels
from spectrumkv_sglang.transfer.control_keys import ControlKeys
from spectrumkv_sglang.transfer.errors import ChunkFailedError, ControlMessageError, GoNativeError
from spectrumkv_sglang.transfer.handshake import Handshake
from spectrumkv_sglang.transfer.lossless_stage import Compressing
from spectrumkv_sglang.transfer.mooncake_writes import MooncakeWrites
from spectrumkv_sglang.transfer.outgoing_request import NOTHING_SENT, BytesSent, ChunkCost, OutgoingRequest
from spectrumkv_sglang.transfer.peer_fit import Destination, PeerFit
from spectrumkv_sglang.transfer.pool_view import PoolView
from spectrumkv_sglang.transfer.request_identity import UNKNOWN
from spectrumkv_sglang.transfer.room_decisions import RoomDecisions
from spectrumkv_sglang.transfer.sending_policy import SendingPolicy, ServedCandidates
from spectrumkv_sglang.transfer.shared_heads import RankHeads
from spectrumkv_sglang.transfer.slot_memory import SlotMemory
from spectrumkv_sglang.transfer.slot_pool import SlotPool
from spectrumkv_sglang.transfer.warm_up import warm_up
from spectrumkv_sglang.tuning.decision import Decision

logger = logging.getLogger(__name__)

_QUIET = (Reason.DISABLED, Reason.BYPASS, Reason.DRY_RUN)  # as configured, nothing to warn of
_DECIDED_NATIVE = (Reason.BYPASS, Reason.DRY_RUN)


@dataclass(frozen=True)
class OutgoingChunk:
    """What SGLang asks to be sent.

    ``pages`` are prefill's page ids; the chunk covers pages [page_start, page_start + len(pages)) of what decode
    allocated for the room. ``prefix_tokens`` of the prompt lie on decode already. ``room_pages`` is the number of
    pages that decode allocated. ``native_misfit`` says why SGLang's own path would corrupt decode's KV, if it would.
    ``sliced``: the peers' TP sizes differ, and SGLang would send the heads that both hold, not whole pages.
    ``page_bytes`` are those that SGLang would send of each page; None: all of it.
    ``forward_done`` are CUDA events after the forward that writes the pages. ``prompt`` is the digest of the request's.
    ``request`` is the one whose chunk it is, the same object for all of its chunks: a room id does not tell.
    """

    room: int
    session: str
    pages: np.ndarray
    page_start: int
    room_pages: int
    prefix_tokens: int
    last_chunk: bool
    peer: Handshake | ControlMessageError | None
    room_is_live: Callable[[], bool]
    forward_done: tuple[Any, ...] = ()
    native_misfit: str = ""
    sliced: bool = False
    page_bytes: int | None = None
    prompt: int = UNKNOWN
    request: OutgoingRequest = field(default_factory=OutgoingRequest)


@dataclass(frozen=True)
class NativeResult:
    """What SGLang's own path answered: its return code and the number of Mooncake blocks that it wrote."""

    code: int
    writes: int


class PrefillRank:
    """Owns everything that sends tiered payloads in one prefill process.

    Args:
        view: the pool, or the GoNativeError that says why its KV is not tiered.
        engine: Mooncake's TransferEngine.
        page_bytes: native bytes of one page over all layers.
        heads: KV heads of the model that the pool holds; None: not known, then decode must have as many ranks.
        served: what the controller may choose from; None: every room travels as configured.
    """

    def __init__(
        self,
        *,
        view: PoolView | GoNativeError,
        config: SpectrumKVConfig,
        engine: Any,
        page_size: int,
        page_bytes: int,
        metrics: TransferMetrics,
        served: ServedCandidates | None = None,
        heads: RankHeads | None = None,
    ) -> None:
        self._view, self._config, self._metrics = view, config, metrics
        self._page_size, self._page_bytes = page_size, page_bytes
        self._log = (
            TransferLog(str(config.transfer_log), on_error=metrics.transfer_log_error) if config.transfer_log else None
        )
        self._per_thread = threading.local()
        self._context = zmq.Context()
        self._keys = ControlKeys.of(config)
        self._fit = PeerFit(config, self._keys, heads)
        self.scores: SlotScores | None = None
        self.scorer = config.make_scorer()
        self.decisions: RoomDecisions | None = None
        if isinstance(view, PoolView):
            self._memory = SlotMemory(engine, config.staging_slots, config.slot_bytes, view.device)
            self._staging = SlotPool(config.staging_slots, config.quarantine_s)
            policies = [SendingPolicy.of(config)]
            codec = make_codec(config.codec, view.buffers.k[0].element_size())
            self._compressing = Compressing(codec, self._memory, metrics) if codec is not None else None
            clock = self._compressing.clock if self._compressing is not None else None
            if served is not None:
                self.decisions = RoomDecisions(
                    served, config.controller, view, min_tokens=config.min_tokens, metrics=metrics
                )
                policies += served.policies.values()
                clock = self.decisions.clock  # there is no codec beside the controller
            self._writes = MooncakeWrites(engine, config.write_timeout_s, clock)
            # A profile of one tier has nothing to choose: no forward is to pay for observing its attention.
            observed = any(len(policy.usable_tiers) > 1 for policy in policies)
            if isinstance(self.scorer, AttentionScorer) and observed:
                self.scores = SlotScores(view.pool_slots, view.device)
            self._planners = {(0, view.geometry.kv_heads): ChunkPlanner(view, config, self.scorer, self.scores)}
            self._policies = tuple(policies)
            warm_up(view, self._policies)

    def send(
        self, chunk: OutgoingChunk, send_natively: Callable[[], NativeResult], native_only: Reason | None = None
    ) -> tuple[int, bool]:
        """Send one chunk by whichever path fits; returns (0 or SGLang's error code, whether the peer is suspect).

        ``native_only`` is the reason when the caller already knows that only SGLang's own path fits. Never raises: an
        exception would end SGLang's transfer thread and the server with it.
        """
        started = time.perf_counter()
        try:
            if native_only is not None:
                return self._go_native(chunk, GoNativeError(native_only, native_only.meaning), send_natively, started)
            if self.decisions is None:
                return self._send(chunk, send_natively, started, None, ChunkCost())
            with self.decisions.sending(chunk.request, chunk.session, last=chunk.last_chunk) as cost:
                return self._send(chunk, send_natively, started, self.decisions, cost)
        except ChunkFailedError as error:
            self._metrics.chunk_failed(chunk.room, error.cause, time.perf_counter() - started)
            log_once(logger, logging.ERROR, f"chunk-{error.cause.value}", f"room {chunk.room} failed: {error}")
            return -1, error.peer_suspect
        except Exception:
            self._metrics.chunk_failed(chunk.room, FailureCause.INTERNAL_ERROR, time.perf_counter() - started)
            logger.exception("room %d failed: unexpected error while sending a chunk", chunk.room)
            return -1, False

    @property
    def kv_heads(self) -> int | None:
        """KV heads of this rank, where its pool is known."""
        return self._view.geometry.kv_heads if isinstance(self._view, PoolView) else None

    def close(self) -> None:
        """Release the staging region and the log. Control sockets end with their context."""
        if isinstance(self._view, PoolView):
            self._memory.close()
        if self._log is not None:
            self._log.close()
        self._context.destroy(linger=0)

    def _send(
        self,
        chunk: OutgoingChunk,
        send_natively: Callable[[], NativeResult],
        started: float,
        decisions: RoomDecisions | None,
        cost: ChunkCost,
    ) -> tuple[int, bool]:
        """As :meth:`send`, for a chunk that may be tiered."""
        decision: Decision | None = None
        try:
            destination = self._fit.require(self._view, chunk.session, chunk.peer, sliced=chunk.sliced)
            policy: SendingPolicy | None = None
            if decisions is not None:
                decision = self._decide(decisions, chunk, destination.peer)
                policy = decisions.require_tiered(decision)
            self._account(chunk, self._send_tiered(chunk, destination, policy, cost), started, decision)
            cost.as_decided = True
            return 0, False
        except GoNativeError as reason:
            return self._go_native(chunk, reason, send_natively, started, decision, cost)

    def _decide(self, decisions: RoomDecisions, chunk: OutgoingChunk, peer: Handshake) -> Decision:
        """The decision for the chunk's room. GoNativeError: it could not be taken, and nothing less is safe."""
        try:
            return decisions.decide(
                chunk.request,
                chunk.session,
                peer,
                prompt_tokens=chunk.prefix_tokens + chunk.room_pages * self._page_size,
                native_bytes=chunk.room_pages * self._page_bytes_of(chunk),
            )
        except Exception as error:
            logger.exception("room %d: the controller failed", chunk.room)
            raise GoNativeError(Reason.INTERNAL_ERROR, f"the controller failed: {error!r}") from error

    # ---- tiered --------------------------------------------------------------------------------------------------

    def _send_tiered(
        self, chunk: OutgoingChunk, destination: Destination, policy: SendingPolicy | None, cost: ChunkCost
    ) -> ChunkRecord:
        began = time.perf_counter()
        view, peer, decode_head = destination
        with self._device_stream(view, chunk):  # importance is the forward's, too
            planned = self._plan(chunk, view, peer, policy)
            plan = planned.plan
            task = ChunkTask(
                room=chunk.room,
                session=chunk.session,
                peer=peer,
                view=view,
                decode_head=decode_head,
                pages=chunk.pages,
                page_start=chunk.page_start,
                first_position=self._first_position(chunk),
                tiers=plan.tiers,
                table=planned.table,
                subchunks=plan.subchunks,
                room_is_live=chunk.room_is_live,
                prompt=chunk.prompt,
            )
            try:
                stats = self._sender(view).send(task)
            finally:  # a failed write leaves its slot in quarantine
                staging = self._staging.counts()
                self._metrics.staging_slots(in_use=staging.in_use, free=staging.free, quarantined=staging.quarantined)
        cost.native_bytes, cost.wire_bytes = plan.native_bytes, stats.wire_bytes
        cost.pack_s, cost.unpack_s = stats.pack_seconds, stats.unpack_seconds
        cost.seconds = time.perf_counter() - began
        counts = np.bincount(plan.tiers, minlength=len(Tier)).tolist()
        return ChunkRecord(
            time=time.time(),
            room=chunk.room,
            path=Path.TIERED,
            reason=planned.reason,
            profile=planned.profile,
            tokens=len(plan.tiers),
            native_bytes=plan.native_bytes,
            wire_bytes=stats.wire_bytes,
            achieved_b=stats.wire_bytes / plan.native_bytes,
            tokens_by_tier=TokensByTier(high=counts[Tier.HIGH], mid=counts[Tier.MID], low=counts[Tier.LOW]),
            writes=stats.writes,
            subchunks=len(plan.subchunks),
            pack_seconds=stats.pack_seconds,
            write_seconds=stats.write_seconds,
            wait_seconds=stats.wait_seconds,
            last_chunk=chunk.last_chunk,
            codec_saved_bytes=stats.saved_bytes,
        )

    def _planner_of(self, view: PoolView) -> ChunkPlanner:
        key = (view.first_head, view.geometry.kv_heads)
        planner = self._planners.get(key)
        if planner is None:
            warm_up(view, self._policies)  # before decode lends slots for it
            planner = self._planners.setdefault(key, ChunkPlanner(view, self._config, self.scorer, self.scores))
        return planner

    def _plan(
        self, chunk: OutgoingChunk, view: PoolView, peer: Handshake, policy: SendingPolicy | None
    ) -> PlannedChunk:
        """Tiers and sub-chunks of the heads in ``view``, such as decode takes."""
        try:
            planned = self._planner_of(view).plan(
                room=chunk.room,
                pages=chunk.pages,
                first_position=self._first_position(chunk),
                prompt_tokens=chunk.prefix_tokens + chunk.room_pages * self._page_size,
                slot_bytes=min(self._config.slot_bytes, peer.slot_bytes),
                sent_before=chunk.request.sent.get(chunk.session, NOTHING_SENT),
                peer_allowed_tiers=peer.allowed_tiers,
                policy=policy,
            )
        except PayloadError as error:
            raise GoNativeError(Reason.PAYLOAD_TOO_LARGE, str(error)) from error
        self._fit.require_agreement(planned, peer)
        if planned.budget_missed and chunk.last_chunk:  # the chunks after an earlier one make up for it
            plan = planned.plan
            self._metrics.budget_unreachable()
            log_once(
                logger,
                logging.WARNING,
                "budget-unreachable",
                f"room {chunk.room} does not keep budget {planned.policy.budget}: its last chunk of {len(plan.tiers)} "
                f"tokens was sent at the smallest size that the allowed tiers reach, {plan.achieved:.3f}",
            )
        return planned

    def _first_position(self, chunk: OutgoingChunk) -> int:
        return chunk.prefix_tokens + chunk.page_start * self._page_size

    def _sender(self, view: PoolView) -> ChunkSender:
        sender: ChunkSender | None = getattr(self._per_thread, "sender", None)
        if sender is None:
            sender = self._per_thread.sender = ChunkSender(
                device=view.device,
                config=self._config,
                memory=self._memory,
                staging=self._staging,
                writes=self._writes,
                channels=ControlChannels(self._context, self._keys),
                metrics=self._metrics,
                compressing=self._compressing,
            )
        return sender

    def _device_stream(self, view: PoolView, chunk: OutgoingChunk) -> AbstractContextManager[Any]:
        """This thread's own CUDA stream, made to wait for the forward that writes the chunk's pages.

        Of high priority: packing takes well under a millisecond of the GPU, and would otherwise queue behind the
        kernels of the next chunk's forward while the link rests.
        """
        if view.device.type != "cuda":
            return nullcontext()
        stream = getattr(self._per_thread, "stream", None)
        if stream is None:
            torch.cuda.set_device(view.device)
            stream = self._per_thread.stream = torch.cuda.Stream(view.device, priority=-1)
        for event in chunk.forward_done:
            stream.wait_event(event)
        return torch.cuda.stream(stream)

    # ---- native --------------------------------------------------------------------------------------------------

    def _go_native(
        self,
        chunk: OutgoingChunk,
        reason: GoNativeError,
        send_natively: Callable[[], NativeResult],
        started: float,
        decision: Decision | None = None,
        cost: ChunkCost | None = None,
    ) -> tuple[int, bool]:
        """Send the chunk by SGLang's own path, because of ``reason``; returns as :meth:`send`."""
        if not chunk.room_is_live():
            # Aborted while the chunk waited for decode, which may have freed the pages by now.
            raise ChunkFailedError(FailureCause.ROOM_GONE, f"room {chunk.room} was aborted") from reason
        if chunk.native_misfit:
            raise ChunkFailedError(FailureCause.DTYPE_MISMATCH, chunk.native_misfit) from reason
        self._say_native(chunk, reason)
        for event in chunk.forward_done:
            event.synchronize()  # SGLang before 0.5.23 does not wait for it itself
        size = len(chunk.pages) * self._page_bytes_of(chunk)
        timed = self.decisions.timed_native(chunk.session, size) if decision and self.decisions else nullcontext()
        with timed as native:
            result = send_natively()
            if native is not None:
                native.succeeded = result.code == 0
        if result.code == 0:
            if native is not None and cost is not None and reason.reason in _DECIDED_NATIVE:
                cost.as_decided, cost.seconds = True, native.seconds
                cost.native_bytes = cost.wire_bytes = size
            self._account(chunk, self._native_record(chunk, reason.reason, result.writes), started, decision)
        else:
            self._metrics.native_failed(chunk.room, time.perf_counter() - started)
        return result.code, result.code != 0

    def _say_native(self, chunk: OutgoingChunk, reason: GoNativeError) -> None:
        log_once(
            logger,
            logging.INFO if reason.reason in _QUIET else logging.WARNING,
            f"native-{reason.reason.value}",
            f"a chunk of room {chunk.room} travels natively, not tiered ({reason.reason.value}): {reason}",
        )

    def _page_bytes_of(self, chunk: OutgoingChunk) -> int:
        """Native bytes of one page of the chunk, as far as decode takes it."""
        return self._page_bytes if chunk.page_bytes is None else chunk.page_bytes

    def _native_record(self, chunk: OutgoingChunk, reason: Reason, writes: int) -> ChunkRecord:
        size = len(chunk.pages) * self._page_bytes_of(chunk)
        return ChunkRecord(
            time=time.time(),
            room=chunk.room,
            path=Path.NATIVE,
            reason=reason,
            profile="native",
            tokens=len(chunk.pages) * self._page_size,
            native_bytes=size,
            wire_bytes=size,
            achieved_b=1.0,
            writes=writes,
            last_chunk=chunk.last_chunk,
        )

    def _account(
        self, chunk: OutgoingChunk, record: ChunkRecord, started: float, decision: Decision | None = None
    ) -> None:
        record = msgspec.structs.replace(record, transfer_seconds=time.perf_counter() - started)
        if decision is not None:
            record = msgspec.structs.replace(record, candidate=decision.candidate.name, decision=decision.reason)
        self._metrics.chunk(record)
        self._remember_bytes(chunk, record)
        if self._log is not None:
            self._log.write(record)
        logger.debug("chunk of room %d: %s", chunk.room, record)

    def _remember_bytes(self, chunk: OutgoingChunk, record: ChunkRecord) -> None:
        before = chunk.request.sent.pop(chunk.session, NOTHING_SENT)
        if not chunk.last_chunk:
            # What a codec took off shortens the transfer; it does not raise the budget of the chunks that follow.
            packed = record.wire_bytes + record.codec_saved_bytes
            sent = BytesSent(before.native + record.native_bytes, before.wire + packed)
            chunk.request.sent[chunk.session] = sent
