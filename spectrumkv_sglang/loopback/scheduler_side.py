"""Follows the tagged requests of one SGLang scheduler: packs and unpacks their KV in place, judges continuations.

Called around every forward. An error of ours ends as the request's result line, never as an exception in SGLang.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from spectrumkv_sglang import sglang_compat
from spectrumkv_sglang.config import load_config
from spectrumkv_sglang.importance.attention_hook import AttentionObserver
from spectrumkv_sglang.importance.scorers import AttentionScorer
from spectrumkv_sglang.importance.scores import SlotScores
from spectrumkv_sglang.loopback.in_place import InPlaceTransfer
from spectrumkv_sglang.loopback.judging import ContinuationJudge
from spectrumkv_sglang.loopback.plan import (
    NATIVE,
    SERVER_LINE,
    LoopbackError,
    LoopbackPlan,
    RequestTag,
    ResultLine,
    ResultWriter,
    ServerRecord,
    load_policy,
    read_tag,
)
from spectrumkv_sglang.transfer.errors import GoNativeError
from spectrumkv_sglang.transfer.pool_view import PoolView, view_pool
from spectrumkv_sglang.transfer.served_rotation import with_rotation
from spectrumkv_sglang.verification.fingerprint import FingerprintError
from spectrumkv_sglang.verification.served import served_fingerprint

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _PoolDescription:
    """What ``view_pool`` reads of SGLang's KVArgs."""

    page_size: int
    kv_data_ptrs: list[int]


@dataclass(frozen=True)
class _Chunk:
    """The part of a tagged prompt that one forward prefills."""

    request: Any
    tag: RequestTag
    pool_index: int  # row of req_to_token
    prefix: int
    end: int
    prompt_tokens: int

    @property
    def last(self) -> bool:
        """Whether the prompt ends with it."""
        return self.end == self.prompt_tokens


class LoopbackScheduler:
    """Everything of one scheduler process.

    Args:
        plan: policies and the result file.
        scheduler: SGLang's Scheduler, with its pools in place.

    Raises:
        SpectrumKVError: the plan's policies are invalid, or this model's KV is not tiered at all.
    """

    def __init__(self, plan: LoopbackPlan, scheduler: Any) -> None:
        self._plan = plan
        allocator = scheduler.token_to_kv_pool_allocator
        self._req_to_token = scheduler.req_to_token_pool.req_to_token
        self._view = with_rotation(_view(allocator), sglang_compat.served_module(scheduler))
        self._page_size = self._view.geometry.page_size
        self._writer = ResultWriter(plan.results) if sglang_compat.scheduler_tp_rank(scheduler) == 0 else None
        self._judge = ContinuationJudge()
        self._unobserved = False
        self._scorer = load_config(plan.base, environ={}).make_scorer()
        self._scores, self.observer = self._observe()
        self._transfers: dict[str, InPlaceTransfer] = {}
        self._judged: _Chunk | None = None
        if self._writer is not None:  # the other ranks need not read the model's files
            self._write(ResultLine(id=SERVER_LINE, server=_describe(self._view, scheduler)))

    def before_forward(self, batch: Any) -> None:
        """A forward of SGLang's ScheduleBatch ``batch`` is about to run."""
        self._unobserved = False
        chunks = self._chunks(batch)
        judged = [chunk for chunk in chunks if chunk.tag.judged_after is not None]
        if judged and self._attempt(judged[0], lambda chunk: self._check_judgeable(chunk, batch)):
            self._judged = judged[0]
            self._judge.begin()

    def collect_logits(self, logits: torch.Tensor) -> None:
        """Logits [rows, vocabulary] that SGLang has just computed, on any forward."""
        if self._judge.collecting:
            self._judge.collect(logits)

    def after_forward(self, batch: Any) -> None:
        """The forward has been issued; its KV may still be on its way on a CUDA stream."""
        chunks = self._chunks(batch)
        if not chunks:
            return
        if self._view.device.type == "cuda":
            torch.cuda.synchronize(self._view.device)
        for chunk in chunks:
            if chunk.tag.judged_after is not None:
                if self._judged is not None and chunk.tag.id == self._judged.tag.id:
                    self._attempt(chunk, self._finish_judging)
            else:
                self._attempt(chunk, self._transfer)
        if self._view.device.type == "cuda":
            torch.cuda.synchronize(self._view.device)

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _observe(self) -> tuple[SlotScores | None, AttentionObserver | None]:
        if not isinstance(self._scorer, AttentionScorer):
            return None, None
        scores = SlotScores(self._view.pool_slots, self._view.device)
        observer = AttentionObserver(
            k_buffers=list(self._view.buffers.k),
            req_to_token=self._req_to_token,
            scores=scores,
            scorer=self._scorer,
            on_error=self._observation_failed,
        )
        return scores, observer

    def _transfer_of(self, policy: str) -> InPlaceTransfer:
        if policy not in self._transfers:
            config = load_policy(self._plan, policy)
            scorer = config.make_scorer()
            if isinstance(scorer, AttentionScorer) and scorer != self._scorer:
                raise LoopbackError(f"policy {policy!r} observes attention as {scorer}, the plan as {self._scorer}")
            self._transfers[policy] = InPlaceTransfer(self._view, config, self._scores)
        return self._transfers[policy]

    def _observation_failed(self) -> None:
        self._unobserved = True

    def _chunks(self, batch: Any) -> list[_Chunk]:
        if not batch.forward_mode.is_extend_without_speculative():
            return []
        chunks = []
        rows = zip(batch.reqs, batch.req_pool_indices.tolist(), batch.prefix_lens, batch.extend_lens, strict=False)
        for request, pool_index, prefix, extend in rows:
            try:
                tag = read_tag(request.sampling_params.custom_params)
            except LoopbackError as error:
                logger.error("%s", error)
                continue
            if tag is not None:
                end = int(prefix) + int(extend)
                chunks.append(_Chunk(request, tag, pool_index, int(prefix), end, len(request.origin_input_ids)))
        return chunks

    def _check_judgeable(self, chunk: _Chunk, batch: Any) -> None:
        if len(batch.reqs) != 1 or not chunk.last or chunk.prefix != chunk.tag.judged_after:
            raise LoopbackError(
                f"a continuation is judged alone, in one forward behind {chunk.tag.judged_after} cached tokens; this "
                f"forward has {len(batch.reqs)} requests, {chunk.prefix} cached tokens and ends at {chunk.end} of "
                f"{chunk.prompt_tokens}: keep the prefix cache on and the chunk size above the continuation's length"
            )

    def _finish_judging(self, chunk: _Chunk) -> None:
        self._judged = None
        continuation = list(chunk.request.origin_input_ids[chunk.prefix : chunk.end])
        judged = self._judge.finish(continuation, reference=chunk.tag.reference)
        self._write(ResultLine(id=chunk.tag.id, policy=chunk.tag.policy, judged=judged))

    def _transfer(self, chunk: _Chunk) -> None:
        if chunk.tag.policy == NATIVE:
            if chunk.last:
                self._write(ResultLine(id=chunk.tag.id, policy=NATIVE))
            return
        if self._unobserved:
            raise LoopbackError("token importance could not be observed; the server's log says why")
        transfer = self._transfer_of(chunk.tag.policy)
        # What SGLang sends of a chunk that is not the last: its complete pages.
        tokens = chunk.end if chunk.last else chunk.end // self._page_size * self._page_size
        slots = self._req_to_token[chunk.pool_index, :tokens].cpu().numpy().astype(np.int64)
        transfer.pack(chunk.tag.id, slots[:: self._page_size] // self._page_size, self._pages(chunk.prompt_tokens))
        if chunk.last:
            record = transfer.unpack(chunk.tag.id)
            self._write(ResultLine(id=chunk.tag.id, policy=chunk.tag.policy, in_place=record))

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page_size)

    def _attempt(self, chunk: _Chunk, step: Callable[[_Chunk], None]) -> bool:
        """Whether ``step`` succeeded; if not, the request's result line says why."""
        try:
            step(chunk)
            return True
        except Exception as error:
            logger.exception("loopback: request %s failed", chunk.tag.id)
            self._judged = None
            self._judge.abandon()
            for transfer in self._transfers.values():
                transfer.forget(chunk.tag.id)
            self._write(ResultLine(id=chunk.tag.id, policy=chunk.tag.policy, error=str(error)[:4000]))
            return False

    def _write(self, line: ResultLine) -> None:
        if self._writer is not None:
            self._writer.write(line)


def _describe(view: PoolView, scheduler: Any) -> ServerRecord:
    geometry = view.geometry
    fingerprint: dict[str, str] | None = None
    problem = ""
    try:
        served = sglang_compat.served_model(scheduler.server_args)
        fingerprint = served_fingerprint(served, geometry.dtype).model_dump()
    except FingerprintError as error:
        problem = str(error)
    return ServerRecord(
        geometry=geometry,
        pool_tokens=view.pool_slots,
        context_tokens=int(scheduler.model_config.context_len),
        fingerprint=fingerprint,
        fingerprint_error=problem,
    )


def _view(allocator: Any) -> PoolView:
    pool = allocator.get_kvcache()
    description = _PoolDescription(
        page_size=int(allocator.page_size), kv_data_ptrs=list(pool.get_contiguous_buf_infos()[0])
    )
    try:
        return view_pool(pool, None, description, is_mla=False, plain_pool_type=sglang_compat.plain_pool_type())
    except GoNativeError as error:
        raise LoopbackError(f"this model's KV would travel natively, so there is nothing to probe: {error}") from error
