"""Precisions that a piece of KV can travel in."""

from __future__ import annotations

import enum

CHANNEL_BLOCK_ROWS = 128
"""Rows that share parameters in `Precision.INT4_CHANNEL`; the last block of a segment may be shorter."""


class Precision(enum.IntEnum):
    """Wire values of the precision table; 4 is reserved for a 2-bit format and refused until one exists."""

    NATIVE = 0
    """The pool's own bytes."""
    INT8 = 1
    """Symmetric 8-bit integers, one float16 scale per (row, head)."""
    FP8_E4M3 = 2
    """8-bit floats (4 exponent bits, 3 mantissa bits, no infinities), one float16 scale per (row, head)."""
    INT4 = 3
    """Asymmetric 4-bit integers, one float16 scale and one float16 zero per (row, head)."""
    INT4_CHANNEL = 5
    """Asymmetric 4-bit integers, one float16 scale and one float16 zero per (block of 128 rows, head, channel)."""
