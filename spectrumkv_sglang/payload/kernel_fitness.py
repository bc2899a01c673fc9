"""Which cells of a precision table the kernels can encode, and which they have proved on a GPU that they can."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.segment_group import unfit_cell, unproven_cell
from spectrumkv_sglang.payload.precision_table import PrecisionTable


class KernelFitness(NamedTuple):
    """What speaks against the kernels; empty if nothing does.

    Attributes:
        without: what there are no kernels for.
        unproven: what has kernels that have not run on a GPU.
    """

    without: str
    unproven: str


@lru_cache(maxsize=64)
def kernel_fitness(table: PrecisionTable, head_dim: int, v_head_dim: int) -> KernelFitness:
    """How fit the kernels are for payloads of a table, with keys and values of these elements a head."""
    cells = sorted(
        {
            (kv, Precision(int(value)), table.transform(layer, kv))
            for layer in range(table.layers)
            for kv in (0, 1)
            for value in np.unique(table.values[:, layer, kv])
        }
    )
    dims = (head_dim, v_head_dim)
    without = [unfit_cell(precision, transform, dims[kv]) for kv, precision, transform in cells]
    unproven = [unproven_cell(precision, transform) for _, precision, transform in cells]
    return KernelFitness(_listed(without), _listed(unproven))


def _listed(names: list[str | None]) -> str:
    return ", ".join(dict.fromkeys(name for name in names if name is not None))
