"""Which precision each tier, layer, K or V, and KV head travels in."""

from __future__ import annotations

import hashlib
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.geometry import KVGeometry

MAX_TIERS = 4
"""A tier map spends two bits a row."""


class HeadRun(NamedTuple):
    """Heads ``lo`` to ``hi`` (exclusive) of one (tier, layer, K|V) share ``precision``."""

    lo: int
    hi: int
    precision: Precision


class PrecisionTable:
    """Immutable ``precision[tier, layer, K|V, kv_head]``; hashable, equal by content.

    Args:
        values: uint8 array [tiers, layers, 2, kv_heads] of `Precision` values; copied.

    Raises:
        PayloadError: wrong dtype or shape, more than 4 tiers, or a value that is no known precision.
    """

    def __init__(self, values: npt.NDArray[np.uint8]) -> None:
        if not isinstance(values, np.ndarray) or values.dtype != np.uint8:
            got = values.dtype if isinstance(values, np.ndarray) else type(values).__name__
            raise PayloadError(f"precision table: expected a uint8 array, got {got}")
        if values.ndim != 4 or values.shape[2] != 2 or min(values.shape) < 1:
            raise PayloadError(f"precision table: expected shape [tiers, layers, 2, kv_heads], got {values.shape}")
        if values.shape[0] > MAX_TIERS:
            raise PayloadError(f"precision table: at most {MAX_TIERS} tiers, got {values.shape[0]}")
        unknown = values[~np.isin(values, [*Precision])]
        if unknown.size:
            known = ", ".join(f"{p.value} ({p.name})" for p in Precision)
            raise PayloadError(f"precision table: unknown precision {unknown[0]}, this build knows {known}")
        self._values = values.copy()
        self._values.setflags(write=False)
        self._runs: dict[tuple[int, int, int], list[HeadRun]] = {}

    @property
    def values(self) -> npt.NDArray[np.uint8]:
        """Read-only uint8 [tiers, layers, 2, kv_heads]."""
        return self._values

    @property
    def tiers(self) -> int:
        """Number of tiers that the table has a row for."""
        return int(self._values.shape[0])

    @property
    def layers(self) -> int:
        """Number of layers."""
        return int(self._values.shape[1])

    @property
    def kv_heads(self) -> int:
        """Number of KV heads."""
        return int(self._values.shape[3])

    @cached_property
    def precisions(self) -> frozenset[Precision]:
        """Precisions that some cell has."""
        return frozenset(Precision(int(value)) for value in np.unique(self._values))

    def check_geometry(self, geometry: KVGeometry) -> None:
        """Raise PayloadError if the table's layers or heads are not those of ``geometry``."""
        if (self.layers, self.kv_heads) != (geometry.layers, geometry.kv_heads):
            raise PayloadError(
                f"precision table: expected {geometry.layers} layers x {geometry.kv_heads} KV heads, "
                f"got {self.layers} x {self.kv_heads}"
            )

    def head_runs(self, tier: int, layer: int, kv: int) -> list[HeadRun]:
        """Maximal runs of neighbouring heads with one precision, ascending, covering every head once."""
        key = (tier, layer, kv)
        runs = self._runs.get(key)
        if runs is None:
            row = self._values[tier, layer, kv]
            edges = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), row.size]
            runs = [HeadRun(lo, hi, Precision(int(row[lo]))) for lo, hi in pairwise(edges)]
            self._runs[key] = runs
        return runs

    def to_bytes(self) -> bytes:
        """Wire form: one byte of tier count, then the table in C order."""
        return bytes([self.tiers]) + self._values.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview, geometry: KVGeometry) -> PrecisionTable:
        """Read `to_bytes` output for a known geometry.

        Raises:
            PayloadError: truncated, over-long, or with unknown tiers or precisions.
        """
        raw = bytes(data)
        if not raw:
            raise PayloadError("precision table: expected at least one byte, got none")
        tiers = raw[0]
        if not 1 <= tiers <= MAX_TIERS:
            raise PayloadError(f"precision table: expected 1 to {MAX_TIERS} tiers, got {tiers}")
        shape = (tiers, geometry.layers, 2, geometry.kv_heads)
        expected = 1 + int(np.prod(shape))
        if len(raw) != expected:
            raise PayloadError(
                f"precision table: expected {expected} bytes for {tiers} tiers of {geometry.layers} layers x "
                f"{geometry.kv_heads} KV heads, got {len(raw)}"
            )
        return cls(np.frombuffer(raw, dtype=np.uint8, offset=1).reshape(shape))

    @cached_property
    def _key(self) -> bytes:
        return np.asarray(self._values.shape, dtype="<u4").tobytes() + self._values.tobytes()

    def digest(self) -> int:
        """Return 64 bits that are equal for equal tables, on every machine and in every release of format 1."""
        return int.from_bytes(hashlib.blake2b(self._key, digest_size=8, person=b"SKV-precisions").digest(), "little")

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, PrecisionTable) and self._key == other._key

    def __repr__(self) -> str:
        return f"PrecisionTable(tiers={self.tiers}, layers={self.layers}, kv_heads={self.kv_heads})"
