"""What the baselines that rewrite keys and values in place of packing them have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from spectrumkv_sglang.evaluation.prefix import MovedKV, PrefixKV
from spectrumkv_sglang.payload.kv_buffers import KVBuffers


class LayerwiseBaseline(ABC):
    """A baseline that treats each layer's keys and values by themselves and needs no budget."""

    budget: float | None = None
    scorer: str | None = None

    @property
    @abstractmethod
    def description(self) -> str:
        """One line for people."""

    @abstractmethod
    def keys(self, keys: torch.Tensor, prefix: PrefixKV, layer: int) -> torch.Tensor:
        """Keys float32 [tokens, kv_heads, head_dim] as they arrive."""

    @abstractmethod
    def values(self, values: torch.Tensor, prefix: PrefixKV, layer: int) -> torch.Tensor:
        """Values float32 [tokens, kv_heads, v_head_dim] as they arrive."""

    @abstractmethod
    def wire_bytes(self, prefix: PrefixKV) -> int:
        """Bytes on the wire."""

    def move(self, prefix: PrefixKV) -> MovedKV:
        """Rewrite every layer."""
        k, v = [], []
        for layer in range(prefix.geometry.layers):
            own_k, own_v = prefix.view.buffers.of(layer, 0), prefix.view.buffers.of(layer, 1)
            k.append(self.keys(own_k.float(), prefix, layer).to(own_k.dtype))
            v.append(self.values(own_v.float(), prefix, layer).to(own_v.dtype))
        return MovedKV(KVBuffers(k=k, v=v), self.wire_bytes(prefix))
