"""The KV of a prefix as a server's pool would hold it, and what became of it on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from spectrumkv_sglang.importance.scores import SlotScores
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.key_rotation import KeyRotation
from spectrumkv_sglang.payload.kv_buffers import KVBuffers
from spectrumkv_sglang.transfer.pool_view import PoolView


@dataclass(frozen=True)
class PrefixKV:
    """A prefilled prefix.

    Attributes:
        name: of the text; random choices depend on it.
        view: keys after the rotary embedding and values, one pool slot a token, in the order of the text; its rotation
            has an angle for each, or is None where the model is not known to turn halves of a head.
        scores: observed importance by scorer's name.
    """

    name: str
    view: PoolView
    scores: Mapping[str, SlotScores]

    @property
    def tokens(self) -> int:
        """Tokens of the prefix."""
        return self.view.pool_slots

    @property
    def geometry(self) -> KVGeometry:
        """Geometry of the KV."""
        return self.view.geometry

    @property
    def rotation(self) -> KeyRotation | None:
        """What the model turned the keys by, None where that is not known."""
        rotation = self.view.rotation
        return rotation if isinstance(rotation, KeyRotation) else None

    @property
    def native_bytes(self) -> int:
        """Bytes of the KV as it is."""
        return self.tokens * self.geometry.native_bytes_per_token

    def copied_view(self) -> PoolView:
        """A pool of its own with the same content."""
        buffers = self.view.buffers
        copy = KVBuffers(k=[k.clone() for k in buffers.k], v=[v.clone() for v in buffers.v])
        return dataclasses.replace(self.view, buffers=copy)


@dataclass(frozen=True)
class Prefilled:
    """A prefix's KV, and the token that the model itself would go on with (prefill's first output token)."""

    prefix: PrefixKV
    next_token: int


@dataclass(frozen=True)
class MovedKV:
    """KV after a method has moved it.

    Attributes:
        buffers: as decode would hold them.
        wire_bytes: everything that the wire carried.
        kept: bool [tokens]; False: the token was dropped and cannot be attended to. None: all are there.
        tokens_by_tier: tokens in high, mid and low; None for methods without tiers.
    """

    buffers: KVBuffers
    wire_bytes: int
    kept: torch.Tensor | None = None
    tokens_by_tier: tuple[int, int, int] | None = None


class Method(Protocol):
    """A way to move a prefix's KV."""

    @property
    def description(self) -> str:
        """One line for people."""
        ...

    @property
    def budget(self) -> float | None:
        """Wire / native bytes that it must keep to; None when its bytes follow from what it does."""
        ...

    @property
    def scorer(self) -> str | None:
        """The scorer whose observed scores it reads from the prefix, None for none."""
        ...

    def move(self, prefix: PrefixKV) -> MovedKV:
        """Move it; ``prefix`` itself stays as it is."""
        ...


@dataclass(frozen=True)
class NativeMethod:
    """Nothing happens: the reference."""

    description: str = "the KV as it is"
    budget: float | None = None
    scorer: str | None = None

    def move(self, prefix: PrefixKV) -> MovedKV:
        """The prefix's own KV."""
        return MovedKV(prefix.view.buffers, prefix.native_bytes)
