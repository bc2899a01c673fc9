"""Shape of the KV cache of one rank, as far as the payload depends on it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

from spectrumkv_sglang.payload.errors import PayloadError

ITEMSIZE_BY_DTYPE = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes per element of each KV pool dtype that can be packed."""

HEAD_DIM_MULTIPLE = 8
"""Head dimensions are multiples of this, so that INT4 codes fill whole bytes and arrays stay aligned."""

_LARGEST = {"layers": 4096, "kv_heads": 4096, "head_dim": 8192, "v_head_dim": 8192, "page_size": 65536}


@dataclass(frozen=True)
class KVGeometry:
    """KV cache geometry of one rank: plain MHA/GQA, one K and one V buffer per layer.

    Attributes:
        layers: attention layers whose KV this rank holds.
        kv_heads: KV heads this rank holds, per layer.
        head_dim: elements of one key head, a multiple of 8.
        v_head_dim: elements of one value head, a multiple of 8.
        page_size: pool slots (tokens) per page.
        dtype: element type of the pool: "float32", "float16" or "bfloat16".

    Raises:
        PayloadError: a field is of the wrong type or out of range.
    """

    layers: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    page_size: int
    dtype: str

    def __post_init__(self) -> None:
        for name, largest in _LARGEST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise PayloadError(f"KV geometry: {name} must be an int, got {type(value).__name__} {value!r}")
            if not 1 <= value <= largest:
                raise PayloadError(f"KV geometry: {name} must be between 1 and {largest}, got {value}")
        for name in ("head_dim", "v_head_dim"):
            value = getattr(self, name)
            if value % HEAD_DIM_MULTIPLE:
                raise PayloadError(f"KV geometry: {name} must be a multiple of {HEAD_DIM_MULTIPLE}, got {value}")
        if self.dtype not in ITEMSIZE_BY_DTYPE:
            known = ", ".join(ITEMSIZE_BY_DTYPE)
            raise PayloadError(f"KV geometry: dtype must be one of {known}, got {self.dtype!r}")

    @property
    def itemsize(self) -> int:
        """Bytes per element of the pool."""
        return ITEMSIZE_BY_DTYPE[self.dtype]

    @property
    def native_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers and heads, as the pool stores them."""
        return self.layers * self.kv_heads * (self.head_dim + self.v_head_dim) * self.itemsize

    def dim_of(self, kv: int) -> int:
        """Head dimension of K (``kv=0``) or V (``kv=1``)."""
        return self.v_head_dim if kv else self.head_dim

    def digest(self) -> int:
        """Return 64 bits that are equal for equal geometries, on every machine and in every release."""
        text = ";".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, person=b"SKV-geometry").digest(), "little")
