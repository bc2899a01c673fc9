"""Precisions under 8 bits: what a model must have been probed for."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.quantisers import quantiser_for
from spectrumkv_sglang.payload.precision_table import PrecisionTable

_HEAD_DIM = 128
_NATIVE_BYTES = 2


def is_narrow(precision: Precision) -> bool:
    """Whether an element's code takes less than 8 bits."""
    return quantiser_for(precision).code_bytes(1, 1, _HEAD_DIM, _NATIVE_BYTES) < _HEAD_DIM


def narrow_precisions(table: PrecisionTable, tiers: Iterable[int]) -> list[Precision]:
    """Precisions under 8 bits that rows of ``tiers`` travel in, ascending; tiers beyond the table have none."""
    held = [table.values[tier] for tier in tiers if tier < table.tiers]
    found = {Precision(int(value)) for cells in held for value in np.unique(cells)}
    return sorted(precision for precision in found if is_narrow(precision))
