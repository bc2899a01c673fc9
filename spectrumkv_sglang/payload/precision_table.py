"""Which precision each tier, layer, K or V, and KV head travels in, and what is done to it before."""

from __future__ import annotations

import hashlib
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.quantisers import quantiser_for
from spectrumkv_sglang.kernels.transforms import Transform, transform_for
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
    """Immutable ``precision[tier, layer, K|V, kv_head]`` and ``transform[layer, K|V]``; hashable, equal by content.

    Args:
        values: uint8 array [tiers, layers, 2, kv_heads] of `Precision` values; copied.
        transforms: uint8 array [layers, 2] of `Transform` values, applied to every cell of the layer's keys or values
            whose precision is not native; copied. None for no transform anywhere.

    Raises:
        PayloadError: wrong dtype or shape, more than 4 tiers, a value that is no known precision or transform, or a
            transform of keys alone that is asked of values.
    """

    def __init__(self, values: npt.NDArray[np.uint8], transforms: npt.NDArray[np.uint8] | None = None) -> None:
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
        self._transforms = _checked_transforms(transforms, self.layers)
        self._runs: dict[tuple[int, int, int], list[HeadRun]] = {}
        self._fitting_dims: set[tuple[int, int]] = set()

    @property
    def values(self) -> npt.NDArray[np.uint8]:
        """Read-only uint8 [tiers, layers, 2, kv_heads]."""
        return self._values

    @property
    def transforms(self) -> npt.NDArray[np.uint8]:
        """Read-only uint8 [layers, 2]."""
        return self._transforms

    def transform(self, layer: int, kv: int) -> Transform:
        """What the keys (0) or values (1) of a layer go through where they are not native."""
        return Transform(int(self._transforms[layer, kv]))

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

    @cached_property
    def needs_rotation(self) -> bool:
        """Whether some keys are rotated back by their position."""
        return bool((self._transforms == Transform.DEROPE).any())

    def check_geometry(self, geometry: KVGeometry) -> None:
        """Raise PayloadError if layers, heads or head dimensions of ``geometry`` are none that the table is for."""
        if (self.layers, self.kv_heads) != (geometry.layers, geometry.kv_heads):
            raise PayloadError(
                f"precision table: expected {geometry.layers} layers x {geometry.kv_heads} KV heads, "
                f"got {self.layers} x {self.kv_heads}"
            )
        dims = (geometry.head_dim, geometry.v_head_dim)
        if dims not in self._fitting_dims:
            for kv, dim in enumerate(dims):
                self._check_dim(kv, dim)
            self._fitting_dims.add(dims)

    def _check_dim(self, kv: int, dim: int) -> None:
        for value in np.unique(self._values[:, :, kv]):
            multiple = quantiser_for(Precision(int(value))).dim_multiple
            if dim % multiple:
                raise PayloadError(
                    f"precision table: {Precision(int(value)).name} takes head dimensions that are multiples of "
                    f"{multiple}, got {dim}"
                )
        for value in np.unique(self._transforms[:, kv]):
            try:
                transform_for(Transform(int(value))).check_dim(dim)
            except ValueError as error:
                raise PayloadError(f"precision table: {error}") from error

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

    def of_heads(self, first: int, count: int) -> PrecisionTable:
        """The table of KV heads ``first`` to ``first + count - 1`` alone.

        Raises:
            PayloadError: it does not have them.
        """
        if count < 1 or not 0 <= first <= self.kv_heads - count:
            raise PayloadError(
                f"precision table: expected heads within 0 to {self.kv_heads - 1}, got {count} from {first} on"
            )
        if count == self.kv_heads:
            return self
        return PrecisionTable(self._values[..., first : first + count], self._transforms)

    def to_bytes(self) -> bytes:
        """Wire form: one byte of tier count, then precisions and transforms in C order."""
        return bytes([self.tiers]) + self._values.tobytes() + self._transforms.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview, geometry: KVGeometry) -> PrecisionTable:
        """Read `to_bytes` output for a known geometry.

        Raises:
            PayloadError: truncated, over-long, or with unknown tiers, precisions or transforms.
        """
        raw = bytes(data)
        if not raw:
            raise PayloadError("precision table: expected at least one byte, got none")
        tiers = raw[0]
        if not 1 <= tiers <= MAX_TIERS:
            raise PayloadError(f"precision table: expected 1 to {MAX_TIERS} tiers, got {tiers}")
        shape = (tiers, geometry.layers, 2, geometry.kv_heads)
        cells = int(np.prod(shape))
        expected = 1 + cells + geometry.layers * 2
        if len(raw) != expected:
            raise PayloadError(
                f"precision table: expected {expected} bytes for {tiers} tiers of {geometry.layers} layers x "
                f"{geometry.kv_heads} KV heads, got {len(raw)}"
            )
        body = np.frombuffer(raw, dtype=np.uint8, offset=1)
        return cls(body[:cells].reshape(shape), body[cells:].reshape(geometry.layers, 2))

    @cached_property
    def _key(self) -> bytes:
        shape = np.asarray(self._values.shape, dtype="<u4").tobytes()
        return shape + self._values.tobytes() + self._transforms.tobytes()

    def digest(self) -> int:
        """Return 64 bits that are equal for equal tables, on every machine and in every release of format 2."""
        return int.from_bytes(hashlib.blake2b(self._key, digest_size=8, person=b"SKV-precisions-2").digest(), "little")

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


def _checked_transforms(transforms: npt.NDArray[np.uint8] | None, layers: int) -> npt.NDArray[np.uint8]:
    """A read-only copy."""
    checked = np.zeros((layers, 2), np.uint8) if transforms is None else transforms.copy()
    if checked.dtype != np.uint8 or checked.shape != (layers, 2):
        raise PayloadError(
            f"precision table: expected transforms uint8 [{layers} layers, 2], got {checked.dtype} {checked.shape}"
        )
    unknown = checked[~np.isin(checked, [*Transform])]
    if unknown.size:
        known = ", ".join(f"{t.value} ({t.name})" for t in Transform)
        raise PayloadError(f"precision table: unknown transform {unknown[0]}, this build knows {known}")
    if (checked[:, 1] == Transform.DEROPE).any():
        raise PayloadError("precision table: expected keys alone to be rotated back by position, got values too")
    checked.setflags(write=False)
    return checked
