"""SGLang's Mooncake manager, sender and receiver with the tiered path in front.

Imported only in scheduler processes that run this backend: it imports SGLang.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager, MooncakeKVReceiver, MooncakeKVSender

from spectrumkv_sglang import sglang_compat
from spectrumkv_sglang.config import load_config
from spectrumkv_sglang.observability.metrics import TransferMetrics
from spectrumkv_sglang.observability.once import flush_log_once, log_once
from spectrumkv_sglang.observability.reasons import FailureCause, ProbeState, Reason
from spectrumkv_sglang.transfer.decode_rank import DecodeRank
from spectrumkv_sglang.transfer.errors import GoNativeError
from spectrumkv_sglang.transfer.handshake import Handshake, RegistrationSocket
from spectrumkv_sglang.transfer.outgoing_request import ChunkOrigin, OutgoingRequest
from spectrumkv_sglang.transfer.pool_view import PoolView, view_pool
from spectrumkv_sglang.transfer.prefill_rank import NativeResult, OutgoingChunk, PrefillRank
from spectrumkv_sglang.transfer.request_identity import UNKNOWN, may_be_same
from spectrumkv_sglang.transfer.sending_policy import ServedCandidates, serve_candidates
from spectrumkv_sglang.transfer.served_rotation import require_rotation, with_rotation
from spectrumkv_sglang.transfer.shared_heads import RankHeads, heads_of_rank
from spectrumkv_sglang.transfer.slot_memory import RegistrationError
from spectrumkv_sglang.transfer.tier_enforcement import enforce_tiers
from spectrumkv_sglang.transport_tuning import in_effect, tcp_is_forced
from spectrumkv_sglang.verification.served import served_fingerprint
from spectrumkv_sglang.version import __version__

logger = logging.getLogger(__name__)


class _ChunkTap:
    """Stands before a transfer queue: marks what is put in with its origin, and remembers, per worker thread, the chunk
    that was taken last. By its room id alone a chunk cannot be told from one of another request of the same id."""

    def __init__(self, queue: Any, manager: SpectrumKVManager) -> None:
        self._queue, self._manager = queue, manager

    def put(self, chunk: Any, *args: Any, **kwargs: Any) -> Any:
        origin = getattr(self._manager.current, "origin", None)
        if origin is not None:
            chunk.spectrumkv_origin = origin
        return self._queue.put(chunk, *args, **kwargs)

    def get(self, *args: Any, **kwargs: Any) -> Any:
        self._manager.spare_sessions()
        chunk = self._queue.get(*args, **kwargs)
        self._manager.current.chunk = chunk
        return chunk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


class SpectrumKVManager(MooncakeKVManager):  # type: ignore[misc]
    """Sends and receives tiered payloads where it can and leaves everything else to SGLang."""

    def __init__(self, args: Any, disaggregation_mode: Any, server_args: Any, *rest: Any, **named: Any) -> None:
        # Threads that SGLang starts in its own __init__ use these.
        self.current = threading.local()
        self.prefill_rank: PrefillRank | None = None
        self.decode_rank: DecodeRank | None = None
        self.scheduler_overlaps: Callable[[], bool] = lambda: False
        self.early_send_event: Any = None
        self.sending = ChunkOrigin()
        self.spectrumkv_config = load_config()
        self._server_args = server_args
        self._role = "prefill" if disaggregation_mode.value == "prefill" else "decode"
        self._metrics = TransferMetrics(
            "prefill" if self._role == "prefill" else "decode",
            int(args.engine_rank),
            pp_rank=int(getattr(args, "pp_rank", 0) or 0),
            dp_rank=getattr(args, "system_dp_rank", None),
            model_name=sglang_compat.served_model_name(server_args),
            extra_labels=getattr(server_args, "extra_metric_labels", None),
        )
        super().__init__(args, disaggregation_mode, server_args, *rest, **named)
        if self._role == "prefill":
            queues = vars(self)["transfer_queues"]
            self.transfer_queues = [_ChunkTap(queue, self) for queue in queues]

    # ---- set-up --------------------------------------------------------------------------------------------------

    def attach(self, pool: Any, draft_pool: Any, model: Any, total_heads: int = 0) -> PoolView | None:
        """Learn the rank's KV pool and ``model`` (a torch module, or None) of ``total_heads`` KV heads (0: not known);
        called once, before the scheduler serves. Returns the view of a tierable pool.

        Raises:
            SpectrumKVError: ``control_host`` and ``control_port`` cannot be bound, ``control_secret_file`` cannot be
                used, the probe's record does not allow to serve the model, or
                the profile rotates keys by angles that are not known; the server does not start.
        """
        config = self.spectrumkv_config
        view: PoolView | GoNativeError
        try:
            if self.pp_size and self.pp_size > 1:
                raise GoNativeError(Reason.PIPELINE_PARALLEL, "pipeline parallelism splits the layers over ranks")
            view = view_pool(
                pool,
                draft_pool,
                self.kv_args,
                is_mla=bool(self.is_mla_backend),
                plain_pool_type=sglang_compat.plain_pool_type(),
            )
        except GoNativeError as reason:
            view = reason
        served: ServedCandidates | None = None
        if isinstance(view, PoolView) and config.enabled:
            asked, served_model = config, sglang_compat.served_model(self._server_args)
            speaks = int(self.kv_args.engine_rank) == 0
            config = self.spectrumkv_config = enforce_tiers(
                config, served_model, view.geometry, self._metrics, speaks=speaks
            )
            view = with_rotation(view, model)
            if view.rotation is None:
                logger.info("SpectrumKV %s: keys cannot travel unrotated: %s", self._role, view.why_no_rotation)
            require_rotation(view, config)
            if config.controller.enabled and self._role == "prefill":
                dtype = view.geometry.dtype
                served = serve_candidates(
                    asked, config, view, lambda: served_fingerprint(served_model, dtype), speaks=speaks
                )
        else:
            self._metrics.probe_state(ProbeState.NOT_NEEDED)
        engine = sglang_compat.mooncake_engine(self)
        heads: RankHeads | None = None
        if isinstance(view, PoolView):
            tp_size, tp_rank = sglang_compat.attention_tp(self)
            heads = heads_of_rank(total_heads, tp_size, tp_rank, view.geometry.kv_heads)
        if self._role == "prefill":
            self.prefill_rank = self._make_prefill_rank(view, engine, served, heads)
        elif isinstance(view, PoolView) and config.enabled:
            rank = int(self.kv_args.engine_rank)
            try:
                self.decode_rank = DecodeRank(
                    view=view,
                    config=config,
                    engine=engine,
                    host=self.local_ip,
                    metrics=self._metrics,
                    rank=rank,
                    heads=heads,
                )
                SpectrumKVReceiver.handshake_frame = self.decode_rank.handshake_frame
                SpectrumKVReceiver.room_frame = self.decode_rank.prompt_frame
                logger.info("SpectrumKV control channel at %s", self.decode_rank.handshake.control_endpoint)
            except RegistrationError as error:
                view = GoNativeError(Reason.REGISTRATION_FAILED, str(error))
        self._metrics.config(
            version=__version__,
            profile=config.profile,
            budget=config.budget,
            allowed_tiers=[tier.label for tier in config.allowed_tiers],
            scorer=config.scorer,
            control_secret=config.control_secret_file is not None,
        )
        self._metrics.transport("tcp" if tcp_is_forced(os.environ) else "rdma", in_effect(os.environ))
        if isinstance(view, PoolView) and config.enabled:
            logger.info(
                "SpectrumKV %s on %s: tiered KV, profile %s, budget %s, tiers %s, %s",
                __version__,
                self._role,
                config.profile,
                config.budget,
                ", ".join(tier.label for tier in config.allowed_tiers),
                view.geometry,
            )
            return view
        why = str(view) if isinstance(view, GoNativeError) else "switched off by enabled: false or SPECTRUMKV_ENABLED"
        logger.warning("SpectrumKV %s on %s: all KV travels natively: %s", __version__, self._role, why)
        return None

    def _make_prefill_rank(
        self, view: PoolView | GoNativeError, engine: Any, served: ServedCandidates | None, heads: RankHeads | None
    ) -> PrefillRank:
        arguments = {
            "config": self.spectrumkv_config,
            "engine": engine,
            "page_size": int(self.kv_args.page_size),
            "page_bytes": int(sum(self.kv_args.kv_item_lens)),
            "metrics": self._metrics,
        }
        try:
            return PrefillRank(view=view, served=served, heads=heads, **arguments)
        except RegistrationError as error:
            return PrefillRank(view=GoNativeError(Reason.REGISTRATION_FAILED, str(error)), **arguments)

    def teardown(self) -> None:
        """SGLang's role switch (0.5.23): release our slots before SGLang releases its own."""
        self.close_spectrumkv()
        super().teardown()

    def close_spectrumkv(self) -> None:
        """Close this backend's threads, sockets and memory. SGLang's own stay."""
        flush_log_once()
        SpectrumKVReceiver.handshake_frame = SpectrumKVReceiver.room_frame = None
        if self.decode_rank is not None:
            self.decode_rank.close()
            self.decode_rank = None
        if self.prefill_rank is not None:
            self.prefill_rank.close()
            self.prefill_rank = None

    # ---- prefill -------------------------------------------------------------------------------------------------

    def transfer_worker(self, queue: Any, *args: Any, **kwargs: Any) -> Any:
        return super().transfer_worker(_ChunkTap(queue, self), *args, **kwargs)

    def add_transfer_request(
        self, bootstrap_room: int, kv_indices: Any, index_slice: slice, *args: Any, **kwargs: Any
    ) -> Any:
        event = self._forward_event() if torch.cuda.is_available() and self.prefill_rank is not None else None
        self.current.origin = replace(self.sending, forward_done=event)
        try:
            return super().add_transfer_request(bootstrap_room, kv_indices, index_slice, *args, **kwargs)
        finally:
            self.current.origin = None

    def _forward_event(self) -> Any:
        """CUDA event after the forward that writes the pages of the chunk that SGLang sends now; None: it is done.

        With overlap scheduling SGLang sends from its processing of results, for which it has waited on the host, or
        early with an event of its own. An event recorded here would come after the next forward: the scheduler's stream
        waits for it before results are processed. Without overlap the forward lies on the current stream.
        """
        if self.scheduler_overlaps():
            return self.early_send_event
        event = torch.cuda.Event()
        event.record()
        return event

    def send_kvcache(
        self,
        mooncake_session_id: str,
        prefill_kv_indices: Any,
        dst_kv_ptrs: Any,
        dst_kv_indices: Any,
        executor: Any,
        *args: Any,
        **kwargs: Any,
    ) -> int:
        arguments = (mooncake_session_id, prefill_kv_indices, dst_kv_ptrs, dst_kv_indices, executor, *args)

        def send_natively() -> Any:
            return super(SpectrumKVManager, self).send_kvcache(*arguments, **kwargs)

        only = Reason.HOST_DESTINATION if kwargs.get("dst_device_kv_indices") is not None else None
        return self._send(mooncake_session_id, prefill_kv_indices, send_natively, only)

    def send_kvcache_slice(self, mooncake_session_id: str, prefill_kv_indices: Any, *args: Any, **kwargs: Any) -> int:
        """As `send_kvcache`, to a decode rank of another TP size: the heads that both hold."""

        def send_natively() -> Any:
            return super(SpectrumKVManager, self).send_kvcache_slice(
                mooncake_session_id, prefill_kv_indices, *args, **kwargs
            )

        return self._send(mooncake_session_id, prefill_kv_indices, send_natively, None, sliced=True)

    def _do_staging_transfer(
        self, staging_strategy: Any, kv_chunk: Any, req: Any, *args: Any, **kwargs: Any
    ) -> tuple[int, bool]:
        """SGLang's own buffer for unequal TP sizes, where it is switched on; returns (code, whether it tries again)."""
        outcome: tuple[int, bool] = (-1, False)

        def send_natively() -> int:
            nonlocal outcome
            outcome = super(SpectrumKVManager, self)._do_staging_transfer(
                staging_strategy, kv_chunk, req, *args, **kwargs
            )
            code, deferred = outcome
            return -1 if deferred else code  # what is deferred was not sent, and is not counted

        self._send(req.mooncake_session_id, kv_chunk.prefill_kv_indices, send_natively, Reason.STAGING, sliced=True)
        return outcome

    def send_aux(self, req: Any, *args: Any, **kwargs: Any) -> Any:
        """The first token; ``req`` is SGLang's TransferInfo of the pages that the chunk's KV went to."""
        chunk = getattr(self.current, "chunk", None)
        if chunk is not None and self._is_for_another(chunk, req):
            return -1
        return super().send_aux(req, *args, **kwargs)

    def _is_for_another(self, chunk: Any, info: Any) -> bool:
        """Whether decode's pages ``info`` wait for another request than that of ``chunk``; counted and said."""
        ours, theirs = _origin_of(chunk).prompt, getattr(info, "spectrumkv_prompt", UNKNOWN)
        if may_be_same(ours, theirs):
            return False
        self._metrics.failure(FailureCause.OTHER_REQUEST)
        log_once(
            logger,
            logging.ERROR,
            "other-request",
            f"room {chunk.room} failed: its id is in use by two requests with different prompts, and decode's pages "
            "are for the other one; whoever sends requests must give each a room id of its own",
        )
        return True

    def _transfer_data(self, mooncake_session_id: str, transfer_blocks: Any) -> int:
        self.current.blocks = getattr(self.current, "blocks", 0) + len(transfer_blocks)
        return int(super()._transfer_data(mooncake_session_id, transfer_blocks))

    def _send(
        self, session: str, pages: Any, send_natively: Callable[[], Any], only: Reason | None, *, sliced: bool = False
    ) -> int:
        """Send the current thread's chunk; ``only`` is the reason when nothing but the native path fits."""
        if only is None and getattr(self, "enable_all_cp_ranks_for_transfer", False):
            only = Reason.DCP

        def counted() -> NativeResult:
            self.current.blocks = 0
            return NativeResult(int(send_natively()), self.current.blocks)

        chunk = getattr(self.current, "chunk", None)
        info = self.transfer_infos.get(chunk.room, {}).get(session) if chunk is not None else None
        if self.prefill_rank is None:
            return int(send_natively())
        if chunk is None or info is None:
            # Aborted since SGLang took the chunk from its queue: decode may have freed the pages.
            self._metrics.failure(FailureCause.ROOM_GONE)
            self._spare(session)
            return -1
        if self._is_for_another(chunk, info):
            self._spare(session)
            return -1
        origin = _origin_of(chunk)
        events = (origin.forward_done, getattr(chunk, "wait_event", None))
        outgoing = OutgoingChunk(
            room=chunk.room,
            session=session,
            pages=np.asarray(pages, dtype=np.int64),
            page_start=int(chunk.index_slice.start or 0),
            room_pages=len(info.dst_kv_indices),
            prefix_tokens=int(getattr(info, "decode_prefix_len", 0) or 0),
            last_chunk=bool(chunk.is_last_chunk),
            peer=getattr(self.decode_kv_args_table.get(session), "spectrumkv_handshake", None),
            room_is_live=lambda: self.request_status.get(chunk.room) not in (None, sglang_compat.kv_poll_failed()),
            forward_done=tuple(event for event in events if event is not None),
            native_misfit=self._native_misfit(session, sliced=sliced) if only is None else "",
            sliced=sliced,
            page_bytes=self._sliced_page_bytes(session) if sliced else None,
            prompt=origin.prompt,
            request=origin.request,
        )
        code, peer_suspect = self.prefill_rank.send(outgoing, counted, only)
        if code != 0 and not peer_suspect:
            self._spare(session)
        return code

    def _item_lengths(self, session: str) -> tuple[int, int]:
        """Bytes of a page of one layer's K or V here and on decode; decode's are ours where it does not say."""
        ours = int(self.kv_args.kv_item_lens[0])
        return ours, int(getattr(self.decode_kv_args_table.get(session), "dst_kv_item_len", None) or ours)

    def _sliced_page_bytes(self, session: str) -> int:
        """Native bytes of a page over all layers, of the heads that a decode rank of another TP size takes."""
        ours, theirs = self._item_lengths(session)
        return int(sum(self.kv_args.kv_item_lens)) * min(ours, theirs) // ours

    def _native_misfit(self, session: str, *, sliced: bool) -> str:
        """Why pages of ours, or their heads, do not fit those of decode, or "". SGLang would copy them all the same."""
        ours, theirs = self._item_lengths(session)
        fits = theirs == ours
        if sliced:  # one of them holds several times as many heads
            fits = max(ours, theirs) % min(ours, theirs) == 0 and self._same_head_bytes(session, ours, theirs)
        if fits:
            return ""
        return (
            f"a page of a layer has {ours} bytes on prefill and {theirs} on decode {session}: serve the same model "
            "on both with the same --dtype, --kv-cache-dtype and --page-size"
        )

    def _same_head_bytes(self, session: str, ours: int, theirs: int) -> bool:
        """Whether pages of these lengths are of heads of one size; also where decode's number of heads is not known."""
        peer = getattr(self.decode_kv_args_table.get(session), "spectrumkv_handshake", None)
        held = self.prefill_rank.kv_heads if self.prefill_rank is not None else None
        return held is None or not isinstance(peer, Handshake) or ours * peer.kv_heads == theirs * held

    def expect_request(self, room: int, parameters: Any) -> OutgoingRequest:
        """A request came that will be sent as ``room``, with ``parameters`` for this package; its sender keeps it."""
        decisions = self.prefill_rank.decisions if self.prefill_rank is not None else None
        return OutgoingRequest() if decisions is None else decisions.expect(room, parameters)

    def observation_failed(self) -> None:
        """Count a forward whose token importance could not be observed."""
        self._metrics.failure(FailureCause.IMPORTANCE_UNOBSERVED)

    def _spare(self, session: str) -> None:
        # By thread: another worker must not lift the ban before SGLang has imposed it in this one.
        self.current.spared = getattr(self.current, "spared", frozenset()) | {session}

    def spare_sessions(self) -> None:
        """Take sessions off SGLang's blacklist that only lost one room: it bans a session at its first failure."""
        spared: frozenset[str] = getattr(self.current, "spared", frozenset())
        if not spared:
            return
        self.current.spared = frozenset()
        log_once(logger, logging.INFO, "session-spared", f"{', '.join(spared)} stays in use: only a room ended")
        with self.session_lock:
            self.failed_sessions.difference_update(spared)
            for session in spared:
                self.session_failures.pop(session, None)

    # ---- decode --------------------------------------------------------------------------------------------------

    def open_room(self, room: int, pages: Any, prompt: int) -> None:
        if self.decode_rank is not None:
            self.decode_rank.open_room(room, pages, prompt)

    def close_room(self, room: int) -> None:
        if self.decode_rank is not None:
            self.decode_rank.close_room(room)


def _origin_of(chunk: Any) -> ChunkOrigin:
    origin: ChunkOrigin = getattr(chunk, "spectrumkv_origin", None) or ChunkOrigin()
    return origin


def _fail_if_forgotten(transfer: Any) -> None:
    """A sender or receiver whose room another one of the same id has ended: SGLang's poll would raise KeyError there,
    which ends the scheduler and with it every request."""
    room = transfer.bootstrap_room
    if transfer.conclude_state is None and room not in transfer.kv_mgr.request_status:
        transfer.kv_mgr.record_failure(room, "Another request with the same bootstrap_room has ended.")
        transfer.conclude_state = sglang_compat.kv_poll_failed()


class SpectrumKVSender(MooncakeKVSender):  # type: ignore[misc]
    """SGLang's sender; on a CPU pool it keeps SGLang 0.5.23 from using pinned memory and CUDA events."""

    spectrumkv_prompt = UNKNOWN
    spectrumkv_request: OutgoingRequest | None = None

    def __init__(self, mgr: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(mgr, *args, **kwargs)
        if getattr(type(self), "supports_host_tensor_indices", False) and not torch.cuda.is_available():
            self.supports_host_tensor_indices = False

    def send(self, *args: Any, **kwargs: Any) -> Any:
        # SGLang before 0.5.23 records this event for a cached prefix that is sent early, and does not read it.
        self.kv_mgr.early_send_event = getattr(self, "_early_send_wait_event", None)
        if self.spectrumkv_request is None:
            self.spectrumkv_request = OutgoingRequest()
        self.kv_mgr.sending = ChunkOrigin(self.spectrumkv_prompt, request=self.spectrumkv_request)
        try:
            return super().send(*args, **kwargs)
        finally:
            self.kv_mgr.early_send_event = None
            self.kv_mgr.sending = ChunkOrigin()

    def poll(self) -> Any:
        _fail_if_forgotten(self)
        return super().poll()


class SpectrumKVReceiver(MooncakeKVReceiver):  # type: ignore[misc]
    """Opens the room for payloads before prefill hears of it and closes it before SGLang frees its pages."""

    handshake_frame: bytes | None = None
    room_frame: Callable[[int], bytes] | None = None
    spectrumkv_prompt = UNKNOWN

    @classmethod
    def _connect_to_bootstrap_server(cls, bootstrap_info: dict[str, Any]) -> tuple[Any, Any]:
        socket, lock = super()._connect_to_bootstrap_server(bootstrap_info)
        if cls.handshake_frame is not None:
            socket = RegistrationSocket(socket, cls.handshake_frame, cls.room_frame)
        return socket, lock

    def send_metadata(self, kv_indices: Any, *args: Any, **kwargs: Any) -> Any:
        self.kv_mgr.open_room(self.bootstrap_room, kv_indices, self.spectrumkv_prompt)
        return super().send_metadata(kv_indices, *args, **kwargs)

    def poll(self) -> Any:
        _fail_if_forgotten(self)
        status = super().poll()
        if int(status) in sglang_compat.kv_poll_terminal():
            self.kv_mgr.close_room(self.bootstrap_room)
        return status

    def abort(self) -> Any:
        self.kv_mgr.close_room(self.bootstrap_room)
        return super().abort()

    def clear(self) -> Any:
        self.kv_mgr.close_room(self.bootstrap_room)
        return super().clear()
