"""From the importance of a chunk's tokens to tiers and sub-chunks, within the byte budget of the wire."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spectrumkv_sglang.kernels.precision import CHANNEL_BLOCK_ROWS
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.layout import bytes_per_row, max_padding_bytes
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.payload.subchunks import SubChunk, SubChunkCutter
from spectrumkv_sglang.payload.tier_map import tier_map_bytes
from spectrumkv_sglang.profiles.budget import UpgradeLadder
from spectrumkv_sglang.profiles.distortion import tier_distortion
from spectrumkv_sglang.profiles.tier import Tier, TierArray

SEARCH_RESOLUTION = 1024
"""The search for the best assignment stops at 1/1024 of all upgrade steps (.1 % of the chunk)."""
EXACT_SLOTS = 8
"""Chunks of more native bytes than this many slots are searched by bounds alone: cutting takes 100 us a sub-chunk."""
BOUND_SLACK = 1 / 64
"""Share of a slot that its padding may take for the bounds to be close enough. They leave about half of the padding
unused: for 8 KV heads of 128 with a scale per key channel, .9 % of 16 MiB, .0015 of the budget."""


@dataclass(frozen=True)
class ChunkPlan:
    """How one prefill chunk travels."""

    tiers: TierArray
    """uint8 ``[rows]``, in row order."""
    subchunks: list[SubChunk]
    payload_bytes: int
    """Bytes of all payloads: codes, scales, prologues and alignment."""
    wire_bytes: int
    """``payload_bytes`` and control bytes: messages and tier maps."""
    native_bytes: int
    achieved: float
    """Achieved budget, wire bytes / native bytes."""
    reachable: bool
    """False: the budget is below what the usable tiers can reach; the plan is the smallest there is."""


def protected_rows(
    first_position: int, rows: int, prompt_tokens: int, sink_tokens: int, recent_tokens: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Masks bool ``[rows]`` of the sink and of the recent tokens among a chunk's rows.

    The chunk holds positions ``first_position`` .. ``first_position + rows - 1`` of a prompt of ``prompt_tokens``.
    Sinks are its first ``sink_tokens`` positions (HIGH by rule: ``plan_chunk``'s ``forced_high``), recent ones its
    last ``recent_tokens`` (first to leave the lowest tier: ``preferred``).
    """
    positions = np.arange(first_position, first_position + rows)
    return positions < sink_tokens, positions >= prompt_tokens - recent_tokens


def last_page_rows(first_position: int, rows: int, prompt_tokens: int, page_size: int) -> NDArray[np.bool_]:
    """Mask bool ``[rows]`` of the rows of the prompt's last page among a chunk's; arguments as `protected_rows`.

    ``prompt_tokens`` may be rounded up to a page. Slots of that page beyond the prompt hold what was there before.
    """
    last_page = (prompt_tokens - 1) // page_size
    return np.arange(first_position, first_position + rows) // page_size == last_page


def plan_chunk(
    importance: ArrayLike,
    geometry: KVGeometry,
    table: PrecisionTable,
    budget: float,
    slot_bytes: int,
    forced_high: ArrayLike,
    usable_tiers: Iterable[Tier],
    message_bytes_per_subchunk: int,
    preferred: ArrayLike | None = None,
) -> ChunkPlan:
    """Tiers and sub-chunks of one chunk, with wire bytes / native bytes <= ``budget`` whenever that is reachable.

    Args:
        importance: ``[rows]``, in row order; negative or not finite counts as 0.
        geometry: the pool's geometry; sub-chunks are whole pages of it.
        table: precisions, from ``Profile.table``.
        budget: b, wire bytes / native bytes.
        slot_bytes: size of a landing slot, the most bytes of one payload.
        forced_high: bool ``[rows]``, HIGH whatever the budget (sinks).
        usable_tiers: ``Profile.usable_tiers``.
        message_bytes_per_subchunk: control bytes of one sub-chunk without its tier map.
        preferred: bool ``[rows]``, first to leave the lowest tier (recent tokens).

    A larger budget never moves a row down: assignments form a chain (``UpgradeLadder``), and the search on it visits
    the same midpoints for every budget until it can tell two budgets apart.

    Raises:
        PayloadError: one page does not fit ``slot_bytes``.
        ValueError: shapes that do not fit, or no rows.
    """
    usable_tiers = tuple(usable_tiers)
    ladder = UpgradeLadder(
        importance,
        bytes_per_row(geometry, table),
        tier_distortion(table),
        forced_high,
        usable_tiers,
        preferred,
    )
    if ladder.rows == 0:
        raise ValueError("a chunk has at least one row")
    search = _PlanSearch(ladder, geometry, table, slot_bytes, message_bytes_per_subchunk, usable_tiers)
    native_bytes = ladder.rows * geometry.native_bytes_per_token
    allowed_bytes = math.floor(budget * native_bytes)
    if allowed_bytes / native_bytes > budget:  # the product was rounded up to the next integer
        allowed_bytes -= 1

    tiers = ladder.tiers(search.most_steps(allowed_bytes))
    subchunks, wire_bytes = search.cut(tiers)
    return ChunkPlan(
        tiers=tiers,
        subchunks=subchunks,
        payload_bytes=sum(subchunk.payload_bytes for subchunk in subchunks),
        wire_bytes=wire_bytes,
        native_bytes=native_bytes,
        achieved=wire_bytes / native_bytes,
        reachable=wire_bytes <= allowed_bytes,
    )


def budget_of_upgrades(
    upgrades: int,
    geometry: KVGeometry,
    table: PrecisionTable,
    slot_bytes: int,
    forced_high: ArrayLike,
    usable_tiers: Iterable[Tier],
    message_bytes_per_subchunk: int,
) -> float:
    """The budget under which `plan_chunk` makes about ``upgrades`` upgrades of a chunk whose tokens are equally
    important: up to 1/1024 of all steps fewer, where its search stops, and more where those take no more bytes, which
    on a chunk of few blocks of scales may be some percent.

    Bytes do not grow with every upgrade: scales by channel are of whole blocks of rows, and one block less is needed
    where those of both tiers happen to be full. The budget has room for it, so that what is planned does not hang on
    meeting full ones, and half a byte more, so that it does not hang on a rounding of the last digit.

    Other arguments as for `plan_chunk`, ``forced_high`` gives the rows.
    """
    usable_tiers = tuple(usable_tiers)
    forced = np.asarray(forced_high, dtype=bool)
    ladder = UpgradeLadder(
        np.ones(len(forced)), bytes_per_row(geometry, table), tier_distortion(table), forced, usable_tiers
    )
    search = _PlanSearch(ladder, geometry, table, slot_bytes, message_bytes_per_subchunk, usable_tiers)
    native_bytes = ladder.rows * geometry.native_bytes_per_token
    return (search.bytes_needed(max(0, upgrades - CHANNEL_BLOCK_ROWS), upgrades) + 0.5) / native_bytes


class _PlanSearch:
    """Wire bytes of the assignments of a ladder: by bounds where these decide or the chunk is large, else by cutting.

    What decides does not depend on the budget, so that a larger one never finds fewer upgrades.
    """

    def __init__(
        self,
        ladder: UpgradeLadder,
        geometry: KVGeometry,
        table: PrecisionTable,
        slot_bytes: int,
        message_bytes: int,
        usable_tiers: tuple[Tier, ...],
    ) -> None:
        self._ladder = ladder
        self._cutter = SubChunkCutter(geometry.page_size, geometry, table, slot_bytes)
        self._message_bytes = message_bytes
        self._map_bytes = tier_map_bytes(ladder.rows)
        self._padding_bytes = max_padding_bytes(geometry, table, usable_tiers)
        # A sub-chunk that is not the last is full up to less than one page and its padding.
        page_bytes = int(bytes_per_row(geometry, table).max()) * geometry.page_size
        self._full_bytes = slot_bytes - page_bytes - self._padding_bytes
        self._by_bounds = (
            ladder.rows * geometry.native_bytes_per_token > EXACT_SLOTS * slot_bytes
            and self._padding_bytes <= slot_bytes * BOUND_SLACK
            and self._full_bytes >= slot_bytes // 2
        )

    def most_steps(self, allowed_bytes: int) -> int:
        """Most upgrades found that take at most ``allowed_bytes`` on the wire; 0 if none do."""
        if self._fits(self._ladder.steps, allowed_bytes):
            return self._ladder.steps
        steps, too_many = 0, self._ladder.steps
        while too_many - steps > max(1, self._ladder.steps // SEARCH_RESOLUTION):
            middle = (steps + too_many) // 2
            if self._fits(middle, allowed_bytes):
                steps = middle
            else:
                too_many = middle
        return steps

    def bytes_needed(self, first: int, last: int) -> int:
        """Least allowed bytes with which each of the assignments after ``first`` to ``last`` upgrades is taken to
        fit."""
        if self._by_bounds:
            return max(map(self._bound, range(first, last + 1)))
        moves = map(self._ladder.step, range(first, last))
        return max(map(self._wire_bytes, self._cutter.cut_after_each(self._ladder.tiers(first), moves)))

    def _bound(self, steps: int) -> int:
        row_bytes = self._ladder.cost(steps)
        subchunks = row_bytes // self._full_bytes + 1
        return row_bytes + self._map_bytes + subchunks * (self._padding_bytes + self._message_bytes + 1)

    def _fits(self, steps: int, allowed_bytes: int) -> bool:
        """Whether the assignment after ``steps`` upgrades surely takes at most ``allowed_bytes`` on the wire."""
        row_bytes = self._ladder.cost(steps)
        least = row_bytes + self._map_bytes
        if least > allowed_bytes:
            return False
        if self._full_bytes > 0 and self._bound(steps) <= allowed_bytes:
            return True
        return not self._by_bounds and self.cut(self._ladder.tiers(steps))[1] <= allowed_bytes

    def cut(self, tiers: TierArray) -> tuple[list[SubChunk], int]:
        """Sub-chunks of an assignment and their bytes on the wire."""
        subchunks = self._cutter.cut(tiers)
        return subchunks, self._wire_bytes(subchunks)

    def _wire_bytes(self, subchunks: list[SubChunk]) -> int:
        return sum(
            subchunk.payload_bytes + self._message_bytes + tier_map_bytes(sum(subchunk.rows_per_tier))
            for subchunk in subchunks
        )
