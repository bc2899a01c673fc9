"""Which cells of a precision table there are kernels for."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

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
