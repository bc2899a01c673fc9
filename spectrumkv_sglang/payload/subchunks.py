"""Cutting a chunk into sub-chunks that each fit one landing slot."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.layout import bytes_per_row, max_padding_bytes, payload_bytes
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.payload.tier_map import check_tiers


class SubChunk(NamedTuple):
    """Consecutive whole pages of a chunk that travel in one payload.

    Attributes:
        page_start: first page, counted from the chunk's first page.
        page_count: pages.
        rows_per_tier: rows (tokens) of each tier of the table.
        payload_bytes: length of the payload.
    """

    page_start: int
    page_count: int
    rows_per_tier: tuple[int, ...]
    payload_bytes: int


def cut_into_subchunks(
    tiers: npt.NDArray[np.uint8],
    page_size: int,
    geometry: KVGeometry,
    table: PrecisionTable,
    slot_bytes: int,
) -> list[SubChunk]:
    """Cut greedily: each sub-chunk takes as many pages as fit the slot.

    Args:
        tiers: uint8 [rows], tier of each row in the order of the chunk. Rows beyond the last full page form a
            shorter last page.
        page_size: rows per page.
        geometry: KV geometry of the rank.
        table: precision table in force.
        slot_bytes: bytes of one landing slot.

    Returns:
        Sub-chunks that cover every page once, in order; empty for no rows.

    Raises:
        PayloadError: a tier that the table lacks, or a page that does not fit a slot by itself.
    """
    check_tiers(tiers, table.tiers)
    if page_size < 1:
        raise PayloadError(f"sub-chunks: page_size must be at least 1, got {page_size}")
    pages = -(-tiers.size // page_size)
    page_ends = np.minimum(np.arange(pages + 1) * page_size, tiers.size)
    # rows_before[p, t]: rows of tier t in the pages before p.
    rows_before = np.zeros((pages + 1, table.tiers), dtype=np.int64)
    for tier in range(table.tiers):
        np.cumsum(np.add.reduceat(tiers == tier, page_ends[:-1], dtype=np.int64), out=rows_before[1:, tier])
    # Without what `padding` counts at most; a row may take up to one byte less than its share says.
    bytes_before = rows_before @ bytes_per_row(geometry, table)
    least_before = bytes_before - page_ends
    padding = max_padding_bytes(geometry, table, np.flatnonzero(rows_before[-1]).tolist())

    def size_between(start: int, end: int) -> tuple[tuple[int, ...], int]:
        rows = tuple((rows_before[end] - rows_before[start]).tolist())
        return rows, payload_bytes(geometry, table, rows)

    subchunks: list[SubChunk] = []
    start = 0
    while start < pages:
        surely = int(np.searchsorted(bytes_before, bytes_before[start] + slot_bytes - padding, side="right"))
        fits = max(start, surely - 1)
        too_many = int(np.searchsorted(least_before, least_before[start] + slot_bytes, side="right"))
        size = None
        while too_many - fits > 1:
            end = (fits + too_many) // 2
            larger = size_between(start, end)
            if larger[1] <= slot_bytes:
                fits, size = end, larger
            else:
                too_many = end
        if fits == start:
            raise PayloadError(
                f"sub-chunks: page {start} of {page_size} tokens needs {size_between(start, start + 1)[1]} bytes, "
                f"a landing slot has {slot_bytes}; raise slot_bytes on prefill and decode"
            )
        subchunks.append(SubChunk(start, fits - start, *(size or size_between(start, fits))))
        start = fits
    return subchunks
