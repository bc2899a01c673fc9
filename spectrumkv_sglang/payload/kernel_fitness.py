"""Which cells of a precision table there are kernels for, and whether they agree with the reference on this GPU."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.segment_group import unfit_cell
from spectrumkv_sglang.payload.precision_table import PrecisionTable


@lru_cache(maxsize=64)
def cells_without_kernels(table: PrecisionTable, head_dim: int, v_head_dim: int) -> str:
    """What there are no kernels for, of payloads of a table with keys and values of these elements a head, or ''."""
    cells = sorted(
        {
            (kv, Precision(int(value)), table.transform(layer, kv))
            for layer in range(table.layers)
            for kv in (0, 1)
            for value in np.unique(table.values[:, layer, kv])
        }
    )
    dims = (head_dim, v_head_dim)
    named = [unfit_cell(precision, transform, dims[kv]) for kv, precision, transform in cells]
    return ", ".join(dict.fromkeys(name for name in named if name is not None))


def distinct_layers(table: PrecisionTable) -> PrecisionTable:
    """The table of one layer of each kind: what all layers of ``table`` are coded by, over as few as possible."""
    kinds = {
        (table.values[:, layer].tobytes(), table.transforms[layer].tobytes()): layer for layer in range(table.layers)
    }
    chosen = sorted(kinds.values())
    return PrecisionTable(table.values[:, chosen].copy(), table.transforms[chosen].copy())


def farthest(decoded: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference between rows [rows, heads, dim], as a share of the largest element of each (row, head)."""
    size = expected.float().abs().amax(-1).clamp_min(1e-30)
    return float(((decoded.float() - expected.float()).abs().amax(-1) / size).max())


def noise(decoded: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference over that of ``expected``."""
    difference = (decoded.float() - expected.float()).square().mean().sqrt()
    return float(difference / expected.float().square().mean().sqrt().clamp_min(1e-30))
