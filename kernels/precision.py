"""Precisions that a piece of KV can travel in."""

from __future__ import annotations

import enum

CHANNEL_BLOCK_ROWS = 128
"""Rows that share parameters in the precisions by channel; the last block of a segment may be shorter."""


class Precision(enum.IntEnum):
    """Wire values of the precision table.

    ``INTn``: asymmetric n-bit integers, one float16 scale and one float16 zero per (row, head); INT8 is symmetric.
    ``INTn_CHANNEL``: asymmetric n-bit integers, one float16 scale and one float16 zero per (block of 128 rows, head,
    channel).
    """

    NATIVE = 0
    """The pool's own bytes."""
    INT8 = 1
    """Symmetric 8-bit integers, one float16 scale per (row, head)."""
    FP8_E4M3 = 2
    """8-bit floats (4 exponent bits, 3 mantissa bits, no infinities), one float16 scale per (row, head)."""
    INT4 = 3
    INT2 = 4
    INT4_CHANNEL = 5
    INT2_CHANNEL = 6
    INT3_CHANNEL = 7
    INT5_CHANNEL = 8
    INT6_CHANNEL = 9
    INT8_CHANNEL = 10
    INT3 = 11
    INT5 = 12
    INT6 = 13

    @property
    def bits(self) -> int:
        """Bits of one element's code; 0 for NATIVE, whose elements have the pool's own size."""
        return _BITS[self]

    @property
    def by_channel(self) -> bool:
        """Whether `CHANNEL_BLOCK_ROWS` rows share parameters, so that a row does not decode alone."""
        return self in _BY_CHANNEL


_BITS = {
    Precision.NATIVE: 0,
    Precision.INT8: 8,
    Precision.FP8_E4M3: 8,
    Precision.INT4: 4,
    Precision.INT2: 2,
    Precision.INT4_CHANNEL: 4,
    Precision.INT2_CHANNEL: 2,
    Precision.INT3_CHANNEL: 3,
    Precision.INT5_CHANNEL: 5,
    Precision.INT6_CHANNEL: 6,
    Precision.INT8_CHANNEL: 8,
    Precision.INT3: 3,
    Precision.INT5: 5,
    Precision.INT6: 6,
}
_BY_CHANNEL = frozenset(
    {
        Precision.INT2_CHANNEL,
        Precision.INT3_CHANNEL,
        Precision.INT4_CHANNEL,
        Precision.INT5_CHANNEL,
        Precision.INT6_CHANNEL,
        Precision.INT8_CHANNEL,
    }
)


def labels_by_bits() -> list[str]:
    """Names of the precisions as files and options write them: few bits first, native last."""
    ordered = sorted(Precision, key=lambda precision: (precision.bits or 16, precision.name))
    return [precision.name.lower() for precision in ordered]
