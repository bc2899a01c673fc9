"""Verifies one committed payload and unpacks it into the pages of its room (decode side)."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from spectrumkv_sglang.observability.reasons import FailureCause
from spectrumkv_sglang.payload.codec import read_prologue, unpack_if_intact, why_not_kernels
from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.layout import plan_layout
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.payload.prologue import Prologue
from spectrumkv_sglang.payload.tier_map import decode_tier_map
from spectrumkv_sglang.transfer.errors import ChunkFailedError
from spectrumkv_sglang.transfer.lossless_stage import Restoring
from spectrumkv_sglang.transfer.messages import Commit
from spectrumkv_sglang.transfer.pool_view import PoolView
from spectrumkv_sglang.transfer.rooms import RoomRegistry
from spectrumkv_sglang.transfer.slot_memory import SlotMemory


@dataclass(frozen=True)
class UnpackJob:
    """A commit together with what its chunk's OPEN established."""

    commit: Commit
    room: int
    registration: int  # of the room, see RoomRegistry
    table: PrecisionTable


def pool_slots_of_pages(pages: np.ndarray, page_size: int) -> torch.Tensor:
    """Pool slot ids, int64 [pages * page_size], of whole pages in order."""
    slots = pages.astype(np.int64)[:, None] * page_size + np.arange(page_size, dtype=np.int64)
    return torch.from_numpy(slots.reshape(-1))


def unpack_commit(
    job: UnpackJob, view: PoolView, memory: SlotMemory, rooms: RoomRegistry, restoring: Restoring
) -> float:
    """Check every claim of ``job`` against our own knowledge, then write the room's pages. Returns seconds.

    Raises:
        ChunkFailedError: nothing was written to any page.
    """
    started = time.perf_counter()
    commit, geometry = job.commit, view.geometry
    rows = commit.page_count * geometry.page_size
    try:
        tiers = decode_tier_map(commit.tier_map, rows, job.table.tiers)
        counts = np.bincount(tiers, minlength=job.table.tiers).tolist()
        if counts != list(commit.rows_per_tier):
            raise PayloadError(f"tier map counts {counts} differ from the announced {list(commit.rows_per_tier)}")
        layout = plan_layout(geometry, job.table, counts)
        if commit.length != layout.total_bytes or commit.length > memory.slot_bytes:
            raise PayloadError(
                f"payload length {commit.length} announced, {layout.total_bytes} follow from its counts, "
                f"slots have {memory.slot_bytes}"
            )
        rotated = view.rotated(job.table, commit.first_position, rows)
        if rotated is not None:
            rotated.check(geometry.layers, rows)
    except PayloadError as error:
        raise ChunkFailedError(FailureCause.BAD_MESSAGE, str(error)) from error
    payload = restoring.payload(commit)
    why_not_kernels(view.buffers, job.table)  # may compile for seconds: not while the room is locked
    announced = Prologue(
        room=job.room,
        generation=commit.generation,
        sequence=commit.sequence,
        first_position=commit.first_position,
        rows_per_tier=tuple(counts),
        total_bytes=commit.length,
        geometry_digest=geometry.digest(),
        table_digest=job.table.digest(),
    )
    with rooms.pages(job.room, job.registration, commit.page_start, commit.page_count) as pages:
        slots = pool_slots_of_pages(pages, geometry.page_size)
        if int(slots.max()) >= view.pool_slots or int(slots.min()) < 0:
            raise ChunkFailedError(FailureCause.PAGE_RANGE, f"room {job.room} has pages outside the KV pool")
        outcome = unpack_if_intact(
            payload, view.buffers, slots, tiers, layout, commit.checksum, announced, rotated=rotated
        ).wait()
    if not outcome.checksum_fits:
        raise ChunkFailedError(
            FailureCause.CHECKSUM_MISMATCH,
            f"slot {commit.slot}: payload checksum {outcome.checksum:#018x}, announced {commit.checksum:#018x}",
        )
    if not outcome.prologue_fits:
        raise ChunkFailedError(FailureCause.STALE_GENERATION, _prologue_difference(payload, announced))
    return time.perf_counter() - started


def _prologue_difference(payload: torch.Tensor, announced: Prologue) -> str:
    """What the prologue of a payload with the announced checksum says instead of what was announced."""
    try:
        read_prologue(payload).check(announced)
    except PayloadError as error:
        return str(error)
    return "the payload's prologue differs from the announced one in its unused bytes"
