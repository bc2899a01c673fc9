"""Cutting a chunk into sub-chunks that each fit one landing slot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.layout import PayloadSizes, bytes_per_row, max_padding_bytes
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.payload.tier_map import check_tiers

RowCounts = tuple[int, ...]
"""Rows of each tier of a table."""


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
    rows_per_tier: RowCounts
    payload_bytes: int


class SubChunkCutter:
    """Cuts assignments of one table greedily: each sub-chunk takes as many pages as fit the slot.

    Assignments of one chunk that are tried one after the other have most sizes in common, which are kept.

    Args:
        page_size: rows per page.
        geometry: KV geometry of the rank.
        table: precision table in force.
        slot_bytes: bytes of one landing slot.

    Raises:
        PayloadError: a page without rows, or a table for another geometry.
    """

    def __init__(self, page_size: int, geometry: KVGeometry, table: PrecisionTable, slot_bytes: int) -> None:
        if page_size < 1:
            raise PayloadError(f"sub-chunks: page_size must be at least 1, got {page_size}")
        self._page_size, self._slot_bytes, self._table = page_size, slot_bytes, table
        self._row_bytes = bytes_per_row(geometry, table)
        self._sizes = PayloadSizes(geometry, table)
        self._padding = lru_cache(partial(max_padding_bytes, geometry, table))

    def cut(self, tiers: npt.NDArray[np.uint8]) -> list[SubChunk]:
        """Sub-chunks that cover every page once, in order; empty for no rows.

        Args:
            tiers: uint8 [rows], tier of each row in the order of the chunk. Rows beyond the last full page form a
                shorter last page.

        Raises:
            PayloadError: a tier that the table lacks, or a page that does not fit a slot by itself.
        """
        return self._cut(self._counted(tiers), [])

    def cut_after_each(
        self, tiers: npt.NDArray[np.uint8], moves: Iterable[tuple[int, int]]
    ) -> Iterator[list[SubChunk]]:
        """What `cut` finds for ``tiers``, and then after each of ``moves``, each on top of those before.

        Args:
            tiers: as for `cut`.
            moves: a row and the tier that it gets.
        """
        counted, tiers = self._counted(tiers), tiers.copy()
        subchunks = self._cut(counted, [])
        yield subchunks
        for row, tier in moves:
            page = row // self._page_size
            counted.move(page, int(tiers[row]), tier, self._row_bytes)
            tiers[row] = tier
            # The end of a sub-chunk was found by its own pages and the one behind it.
            same = [one for one in subchunks if one.page_start + one.page_count < page]
            subchunks = self._cut(counted, same)
            yield subchunks

    def _counted(self, tiers: npt.NDArray[np.uint8]) -> _Counted:
        check_tiers(tiers, self._table.tiers)
        pages = -(-tiers.size // self._page_size)
        page_ends = np.minimum(np.arange(pages + 1) * self._page_size, tiers.size)
        rows_before = np.zeros((self._table.tiers, pages + 1), dtype=np.int64)
        for tier in range(self._table.tiers):
            rows_before[tier, 1:] = np.cumsum(tiers == tier)[page_ends[1:] - 1]
        bytes_before = self._row_bytes @ rows_before
        return _Counted(rows_before, bytes_before, bytes_before - page_ends)

    def _cut(self, counted: _Counted, subchunks: list[SubChunk]) -> list[SubChunk]:
        """``subchunks`` and those of the pages behind them."""
        rows_before, bytes_before, least_before = counted
        pages, slot_bytes = rows_before.shape[1] - 1, self._slot_bytes
        padding = self._padding(tuple(np.flatnonzero(rows_before[:, -1]).tolist()))
        start = subchunks[-1].page_start + subchunks[-1].page_count if subchunks else 0
        while start < pages:
            surely = int(bytes_before.searchsorted(bytes_before[start] + slot_bytes - padding, side="right"))
            fits = max(start, surely - 1)
            too_many = int(least_before.searchsorted(least_before[start] + slot_bytes, side="right"))
            while too_many - fits > 1:
                end = (fits + too_many) // 2
                if self._sizes.of(counted.rows(start, end)) <= slot_bytes:
                    fits = end
                else:
                    too_many = end
            if fits == start:
                raise PayloadError(
                    f"sub-chunks: page {start} of {self._page_size} tokens needs "
                    f"{self._sizes.of(counted.rows(start, start + 1))} bytes, a landing slot has {slot_bytes}; raise "
                    "slot_bytes on prefill and decode"
                )
            rows = counted.rows(start, fits)
            subchunks.append(SubChunk(start, fits - start, rows, self._sizes.of(rows)))
            start = fits
        return subchunks


class _Counted(NamedTuple):
    """Sums over a chunk's pages, int64, of the pages before each one and before the end.

    Attributes:
        rows_before: rows of each tier, [tiers, pages + 1].
        bytes_before: of their rows without what padding counts at most, [pages + 1].
        least_before: the same if every row took one byte less than its share says, which is more than it may.
    """

    rows_before: npt.NDArray[np.int64]
    bytes_before: npt.NDArray[np.int64]
    least_before: npt.NDArray[np.int64]

    def rows(self, start: int, end: int) -> RowCounts:
        """Rows of each tier in pages ``start`` to ``end`` - 1."""
        return tuple((self.rows_before[:, end] - self.rows_before[:, start]).tolist())

    def move(self, page: int, old: int, new: int, row_bytes: npt.NDArray[np.int64]) -> None:
        """Count a row of ``page`` in another tier from now on."""
        behind = slice(page + 1, None)
        self.rows_before[old, behind] -= 1
        self.rows_before[new, behind] += 1
        self.bytes_before[behind] += row_bytes[new] - row_bytes[old]
        self.least_before[behind] += row_bytes[new] - row_bytes[old]
