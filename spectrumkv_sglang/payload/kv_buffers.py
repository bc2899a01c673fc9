"""The KV pool of one rank, as packing and unpacking see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from spectrumkv_sglang.payload.device_codec import DeviceCodec
from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.geometry import KVGeometry


@dataclass(frozen=True)
class KVBuffers:
    """KV pool of one rank.

    Attributes:
        k: one tensor [pool slots, kv_heads, head_dim] per layer, elements of a head contiguous.
        v: one tensor [pool slots, kv_heads, v_head_dim] per layer, elements of a head contiguous.
    """

    k: Sequence[torch.Tensor]
    v: Sequence[torch.Tensor]
    _checked: list[KVGeometry] = field(default_factory=list, repr=False, compare=False)
    _codecs: list[DeviceCodec] = field(default_factory=list, repr=False, compare=False)

    def of(self, layer: int, kv: int) -> torch.Tensor:
        """K (``kv=0``) or V (``kv=1``) buffer of a layer."""
        return self.v[layer] if kv else self.k[layer]

    def of_heads(self, first: int, count: int) -> KVBuffers:
        """Views of KV heads ``first`` to ``first + count - 1`` of every layer: nothing else can be read or written."""
        if count < 1 or not 0 <= first <= self.k[0].shape[1] - count:
            raise PayloadError(
                f"KV buffers: expected heads within 0 to {self.k[0].shape[1] - 1}, got {count} from {first} on"
            )
        return KVBuffers([x.narrow(1, first, count) for x in self.k], [x.narrow(1, first, count) for x in self.v])

    @property
    def device(self) -> torch.device:
        """Device of the pool."""
        return self.k[0].device

    @property
    def pool_slots(self) -> int:
        """Token slots of the pool."""
        return self.k[0].shape[0]

    @cached_property
    def unfit_for_kernels(self) -> str | None:
        """What the kernels expect of a pool and this one is not, or None."""
        return DeviceCodec.why_not(self.k, self.v)

    @property
    def device_codec(self) -> DeviceCodec:
        """The codec of this pool for the kernels, made at first use."""
        if not self._codecs:
            self._codecs.append(DeviceCodec(self.k, self.v))
        return self._codecs[0]

    def check_geometry(self, geometry: KVGeometry) -> None:
        """Raise PayloadError unless every buffer has the geometry's shape and dtype and all share one device."""
        if geometry in self._checked:
            return
        if len(self.k) != geometry.layers or len(self.v) != geometry.layers:
            raise PayloadError(
                f"KV buffers: expected {geometry.layers} layers, got {len(self.k)} of K and {len(self.v)} of V"
            )
        dtype = getattr(torch, geometry.dtype)
        for name, kv, buffers in (("K", 0, self.k), ("V", 1, self.v)):
            shape = (self.pool_slots, geometry.kv_heads, geometry.dim_of(kv))
            for layer, buffer in enumerate(buffers):
                got = (tuple(buffer.shape), buffer.dtype, buffer.device, buffer.stride(-1))
                want = (shape, dtype, self.device, 1)
                if got != want:
                    raise PayloadError(
                        f"KV buffers: {name} of layer {layer}: expected shape, dtype, device, last stride {want}, "
                        f"got {got}"
                    )
        self._checked.append(geometry)
