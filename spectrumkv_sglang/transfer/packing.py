"""Packs one sub-chunk into a slot (prefill side), the counterpart of ``unpacking``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spectrumkv_sglang.payload.codec import pack_with_checksum
from spectrumkv_sglang.payload.layout import plan_layout
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.payload.prologue import Prologue
from spectrumkv_sglang.transfer.pool_view import PoolView
from spectrumkv_sglang.transfer.slot_memory import SlotMemory
from spectrumkv_sglang.transfer.unpacking import pool_slots_of_pages


@dataclass(frozen=True)
class PackJob:
    """One sub-chunk to pack: whole ``pages`` of our own pool, with uint8 ``tiers`` [pages * page size].

    ``generation`` is that of the landing slot that the payload is meant for, ``sequence`` the sub-chunk's number.
    """

    room: int
    generation: int
    sequence: int
    pages: np.ndarray
    tiers: np.ndarray
    rows_per_tier: tuple[int, ...]
    table: PrecisionTable


def pack_into_slot(job: PackJob, view: PoolView, memory: SlotMemory, slot: int) -> int:
    """Fill ``slot`` with the payload of ``job``; returns its checksum once the bytes are in the slot.

    Raises:
        PayloadError: the job's parts do not fit each other or the slot.
    """
    geometry = view.geometry
    layout = plan_layout(geometry, job.table, job.rows_per_tier)
    prologue = Prologue(
        room=job.room,
        generation=job.generation,
        sequence=job.sequence,
        rows_per_tier=job.rows_per_tier,
        total_bytes=layout.total_bytes,
        geometry_digest=geometry.digest(),
        table_digest=job.table.digest(),
    )
    out = memory.work_area(slot, layout.total_bytes)
    slots = pool_slots_of_pages(job.pages, geometry.page_size)
    checksum = pack_with_checksum(view.buffers, slots, job.tiers, layout, out, prologue)
    memory.flush_to_slot(slot, layout.total_bytes)
    return checksum.wait()
