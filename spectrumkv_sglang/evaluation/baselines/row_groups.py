"""Keys and values by row, with scales over a few elements of a head in place of all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spectrumkv_sglang.evaluation.baselines.base import LayerwiseBaseline
from spectrumkv_sglang.evaluation.baselines.rounding import PARAM_BYTES, affine_groups, codes_of_tokens, groups_of
from spectrumkv_sglang.evaluation.prefix import PrefixKV


@dataclass(frozen=True)
class RowGroupsBaseline(LayerwiseBaseline):
    """Keys and values in groups of neighbouring elements of one token and head, each with a float16 scale and zero.

    A channel that is large costs its own group its resolution, not the head. The last group of a head may be shorter.

    Args:
        bits: of keys and of values.
        group: elements that share a scale.
    """

    bits: int
    group: int

    @property
    def description(self) -> str:
        """One line for people."""
        return f"{self.bits} bits per token, a scale and a zero for each {self.group} elements"

    def keys(self, keys: torch.Tensor, prefix: PrefixKV, layer: int) -> torch.Tensor:
        """Groups of elements, per token and head."""
        return affine_groups(keys, self.bits, 2, self.group)

    def values(self, values: torch.Tensor, prefix: PrefixKV, layer: int) -> torch.Tensor:
        """Groups of elements, per token and head."""
        return affine_groups(values, self.bits, 2, self.group)

    def wire_bytes(self, prefix: PrefixKV) -> int:
        """Codes, scales and zeros."""
        geometry, rows = prefix.geometry, prefix.tokens * prefix.geometry.kv_heads
        groups = groups_of(geometry.head_dim, self.group) + groups_of(geometry.v_head_dim, self.group)
        layer = codes_of_tokens(geometry, prefix.tokens, self.bits) + 2 * PARAM_BYTES * rows * groups
        return geometry.layers * layer
