"""What the kernel benchmark runs on: model geometries, profiles with their mixes of tiers, and pools on the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.transforms import Transform
from spectrumkv_sglang.payload.codec import KVBuffers
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.layout import PayloadLayout, plan_layout
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.profiles.profile import load_profile

NATIVE, INT8, FP8, INT4 = Precision.NATIVE, Precision.INT8, Precision.FP8_E4M3, Precision.INT4

MODELS = {
    "Llama-3.1-8B": (32, 8, 128),
    "Qwen2.5-7B": (28, 4, 128),
    "Qwen2.5-32B": (64, 8, 128),
}
"""Layers, KV heads and head dimension."""


@dataclass(frozen=True)
class Mix:
    """A profile and how many of the tokens go to each of its tiers.

    Attributes:
        precisions: keys' and values' precision of each tier.
        shares: share of the tokens of each tier; their sum is 1.
        transforms: what keys and values go through before they are quantised.
    """

    precisions: tuple[tuple[Precision, Precision], ...]
    shares: tuple[float, ...]
    transforms: tuple[Transform, Transform] = (Transform.IDENTITY, Transform.IDENTITY)


def shipped_mix(name: str, *shares: float) -> Mix:
    """The tiers of a shipped profile, one precision for all layers, with these shares of the tokens."""
    table = load_profile(name).table(geometry_of("Llama-3.1-8B", 1))
    cells = table.values[:, 0, :, 0]
    transforms = (table.transform(0, 0), table.transform(0, 1))
    return Mix(tuple((Precision(int(k)), Precision(int(v))) for k, v in cells), shares, transforms)


@dataclass(frozen=True)
class Chunk:
    """Tokens on pages in random order, and where they go."""

    buffers: KVBuffers
    slots: torch.Tensor
    tiers: np.ndarray
    layout: PayloadLayout

    @property
    def pool_bytes(self) -> int:
        """Bytes of the chunk's rows in the pool."""
        return self.layout.rows * self.layout.geometry.native_bytes_per_token


def geometry_of(model: str, page_size: int) -> KVGeometry:
    """bfloat16 KV of a model on one rank."""
    layers, heads, dim = MODELS[model]
    return KVGeometry(layers, heads, dim, dim, page_size, "bfloat16")


def make_pool(geometry: KVGeometry, slots: int, device: torch.device) -> KVBuffers:
    """Random normal K and V with a spread of their own for each channel, as models have."""
    generator = torch.Generator(device).manual_seed(0)

    def buffer(dim: int) -> torch.Tensor:
        spread = torch.rand(geometry.kv_heads, dim, generator=generator, device=device) * 3 + 0.1
        x = torch.randn(slots, geometry.kv_heads, dim, generator=generator, device=device)
        return (x * spread).bfloat16()

    return KVBuffers(
        [buffer(geometry.head_dim) for _ in range(geometry.layers)],
        [buffer(geometry.v_head_dim) for _ in range(geometry.layers)],
    )


def make_chunk(buffers: KVBuffers, geometry: KVGeometry, mix: Mix, tokens: int) -> Chunk:
    """``tokens`` tokens on pages in random order, tiers in random order."""
    numbers = np.random.default_rng(1)
    pages = numbers.permutation(buffers.pool_slots // geometry.page_size)[: tokens // geometry.page_size]
    slots = (pages[:, None] * geometry.page_size + np.arange(geometry.page_size)).reshape(-1)
    bounds = np.round(np.cumsum(mix.shares) * tokens).astype(int)
    tiers = np.searchsorted(bounds, np.arange(tokens), side="right").astype(np.uint8)
    numbers.shuffle(tiers)
    cells = np.array(mix.precisions, dtype=np.uint8)[:, None, :, None]
    shape = (len(mix.precisions), geometry.layers, 2, geometry.kv_heads)
    transforms = np.broadcast_to(np.array(mix.transforms, dtype=np.uint8), (geometry.layers, 2))
    table = PrecisionTable(np.broadcast_to(cells, shape).copy(), transforms.copy())
    layout = plan_layout(geometry, table, np.bincount(tiers, minlength=table.tiers).tolist())
    return Chunk(buffers, torch.from_numpy(slots), tiers, layout)


_SPECTRUM = ((NATIVE, NATIVE), (INT8, INT8), (INT4, INT4))
MIXES = {
    "native-packed": Mix(((NATIVE, NATIVE),), (1.0,)),
    "int8": Mix(((INT8, INT8),), (1.0,)),
    "fp8": Mix(((FP8, FP8),), (1.0,)),
    "int4": Mix(((INT4, INT4),), (1.0,)),
    "k8v4": Mix(((INT8, INT4),), (1.0,)),
    "spectrum 20/30/50": Mix(_SPECTRUM, (0.2, 0.3, 0.5)),
    "spectrum 5/25/70": Mix(_SPECTRUM, (0.05, 0.25, 0.7)),
    "spectrum 1/2/97": Mix(_SPECTRUM, (0.01, 0.02, 0.97)),
    "near-lossless 8/0/92": shipped_mix("near-lossless", 0.08, 0.0, 0.92),
    "balanced 1/11/88": shipped_mix("balanced", 0.01, 0.11, 0.88),
    "aggressive 1/17/82": shipped_mix("aggressive", 0.01, 0.17, 0.82),
}
"""Shipped profiles: the mixes of `spectrum-paper` spend about b = .49, .36 and .28, those of the others what they are
made for, .5, .3 and .2."""
