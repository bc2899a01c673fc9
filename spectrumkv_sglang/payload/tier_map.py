"""Tiers of a sub-chunk's rows in two bits each, as the control message carries them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.precision_table import MAX_TIERS

_ROWS_PER_BYTE = 4
_SHIFTS = np.array([0, 2, 4, 6], dtype=np.uint8)


def tier_map_bytes(rows: int) -> int:
    """Bytes of the tier map of ``rows`` rows."""
    return -(-rows // _ROWS_PER_BYTE)


def encode_tier_map(tiers: npt.NDArray[np.uint8], tier_count: int) -> bytes:
    """Pack tiers, four to a byte; row 4i sits in the two lowest bits of byte i, unused bits are zero.

    Args:
        tiers: uint8 [rows], each below ``tier_count``.
        tier_count: tiers of the precision table, 1 to 4.

    Raises:
        PayloadError: wrong dtype or shape, or a tier that the table does not have.
    """
    check_tiers(tiers, tier_count)
    padded = np.zeros(tier_map_bytes(tiers.size) * _ROWS_PER_BYTE, dtype=np.uint8)
    padded[: tiers.size] = tiers
    quads = padded.reshape(-1, _ROWS_PER_BYTE) << _SHIFTS
    return bytes(np.bitwise_or.reduce(quads, axis=1).astype(np.uint8).tobytes())


def decode_tier_map(data: bytes | bytearray | memoryview, rows: int, tier_count: int) -> npt.NDArray[np.uint8]:
    """Unpack `encode_tier_map` output to uint8 [rows].

    Raises:
        PayloadError: not exactly the bytes of ``rows`` rows, a tier that the table does not have, or bits set after
            the last row.
    """
    if rows < 0:
        raise PayloadError(f"tier map: rows must not be negative, got {rows}")
    raw = np.frombuffer(bytes(data), dtype=np.uint8)
    if raw.size != tier_map_bytes(rows):
        raise PayloadError(f"tier map: expected {tier_map_bytes(rows)} bytes for {rows} rows, got {raw.size}")
    spread = ((raw[:, None] >> _SHIFTS) & 3).reshape(-1)
    if np.any(spread[rows:]):
        raise PayloadError(f"tier map: expected zero bits after row {rows}, got {raw[-1]:#04x} in the last byte")
    tiers = spread[:rows].astype(np.uint8)
    check_tiers(tiers, tier_count)
    return tiers


def check_tiers(tiers: npt.NDArray[np.uint8], tier_count: int) -> None:
    """Raise PayloadError unless ``tiers`` is a uint8 vector whose values are all below ``tier_count``."""
    if not 1 <= tier_count <= MAX_TIERS:
        raise PayloadError(f"tier map: tier count must be 1 to {MAX_TIERS}, got {tier_count}")
    if not isinstance(tiers, np.ndarray) or tiers.dtype != np.uint8 or tiers.ndim != 1:
        got = f"{tiers.dtype} {tiers.shape}" if isinstance(tiers, np.ndarray) else type(tiers).__name__
        raise PayloadError(f"tier map: expected a uint8 vector, got {got}")
    if tiers.size and int(tiers.max()) >= tier_count:
        raise PayloadError(f"tier map: expected tiers below {tier_count}, got {int(tiers.max())}")
