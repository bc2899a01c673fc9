"""Expected error of each tier: what the budget trades against bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.quantisers import quantiser_for
from spectrumkv_sglang.payload.precision_table import PrecisionTable


def tier_distortion(table: PrecisionTable) -> NDArray[np.float64]:
    """Expected squared error relative to the variance, float64 ``[tiers]``, mean over layers, K|V and KV heads.

    Each quantiser states its own ``relative_distortion``. A key cell and a value cell weigh the same.
    """
    per_precision = np.zeros(max(Precision) + 1, dtype=np.float64)
    for precision in Precision:
        per_precision[precision] = quantiser_for(precision).relative_distortion
    cells = per_precision[table.values]
    return cells.reshape(len(cells), -1).mean(axis=1)
