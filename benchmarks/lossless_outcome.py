"""What one codec made of one payload, and what its bytes bound."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

CHUNK_BYTES = 64 << 10
"""What nvCOMP codes by itself where nothing else is said: each such chunk with statistics of its own."""


@dataclass(frozen=True)
class Outcome:
    """One codec on one payload.

    Attributes:
        bytes: of the payload.
        packed_bytes: what it becomes.
        compress_seconds: for all of it.
        decompress_seconds: for all of it.
    """

    bytes: int
    packed_bytes: int
    compress_seconds: float
    decompress_seconds: float

    @property
    def ratio(self) -> float:
        """Packed over unpacked bytes."""
        return self.packed_bytes / self.bytes

    @property
    def compress_rate(self) -> float:
        """Unpacked bytes a second that go in."""
        return self.bytes / self.compress_seconds

    @property
    def decompress_rate(self) -> float:
        """Unpacked bytes a second that come out."""
        return self.bytes / self.decompress_seconds

    @property
    def break_even(self) -> float:
        """Bits a second of the link on which compressing takes as long as it saves, decompression left out."""
        return self._saved_bits / self.compress_seconds

    @property
    def break_even_both(self) -> float:
        """The same with decompression, where nothing overlaps."""
        return self._saved_bits / (self.compress_seconds + self.decompress_seconds)

    @property
    def _saved_bits(self) -> float:
        return max(0, self.bytes - self.packed_bytes) * 8.0

    def document(self) -> dict[str, float]:
        """For the JSON file."""
        return {
            **asdict(self),
            "ratio": self.ratio,
            "compress_bytes_per_second": self.compress_rate,
            "decompress_bytes_per_second": self.decompress_rate,
            "break_even_bits_per_second": self.break_even,
            "break_even_with_decompression_bits_per_second": self.break_even_both,
        }


def order_0(data: bytes, chunk_bytes: int | None = None) -> float:
    """Entropy of the bytes over 8 bits; with ``chunk_bytes`` of each chunk by its own frequencies, tables left out."""
    values = np.frombuffer(data, np.uint8)
    chunk = chunk_bytes or len(values)
    bits = sum(_bits(values[start : start + chunk]) for start in range(0, len(values), chunk))
    return bits / (8 * len(values))


def _bits(values: np.ndarray) -> float:
    counts = np.bincount(values, minlength=256)
    counts = counts[counts > 0]
    return float((counts * np.log2(len(values) / counts)).sum())
