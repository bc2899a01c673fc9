"""Packs the KV of a prompt and unpacks it into the same pages, with the code that serves.

A served chunk is planned and packed as soon as it has been prefilled, with the token importance known by then; decode
sees it only after the whole prompt is there. Here likewise: chunks are packed one by one and unpacked together after
the last, so that later chunks of a prompt still attend to native KV, as they do on a prefill server.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass, field

import numpy as np
import torch

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.importance.scores import SlotScores
from spectrumkv_sglang.loopback.plan import InPlaceRecord
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.profiles.tier import Tier
from spectrumkv_sglang.transfer.chunk_planner import ChunkPlanner, PlannedChunk
from spectrumkv_sglang.transfer.lossless_stage import Restoring
from spectrumkv_sglang.transfer.messages import Commit
from spectrumkv_sglang.transfer.outgoing_request import BytesSent
from spectrumkv_sglang.transfer.packing import PackJob, pack_into_slot, pieces_of
from spectrumkv_sglang.transfer.pool_view import PoolView
from spectrumkv_sglang.transfer.rooms import RoomRegistry
from spectrumkv_sglang.transfer.slot_memory import SlotMemory
from spectrumkv_sglang.transfer.unpacking import UnpackJob, unpack_commit


class _NothingLeaves:
    """Stands where Mooncake's engine registers memory for peers: a loopback server has none."""

    def register_memory(self, buffer_addr: int, capacity: int) -> int:
        return 0

    def unregister_memory(self, buffer_addr: int) -> int:
        return 0


@dataclass
class _Packed:
    """A packed sub-chunk that waits for the prompt's end."""

    commit: Commit
    table: PrecisionTable
    payload: torch.Tensor


@dataclass
class _Prompt:
    room: int
    pages: np.ndarray
    packed: list[_Packed] = field(default_factory=list)
    sent: BytesSent = field(default_factory=BytesSent)
    sent_pages: int = 0
    tokens_by_tier: np.ndarray = field(default_factory=lambda: np.zeros(len(Tier), dtype=np.int64))
    pack_seconds: float = 0.0


class InPlaceTransfer:
    """One policy's prompts on one rank. Not thread-safe.

    Args:
        view: the rank's pool.
        config: the policy.
        scores: observed importance by pool slot; None for policies whose scorer is a rule.
    """

    def __init__(self, view: PoolView, config: SpectrumKVConfig, scores: SlotScores | None) -> None:
        self._view, self._config = view, config
        self._planner = ChunkPlanner(view, config, config.make_scorer(), scores)
        self._memory = SlotMemory(_NothingLeaves(), 1, config.slot_bytes, view.device)
        self._restoring = Restoring(self._memory)
        self._rooms = RoomRegistry()
        self._prompts: dict[str, _Prompt] = {}

    def pack(self, request: str, pages: np.ndarray, prompt_pages: int) -> None:
        """Plan and pack what of a prompt has been prefilled since the last call.

        Args:
            request: the prompt's id.
            pages: int64, every page of the prompt that is complete by now, from its first on; its last, partial page
                too once the whole prompt is there.
            prompt_pages: pages of the whole prompt.

        Raises:
            PayloadError: one page does not fit a slot.
        """
        prompt = self._prompts.get(request)
        if prompt is None:
            prompt = self._prompts[request] = _Prompt(zlib.crc32(request.encode()), pages)
        prompt.pages = pages
        start, new_pages = prompt.sent_pages, pages[prompt.sent_pages :]
        if len(new_pages) == 0:
            return
        started = time.perf_counter()
        page_size = self._view.geometry.page_size
        planned = self._planner.plan(
            room=prompt.room,
            pages=new_pages,
            first_position=start * page_size,
            prompt_tokens=prompt_pages * page_size,
            slot_bytes=self._config.slot_bytes,
            sent_before=prompt.sent,
        )
        self._pack_chunk(prompt, planned, new_pages, start)
        plan = planned.plan
        prompt.sent = BytesSent(prompt.sent.native + plan.native_bytes, prompt.sent.wire + plan.wire_bytes)
        prompt.tokens_by_tier += np.bincount(plan.tiers, minlength=len(Tier))
        prompt.sent_pages = len(pages)
        prompt.pack_seconds += time.perf_counter() - started

    def unpack(self, request: str) -> InPlaceRecord:
        """Write the prompt's packed KV over its pages.

        Raises:
            ChunkFailedError: a payload did not survive; later pages keep their native KV.
        """
        prompt = self._prompts.pop(request)
        started = time.perf_counter()
        self._rooms.register(prompt.room, prompt.pages)
        try:
            registration = self._rooms.registration(prompt.room, 0, len(prompt.pages))
            for packed in prompt.packed:
                self._memory.view(0, len(packed.payload)).copy_(packed.payload)
                job = UnpackJob(packed.commit, prompt.room, registration, packed.table)
                unpack_commit(job, self._view, self._memory, self._rooms, self._restoring)
        finally:
            self._rooms.retire(prompt.room)
        high, mid, low = prompt.tokens_by_tier.tolist()
        return InPlaceRecord(
            tokens=len(prompt.pages) * self._view.geometry.page_size,
            native_bytes=prompt.sent.native,
            wire_bytes=prompt.sent.wire,
            tokens_by_tier=(high, mid, low),
            pack_seconds=prompt.pack_seconds,
            unpack_seconds=time.perf_counter() - started,
        )

    def forget(self, request: str) -> None:
        """Drop what was packed of a prompt that failed."""
        self._prompts.pop(request, None)

    def _pack_chunk(self, prompt: _Prompt, planned: PlannedChunk, pages: np.ndarray, first_page: int) -> None:
        plan = planned.plan
        page_size = self._view.geometry.page_size
        for piece in pieces_of(pages, plan.tiers, plan.subchunks, page_size, first_page * page_size):
            job = PackJob(prompt.room, 1, piece, planned.table)
            packed = pack_into_slot(job, self._view, self._memory, 0).wait()
            commit = job.commit(chunk=0, slot=0, page_start=first_page, checksum=packed.checksum)
            payload = self._memory.view(0, piece.subchunk.payload_bytes).clone()
            prompt.packed.append(_Packed(commit, planned.table, payload))
