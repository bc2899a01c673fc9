"""A look, before the kernels of a precision table are used, whether they compute what the torch reference does.

Kernels that keep heads in the registers of a warp rely on how Triton lays tensors out, which another release may
change: they would go on, and the KV would be wrong. So a table's kernels pack and unpack some random rows first, once a
process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch

from spectrumkv_sglang.kernels.precision import CHANNEL_BLOCK_ROWS
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.kv_buffers import KVBuffers
from spectrumkv_sglang.payload.layout import PayloadLayout, plan_layout
from spectrumkv_sglang.payload.precision_table import PrecisionTable

ROWS_PER_TIER = CHANNEL_BLOCK_ROWS + 37
MOST_OF_A_ROW = 2.0**-6
"""Most that an unpacked element may differ, of its row's largest: several roundings of bfloat16."""
MOST_NOISE = 0.25
"""Most that what was packed may differ. Behind a transform some codes are the neighbours of the reference's, which
makes .07 with two bits; wrong places make 1.4."""

Pack = Callable[[KVBuffers, torch.Tensor, "np.ndarray", PayloadLayout, torch.Tensor, str], object]
Unpack = Callable[[torch.Tensor, KVBuffers, torch.Tensor, "np.ndarray", PayloadLayout, str], object]


@lru_cache(maxsize=64)
def disagreement(
    table: PrecisionTable, geometry: KVGeometry, device: torch.device, pack: Pack, unpack: Unpack
) -> str | None:
    """How the kernels of a table differ from the reference, or None if they do not. What stops the comparison is a
    difference, too, and is remembered like one.

    Args:
        table: whose kernels.
        geometry: of the pool: heads, dimensions and dtype count.
        device: a GPU.
        pack, unpack: the codec's; the last argument is the backend.
    """
    try:
        return _difference(table, geometry, device, pack, unpack)
    except Exception as error:  # noqa: BLE001 (out of memory, no Triton, no compiler: torch takes over)
        return f"they could not be tried: {type(error).__name__}: {str(error)[:200]}"


def _difference(
    table: PrecisionTable, geometry: KVGeometry, device: torch.device, pack: Pack, unpack: Unpack
) -> str | None:
    small = _distinct_layers(table)
    shape = replace(geometry, layers=small.layers, page_size=1)
    tiers = np.repeat(np.arange(small.tiers, dtype=np.uint8), ROWS_PER_TIER)
    layout = plan_layout(shape, small, np.bincount(tiers, minlength=small.tiers).tolist())
    source = _random_pool(shape, tiers.size, device)
    slots = torch.arange(tiers.size)
    payloads = {}
    decoded = {}
    for packed_by in ("torch", "triton"):
        payload = payloads[packed_by] = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=device)
        pack(source, slots, tiers, layout, payload, packed_by)
        for unpacked_by in ("torch", "triton"):
            target = KVBuffers([torch.zeros_like(k) for k in source.k], [torch.zeros_like(v) for v in source.v])
            unpack(payload, target, slots, tiers, layout, unpacked_by)
            decoded[packed_by, unpacked_by] = [*target.k, *target.v]
    for packed_by in payloads:
        pairs = zip(decoded[packed_by, "triton"], decoded[packed_by, "torch"], strict=True)
        worst = _worst([_farthest(ours, theirs) for ours, theirs in pairs])
        if worst > MOST_OF_A_ROW:
            return f"unpacked elements are off by {worst:.2g} of their row's largest (expected {MOST_OF_A_ROW:.2g})"
    pairs = zip(decoded["triton", "torch"], decoded["torch", "torch"], strict=True)
    worst = _worst([_noise(ours, theirs) for ours, theirs in pairs])
    if worst > MOST_NOISE:
        return f"what was packed differs by {worst:.2g} of its size (expected {MOST_NOISE:.2g})"
    return None


def _distinct_layers(table: PrecisionTable) -> PrecisionTable:
    """The table of one layer of each kind: what all layers of ``table`` are coded by, over as few as possible."""
    kinds = {
        (table.values[:, layer].tobytes(), table.transforms[layer].tobytes()): layer for layer in range(table.layers)
    }
    chosen = sorted(kinds.values())
    return PrecisionTable(table.values[:, chosen].copy(), table.transforms[chosen].copy())


def _farthest(decoded: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference between rows [rows, heads, dim], as a share of the largest element of each (row, head)."""
    size = expected.float().abs().amax(-1).clamp_min(1e-30)
    return float(((decoded.float() - expected.float()).abs().amax(-1) / size).max())


def _noise(decoded: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference over that of ``expected``."""
    difference = (decoded.float() - expected.float()).square().mean().sqrt()
    return float(difference / expected.float().square().mean().sqrt().clamp_min(1e-30))


def _worst(differences: list[float]) -> float:
    """The largest; infinite if one of them is no number."""
    return math.inf if any(math.isnan(difference) for difference in differences) else max(differences)


def _random_pool(geometry: KVGeometry, rows: int, device: torch.device) -> KVBuffers:
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, geometry.dtype)

    def buffer(dim: int) -> torch.Tensor:
        spread = torch.rand(geometry.kv_heads, dim, generator=generator) * 3 + 0.1
        return (torch.randn(rows, geometry.kv_heads, dim, generator=generator) * spread).to(device, dtype)

    return KVBuffers(
        [buffer(geometry.head_dim) for _ in range(geometry.layers)],
        [buffer(geometry.v_head_dim) for _ in range(geometry.layers)],
    )
