"""Keys through a per-channel affine map, then by row: a mean and a scale a channel for a whole chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spectrumkv_sglang.evaluation.baselines.base import LayerwiseBaseline
from spectrumkv_sglang.evaluation.baselines.rounding import PARAM_BYTES, affine_groups, codes_of_tokens
from spectrumkv_sglang.evaluation.prefix import PrefixKV
from spectrumkv_sglang.kernels.quantisers.affine import round_zero
from spectrumkv_sglang.kernels.quantisers.base import round_scale


@dataclass(frozen=True)
class AffineKeysBaseline(LayerwiseBaseline):
    """Keys minus their channel's mean, over the channel's scale, then rounded like values: with a scale and a zero for
    each token and head. The channel's mean and scale are taken over the tokens of the chunk and sent in float16.

    Per-channel keys without blocks: what is large in a channel throughout is taken out once, and every row still
    decodes alone. What changes from token to token inside a channel stays, and rounding by row bears it.

    Args:
        bits: of keys and of values.
        by_deviation: whether a channel's scale is its standard deviation; else the largest distance from its mean, so
            that no channel reaches further than another.
    """

    bits: int
    by_deviation: bool

    @property
    def description(self) -> str:
        """One line for people."""
        scale = "standard deviation" if self.by_deviation else "largest distance from it"
        return f"{self.bits} bits per token, keys minus their channel's mean over its {scale}, both of the whole chunk"

    def keys(self, keys: torch.Tensor, prefix: PrefixKV, layer: int) -> torch.Tensor:
        """Per token and head, behind the affine map."""
        mean = round_zero(keys.mean(0, keepdim=True)).float()
        # About the mean that travels: what float16 rounds off a large mean is in the scale.
        centred = keys - mean
        deviation, reach = centred.square().mean(0, keepdim=True).sqrt(), centred.abs().amax(0, keepdim=True)
        scale, divisor = round_scale(deviation if self.by_deviation else reach)
        return affine_groups(centred / divisor, self.bits, 2, keys.shape[2]) * scale.float() + mean

    def values(self, values: torch.Tensor, prefix: PrefixKV, layer: int) -> torch.Tensor:
        """Per token and head."""
        return affine_groups(values, self.bits, 2, values.shape[2])

    def wire_bytes(self, prefix: PrefixKV) -> int:
        """Codes, scales and zeros of tokens, means and scales of channels."""
        geometry, tokens = prefix.geometry, prefix.tokens
        layer = codes_of_tokens(geometry, tokens, self.bits)
        layer += 2 * PARAM_BYTES * geometry.kv_heads * (2 * tokens + geometry.head_dim)
        return geometry.layers * layer
