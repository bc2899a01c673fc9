"""Where every array of a payload lies, as a function of geometry, precision table and rows per tier alone.

A payload is the prologue, then for each layer its K block and its V block. A block starts on a 256-byte boundary and
holds, for each tier that has rows and each run of heads of one precision, the codes ``[rows, heads, c]`` and then the
parameters (float16, of the quantiser's ``param_shape``), each on a 16-byte boundary. Rows of one tier keep the order of
the chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import add
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spectrumkv_sglang.kernels.precision import CHANNEL_BLOCK_ROWS, Precision
from spectrumkv_sglang.kernels.quantisers import quantiser_for
from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.payload.prologue import PROLOGUE_BYTES

BLOCK_ALIGNMENT = 256
"""Byte alignment of each (layer, K|V) block and of the payload's length."""
ARRAY_ALIGNMENT = 16
"""Byte alignment of each array of codes or parameters."""


class Segment(NamedTuple):
    """One run of heads of one precision in one tier of one (layer, K|V); offsets count from the payload's start."""

    tier: int
    layer: int
    kv: int
    head_lo: int
    head_hi: int
    precision: Precision
    rows: int
    row_start: int
    """First row of the tier once rows are grouped by tier."""
    codes_offset: int
    codes_bytes: int
    params_offset: int
    params_bytes: int

    @property
    def heads(self) -> int:
        """Heads in the run."""
        return self.head_hi - self.head_lo


@dataclass(frozen=True)
class PayloadLayout:
    """Every array of one payload.

    Attributes:
        geometry: KV geometry that the payload is cut for.
        table: precision table in force.
        rows_per_tier: rows (tokens) of each tier of the table.
        total_bytes: length of the payload with prologue and padding, a multiple of 256.
    """

    geometry: KVGeometry
    table: PrecisionTable
    rows_per_tier: tuple[int, ...]
    total_bytes: int
    prologue_bytes: int = PROLOGUE_BYTES

    @property
    def rows(self) -> int:
        """Rows of all tiers."""
        return sum(self.rows_per_tier)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """In ascending offset order; tiers without rows have none. Placed only when asked for, which takes a quarter of
        a millisecond for 32 layers: packing such a payload once more on a GPU does not ask."""
        segments: list[Segment] = []
        offset = self.prologue_bytes
        for layer in range(self.geometry.layers):
            for kv in (0, 1):
                offset = _align(offset, BLOCK_ALIGNMENT)
                row_start = 0
                for tier, rows in enumerate(self.rows_per_tier):
                    if not rows:
                        continue
                    for lo, hi, precision in self.table.head_runs(tier, layer, kv):
                        codes, params = _array_bytes(self.geometry, _Kind(tier, kv, precision, hi - lo), rows)
                        params_at = _align(offset + codes, ARRAY_ALIGNMENT)
                        where = (tier, layer, kv, lo, hi, precision, rows, row_start)
                        segments.append(Segment(*where, offset, codes, params_at, params))
                        offset = _align(params_at + params, ARRAY_ALIGNMENT)
                    row_start += rows
        return tuple(segments)


def plan_layout(geometry: KVGeometry, table: PrecisionTable, rows_per_tier: Sequence[int]) -> PayloadLayout:
    """The layout of a payload of ``rows_per_tier`` rows.

    Raises:
        PayloadError: the table does not belong to the geometry, or the counts are not one per tier and >= 0.
    """
    total_bytes = payload_bytes(geometry, table, rows_per_tier)
    return PayloadLayout(geometry, table, tuple(int(count) for count in rows_per_tier), total_bytes)


def payload_bytes(geometry: KVGeometry, table: PrecisionTable, rows_per_tier: Sequence[int]) -> int:
    """Length of a payload of ``rows_per_tier`` rows with prologue and padding; monotone in every count.

    Raises:
        PayloadError: as `plan_layout`.
    """
    rows = _check_rows(geometry, table, rows_per_tier)
    return PayloadSizes(geometry, table).of(rows)


class PayloadSizes:
    """`payload_bytes` for many counts of rows of one table: what a tier's rows take in each kind of block is kept.

    Raises:
        PayloadError: the table does not belong to the geometry.
    """

    def __init__(self, geometry: KVGeometry, table: PrecisionTable) -> None:
        self._geometry, self._census = geometry, _census(geometry, table)
        self._block_counts: list[int] = self._census.block_counts.tolist()
        self._kept: dict[tuple[int, int], list[int]] = {}

    def of(self, rows_per_tier: Sequence[int]) -> int:
        """Length of a payload of ``rows_per_tier`` rows, counts >= 0 of all tiers of the table."""
        blocks = [0] * len(self._block_counts)
        for tier, rows in enumerate(rows_per_tier):
            if rows:
                blocks = [*map(add, blocks, self._in_blocks(tier, rows))]
        return PROLOGUE_BYTES + sum(
            _align(size, BLOCK_ALIGNMENT) * count for size, count in zip(blocks, self._block_counts, strict=True)
        )

    def _in_blocks(self, tier: int, rows: int) -> list[int]:
        """Bytes of a tier's ``rows`` rows in a block of each kind."""
        kept = self._kept.get((tier, rows))
        if kept is None:
            kinds = self._census.kinds
            sizes = [_padded_bytes(self._geometry, kind, rows) if kind.tier == tier else 0 for kind in kinds]
            kept = (self._census.kinds_per_block @ np.array(sizes, dtype=np.int64)).tolist()
            self._kept[tier, rows] = kept
        return kept


def bytes_per_row(geometry: KVGeometry, table: PrecisionTable) -> npt.NDArray[np.int64]:
    """Codes and parameters of one row of each tier, int64 [tiers], in bytes and without alignment.

    A row that shares its parameters with the others of a block bears its part of a full block's; the sum over all
    layers and heads is rounded up, so that it is less than one byte too much.
    """
    table.check_geometry(geometry)
    cost = np.zeros(table.tiers, dtype=np.int64)
    census = _census(geometry, table)
    for index, kind in enumerate(census.kinds):
        occurrences = int(census.kinds_per_block[:, index] @ census.block_counts)
        cost[kind.tier] += occurrences * sum(_array_bytes(geometry, kind, CHANNEL_BLOCK_ROWS))
    return -(-cost // CHANNEL_BLOCK_ROWS)


def max_padding_bytes(geometry: KVGeometry, table: PrecisionTable, tiers_used: Iterable[int]) -> int:
    """Most bytes that one payload can spend on prologue, alignment, and blocks of rows that are not full.

    Args:
        geometry: KV geometry of the rank.
        table: precision table in force.
        tiers_used: indices of the tiers that may have rows.

    Returns:
        An upper bound of ``payload_bytes(rows) - sum(rows * bytes_per_row)`` over all row counts of those tiers.
    """
    table.check_geometry(geometry)
    used = set(tiers_used)
    census = _census(geometry, table)
    # Every array is padded to a multiple of 16 bytes, so a block wants at most 240 more for its 256.
    slack = np.array([_segment_slack(geometry, kind) if kind.tier in used else 0 for kind in census.kinds])
    per_block = census.kinds_per_block @ slack + (BLOCK_ALIGNMENT - ARRAY_ALIGNMENT)
    return PROLOGUE_BYTES + int(per_block @ census.block_counts)


class _Kind(NamedTuple):
    """Segments that differ only in where they lie."""

    tier: int
    kv: int
    precision: Precision
    heads: int


class _Census(NamedTuple):
    """How many segments of which kind the table makes, with equal (layer, K|V) blocks counted once."""

    kinds: tuple[_Kind, ...]
    kinds_per_block: npt.NDArray[np.int64]
    block_counts: npt.NDArray[np.int64]


@lru_cache(maxsize=64)
def _census(geometry: KVGeometry, table: PrecisionTable) -> _Census:
    table.check_geometry(geometry)
    blocks: Counter[tuple[tuple[_Kind, int], ...]] = Counter()
    for layer in range(geometry.layers):
        for kv in (0, 1):
            kinds = Counter(
                # Equal head dimensions make K and V segments alike.
                _Kind(tier, kv if geometry.head_dim != geometry.v_head_dim else 0, precision, hi - lo)
                for tier in range(table.tiers)
                for lo, hi, precision in table.head_runs(tier, layer, kv)
            )
            blocks[tuple(sorted(kinds.items()))] += 1
    index = {kind: i for i, kind in enumerate(sorted({kind for block in blocks for kind, _ in block}))}
    kinds_per_block = np.zeros((len(blocks), len(index)), dtype=np.int64)
    for row, block in enumerate(blocks):
        for kind, count in block:
            kinds_per_block[row, index[kind]] = count
    return _Census(tuple(index), kinds_per_block, np.array(list(blocks.values()), dtype=np.int64))


def _array_bytes(geometry: KVGeometry, kind: _Kind, rows: int) -> tuple[int, int]:
    """Bytes of the codes and of the parameters of one segment of ``rows`` rows."""
    quantiser, dim = quantiser_for(kind.precision), geometry.dim_of(kind.kv)
    codes = quantiser.code_bytes(rows, kind.heads, dim, geometry.itemsize)
    return codes, quantiser.param_bytes(rows, kind.heads, dim)


def _padded_bytes(geometry: KVGeometry, kind: _Kind, rows: int) -> int:
    if not rows:
        return 0
    codes, params = _array_bytes(geometry, kind, rows)
    return _align(codes, ARRAY_ALIGNMENT) + _align(params, ARRAY_ALIGNMENT)


def _segment_slack(geometry: KVGeometry, kind: _Kind) -> int:
    """Most bytes of one segment beyond those of its rows: an array of a multiple of 2^k bytes wants at most 16 - 2^k,
    and a block of one row as many parameters as a full one."""
    codes, params = _array_bytes(geometry, kind, 1)
    unshared = params - params // quantiser_for(kind.precision).block_rows
    return unshared + sum(ARRAY_ALIGNMENT - int(np.gcd(size, ARRAY_ALIGNMENT)) for size in (codes, params))


def _check_rows(geometry: KVGeometry, table: PrecisionTable, rows_per_tier: Sequence[int]) -> tuple[int, ...]:
    table.check_geometry(geometry)
    rows = tuple(int(count) for count in rows_per_tier)
    if len(rows) != table.tiers or min(rows) < 0:
        raise PayloadError(f"payload layout: expected {table.tiers} row counts >= 0, got {list(rows)}")
    return rows


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
