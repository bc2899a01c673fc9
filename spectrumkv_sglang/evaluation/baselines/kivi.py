"""KIVI (arXiv 2402.02750): asymmetric 2 or 4 bits, keys per channel and values per token, recent tokens as they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spectrumkv_sglang.evaluation.baselines.base import LayerwiseBaseline
from spectrumkv_sglang.evaluation.baselines.rounding import PARAM_BYTES, affine_groups, codes_of_tokens, groups_of
from spectrumkv_sglang.evaluation.prefix import PrefixKV

GROUP = 32


@dataclass(frozen=True)
class KiviBaseline(LayerwiseBaseline):
    """Keys in groups of 32 tokens of one channel, values in groups of 32 elements of one token and head, each with a
    float16 scale and zero. The last tokens, at least ``window`` of them, stay native: KIVI's residual (128 in its
    paper).

    Args:
        bits: of keys and of values.
        window: least native tokens at the end.
    """

    bits: int
    window: int

    @property
    def description(self) -> str:
        """One line for people."""
        return f"KIVI: {self.bits} bits, keys per channel, values per token, last {self.window} tokens native"

    def rounded_tokens(self, tokens: int) -> int:
        """Tokens that do not stay native: whole groups of 32."""
        return max(0, tokens - self.window) // GROUP * GROUP

    def keys(self, keys: torch.Tensor, prefix: PrefixKV, layer: int) -> torch.Tensor:
        """Groups of 32 tokens, per channel."""
        split = self.rounded_tokens(len(keys))
        return torch.cat([affine_groups(keys[:split], self.bits, 0, GROUP), keys[split:]]) if split else keys

    def values(self, values: torch.Tensor, prefix: PrefixKV, layer: int) -> torch.Tensor:
        """Groups of 32 elements, per token and head."""
        split = self.rounded_tokens(len(values))
        return torch.cat([affine_groups(values[:split], self.bits, 2, GROUP), values[split:]])

    def wire_bytes(self, prefix: PrefixKV) -> int:
        """Codes, scales and zeros of the rounded tokens, and the others' native bytes."""
        geometry, tokens = prefix.geometry, self.rounded_tokens(prefix.tokens)
        heads = geometry.kv_heads
        key_groups = tokens // GROUP * heads * geometry.head_dim
        value_groups = tokens * heads * groups_of(geometry.v_head_dim, GROUP)
        layer = codes_of_tokens(geometry, tokens, self.bits)
        layer += 2 * PARAM_BYTES * (key_groups + value_groups)
        return geometry.layers * layer + (prefix.tokens - tokens) * geometry.native_bytes_per_token
