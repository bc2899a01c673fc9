"""Expected error of each tier: what the budget trades against bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.quantisers import quantiser_for
from spectrumkv_sglang.kernels.transforms import Transform, transform_for
from spectrumkv_sglang.payload.precision_table import PrecisionTable


def tier_distortion(table: PrecisionTable) -> NDArray[np.float64]:
    """Expected squared error relative to the variance, float64 ``[tiers]``, mean over layers, K|V and KV heads.

    Each quantiser states its own ``distortion``. A key cell and a value cell weigh the same.
    """
    total = np.zeros(table.tiers, dtype=np.float64)
    for transform in Transform:
        per_precision = np.zeros(max(Precision) + 1, dtype=np.float64)
        for precision in Precision:
            per_precision[precision] = quantiser_for(precision).distortion(transform_for(transform).near_normal)
        of_transform = per_precision[table.values] * (table.transforms == transform)[None, :, :, None]
        total += of_transform.reshape(table.tiers, -1).sum(axis=1)
    return total / table.values[0].size
