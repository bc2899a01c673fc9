"""The KV of a prefix with some cells rounded as if they had travelled."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spectrumkv_sglang.calibration.errors import CalibrationError
from spectrumkv_sglang.evaluation.prefix import PrefixKV
from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.row_coding import decode_rows, encode_rows
from spectrumkv_sglang.kernels.transforms import Transform
from spectrumkv_sglang.payload.kv_buffers import KVBuffers


@dataclass(frozen=True)
class RoundedCells:
    """Which keys or values are rounded, and how.

    Attributes:
        kv: 0 for keys, 1 for values.
        precision: of the rounding.
        transform: before and after it.
        layer: of the cells; None for all.
        head: KV head of the cells; None for all.
    """

    kv: int
    precision: Precision
    transform: Transform
    layer: int | None = None
    head: int | None = None


def round_cells(prefix: PrefixKV, cells: RoundedCells, sink_tokens: int) -> KVBuffers:
    """KV of the prefix after the cells' rows but the first ``sink_tokens`` went through quantiser and transform.

    Tensors that are not rounded are shared with the prefix, those that are are copies.

    Raises:
        CalibrationError: keys are to be rotated back, and the model's rotation is not known.
    """
    buffers = prefix.view.buffers
    parts = [list(buffers.k), list(buffers.v)]
    part = parts[cells.kv]
    for layer in range(len(part)) if cells.layer is None else [cells.layer]:
        rounded = part[layer].clone()
        heads = slice(None) if cells.head is None else slice(cells.head, cells.head + 1)
        rounded[sink_tokens:, heads] = _rounded(part[layer][sink_tokens:, heads], cells, prefix, layer, sink_tokens)
        part[layer] = rounded
    return KVBuffers(k=parts[0], v=parts[1])


def _rounded(x: torch.Tensor, cells: RoundedCells, prefix: PrefixKV, layer: int, first_row: int) -> torch.Tensor:
    """``x`` [rows, heads, dim] as decode would get it."""
    if cells.precision is Precision.NATIVE:
        return x
    angles = None
    if cells.transform is Transform.DEROPE:
        if prefix.rotation is None:
            raise CalibrationError(
                "--key-transform derope: this model's rotary embedding is not known to turn halves of a head; give "
                "identity"
            )
        angles = prefix.rotation.at(first_row, len(x)).of(layer, 0, len(x))
    codes, params = encode_rows(x, cells.precision, cells.transform, angles)
    return decode_rows(codes, params, x.dtype, cells.precision, cells.transform, angles)
