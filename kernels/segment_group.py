"""What a launch of the pack and unpack kernels works on, free of Triton so that it can be planned without it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from spectrumkv_sglang.kernels.precision import Precision

DIM_MULTIPLE = 16
"""Head dimensions that the kernels take are multiples of this, so that INT4 codes of a head fill whole words."""
UNIT_BYTES = 16
"""Pool addresses and strides that the kernels take are multiples of this many bytes: a thread moves 16 at a time."""
TABLE_COLUMNS = 4
"""Columns of a segment table, int64, all in units of 16 bytes so that compiled code knows the alignment: address of the
segment's first head in slot 0 of its pool buffer, counted from the first key buffer; then, counted from the payload's
start, the first code, the first parameter, and the end of the padding that follows."""


class SegmentGroup(NamedTuple):
    """Segments that one launch works on: they differ only in where they lie.

    Attributes:
        precision: how their rows travel.
        dtype: element type of the pool.
        heads: heads of each segment.
        dim: elements of a head, a multiple of 16.
        rows: rows of each segment.
        segments: number of segments, one line of the segment table each.
        slot_stride: units of 16 bytes from one pool slot to the next.
        head_stride: units of 16 bytes from one head to the next.
    """

    precision: Precision
    dtype: torch.dtype
    heads: int
    dim: int
    rows: int
    segments: int
    slot_stride: int
    head_stride: int


class TileShape(NamedTuple):
    """How a launch is cut.

    Attributes:
        elements: elements of a tile.
        warps: warps that work on it.
        registers: most registers of a thread; None for as many as it takes.
    """

    elements: int
    warps: int
    registers: int | None = None
