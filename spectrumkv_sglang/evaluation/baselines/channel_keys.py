"""Keys per channel before the rotary embedding, as KVQuant (arXiv 2401.18079) has them, or after it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spectrumkv_sglang.evaluation.baselines.base import LayerwiseBaseline
from spectrumkv_sglang.evaluation.baselines.rounding import PARAM_BYTES, affine_groups, codes_of_tokens, groups_of
from spectrumkv_sglang.evaluation.errors import EvaluationError
from spectrumkv_sglang.evaluation.prefix import PrefixKV
from spectrumkv_sglang.kernels.transforms.derope import rotate, rotate_back

BLOCK = 128


@dataclass(frozen=True)
class ChannelKeysBaseline(LayerwiseBaseline):
    """Keys with a float16 scale and zero for each channel of 128 tokens, values for each token and head.

    With ``before_rotation`` keys are turned back by the model's own rotary embedding first and turned again on arrival,
    because outlier channels hold still before it. KVQuant's calibrated levels and its sparse outliers are left out, and
    its scales, which calibration fixes, are computed and sent: its idea at the rates of a transfer, not its software.

    Args:
        bits: of keys and of values.
        before_rotation: False: keys as they are in the pool, the control.
    """

    bits: int
    before_rotation: bool

    @property
    def description(self) -> str:
        """One line for people."""
        where = "before" if self.before_rotation else "after"
        return f"{self.bits} bits, keys per channel of {BLOCK} tokens {where} the rotary embedding, values per token"

    def keys(self, keys: torch.Tensor, prefix: PrefixKV, layer: int) -> torch.Tensor:
        """Blocks of 128 tokens, per channel."""
        if not self.before_rotation:
            return affine_groups(keys, self.bits, 0, BLOCK)
        if prefix.rotation is None:
            raise EvaluationError(
                "how this model rotates its keys is not known, so they cannot be turned back: leave baselines named "
                "kvquant-* out"
            )
        cos, sin = prefix.rotation.layers[layer]
        return rotate(affine_groups(rotate_back(keys, cos, sin), self.bits, 0, BLOCK), cos, sin)

    def values(self, values: torch.Tensor, prefix: PrefixKV, layer: int) -> torch.Tensor:
        """Per token and head."""
        return affine_groups(values, self.bits, 2, values.shape[2])

    def wire_bytes(self, prefix: PrefixKV) -> int:
        """Codes, scales and zeros."""
        geometry, tokens = prefix.geometry, prefix.tokens
        layer = codes_of_tokens(geometry, tokens, self.bits)
        layer += 2 * PARAM_BYTES * geometry.kv_heads * (groups_of(tokens, BLOCK) * geometry.head_dim + tokens)
        return geometry.layers * layer
