"""Packs one sub-chunk into a slot (prefill side), the counterpart of ``unpacking``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from spectrumkv_sglang.payload.codec import pack_with_checksum
from spectrumkv_sglang.payload.exchange import Pending
from spectrumkv_sglang.payload.layout import plan_layout
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.payload.prologue import Prologue
from spectrumkv_sglang.payload.subchunks import SubChunk
from spectrumkv_sglang.payload.tier_map import encode_tier_map
from spectrumkv_sglang.transfer.messages import Commit
from spectrumkv_sglang.transfer.pool_view import PoolView
from spectrumkv_sglang.transfer.slot_memory import SlotMemory
from spectrumkv_sglang.transfer.unpacking import pool_slots_of_pages


class Piece(NamedTuple):
    """One sub-chunk of a planned chunk.

    Attributes:
        sequence: its number in the chunk.
        subchunk: its place in the chunk and its size.
        first_position: of its first row in the prompt.
        pages: whole pages of our own pool.
        tiers: uint8 [pages * page size].
    """

    sequence: int
    subchunk: SubChunk
    first_position: int
    pages: np.ndarray
    tiers: np.ndarray


def pieces_of(
    pages: np.ndarray, tiers: np.ndarray, subchunks: Iterable[SubChunk], page_size: int, first_position: int
) -> Iterator[Piece]:
    """The sub-chunks of a chunk that starts at ``first_position`` of its prompt, in order, each with its own pages and
    tiers."""
    for sequence, subchunk in enumerate(subchunks):
        first, end = subchunk.page_start, subchunk.page_start + subchunk.page_count
        rows = slice(first * page_size, end * page_size)
        yield Piece(sequence, subchunk, first_position + rows.start, pages[first:end], tiers[rows])


@dataclass(frozen=True)
class PackJob:
    """One sub-chunk to pack.

    Attributes:
        room: that it belongs to.
        generation: of the landing slot that the payload is meant for.
        piece: what is packed.
        table: precisions and transforms.
    """

    room: int
    generation: int
    piece: Piece
    table: PrecisionTable

    def commit(
        self, *, chunk: int, slot: int, page_start: int, checksum: int, codec: str = "", stored: int = 0
    ) -> Commit:
        """What tells decode of the packed payload.

        Args:
            chunk: id of the chunk in the control protocol.
            slot: landing slot that the payload was written to.
            page_start: first page of the chunk, counted in the room.
            checksum: of the payload.
            codec: lossless codec that it was compressed with; "": none.
            stored: bytes that were written, where there is a codec.
        """
        piece = self.piece
        return Commit(
            chunk=chunk,
            sequence=piece.sequence,
            slot=slot,
            generation=self.generation,
            page_start=page_start + piece.subchunk.page_start,
            page_count=piece.subchunk.page_count,
            first_position=piece.first_position,
            rows_per_tier=list(piece.subchunk.rows_per_tier),
            tier_map=encode_tier_map(piece.tiers, self.table.tiers),
            length=piece.subchunk.payload_bytes,
            checksum=checksum,
            codec=codec,
            stored=stored,
        )


class Packed(NamedTuple):
    """A payload in its slot.

    Attributes:
        checksum: of the payload.
        seconds: that the device was at work on it, copying it to the slot included; waiting for work in front is not.
    """

    checksum: int
    seconds: float


def pack_into_slot(job: PackJob, view: PoolView, memory: SlotMemory, slot: int) -> Pending[Packed]:
    """Fill ``slot`` with the payload of ``job``.

    On CUDA the work is queued on the current stream, and a thread's jobs are done one after the other. ``slot`` must
    not be lent to anybody else before the result has been waited for.

    Returns:
        The payload, once its bytes are in the slot.

    Raises:
        PayloadError: the job's parts do not fit each other or the slot.
    """
    geometry, piece = view.geometry, job.piece
    layout = plan_layout(geometry, job.table, piece.subchunk.rows_per_tier)
    prologue = Prologue(
        room=job.room,
        generation=job.generation,
        sequence=piece.sequence,
        first_position=piece.first_position,
        rows_per_tier=layout.rows_per_tier,
        total_bytes=layout.total_bytes,
        geometry_digest=geometry.digest(),
        table_digest=job.table.digest(),
    )
    out = memory.work_area(slot, layout.total_bytes)
    slots = pool_slots_of_pages(piece.pages, geometry.page_size)
    stopwatch = _Stopwatch(view.device)
    rotated = view.rotated(job.table, piece.first_position, len(slots))
    checksum = pack_with_checksum(view.buffers, slots, piece.tiers, layout, out, prologue, rotated=rotated)
    memory.flush_to_slot(slot, layout.total_bytes)
    seconds = stopwatch.stop()

    def finish() -> Packed:
        taken = seconds.wait()
        return Packed(checksum.wait(), taken)

    return Pending(finish)


class _Stopwatch:
    """Time between its making and ``stop`` in the current stream's order, or on a CPU in the caller's."""

    def __init__(self, device: torch.device) -> None:
        self._started = time.perf_counter()
        self._start = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._start is not None:
            self._start.record()

    def stop(self) -> Pending[float]:
        """The seconds, once the stream has come here. The thread that waits for them sleeps: a stream's own
        synchronisation would spin on a core."""
        start = self._start
        if start is None:
            seconds = time.perf_counter() - self._started
            return Pending(lambda: seconds)
        end = torch.cuda.Event(enable_timing=True, blocking=True)
        end.record()

        def elapsed() -> float:
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3

        return Pending(elapsed)
