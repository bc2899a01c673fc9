"""Keys through a per-channel affine map, then by row: a mean and a scale a channel for a whole chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spectrumkv_sglang.evaluation.baselines.base import LayerwiseBaseline
from spectrumkv_sglang.evaluation.baselines.rounding import PARAM_BYTES, affine_groups, code_bytes
from spectrumkv_sglang.evaluation.prefix import PrefixKV
from spectrumkv_sglang.kernels.quantisers.affine import round_zero
from spectrumkv_sglang.kernels.quantisers.base import round_scale


@dataclass(frozen=True)
class AffineKeysBaseline(LayerwiseBaseline):
    """Keys minus their channel's mean, over the channel's standard deviation, then rounded like values: with a scale
    and a zero for each token and head. Mean and deviation are taken over the tokens of the chunk and sent in float16.

    Per-channel keys without blocks: what is large in a channel throughout is taken out once, and every row still
    decodes alone. What changes from token to token inside a channel stays, and rounding by row bears it.

    Args:
        bits: of keys and of values.
    """

    bits: int

    @property
    def description(self) -> str:
        """One line for people."""
        return f"{self.bits} bits per token, keys minus each channel's mean over its deviation, of the whole chunk"

    def keys(self, keys: torch.Tensor, prefix: PrefixKV, layer: int) -> torch.Tensor:
        """Per token and head, behind the affine map."""
        mean = round_zero(keys.mean(0, keepdim=True)).float()
        # About the mean that travels: what float16 rounds off a large mean is in the deviation.
        scale, divisor = round_scale((keys - mean).square().mean(0, keepdim=True).sqrt())
        return affine_groups((keys - mean) / divisor, self.bits, 2, keys.shape[2]) * scale.float() + mean

    def values(self, values: torch.Tensor, prefix: PrefixKV, layer: int) -> torch.Tensor:
        """Per token and head."""
        return affine_groups(values, self.bits, 2, values.shape[2])

    def wire_bytes(self, prefix: PrefixKV) -> int:
        """Codes, scales and zeros of tokens, means and scales of channels."""
        geometry, tokens = prefix.geometry, prefix.tokens
        heads, dim, v_dim = geometry.kv_heads, geometry.head_dim, geometry.v_head_dim
        layer = code_bytes(tokens * heads * dim, self.bits) + code_bytes(tokens * heads * v_dim, self.bits)
        layer += 2 * PARAM_BYTES * heads * (2 * tokens + dim)
        return geometry.layers * layer
