"""Packing and unpacking by torch, on any device: the reference, and what the CPU uses.

One (layer, K|V) at a time is gathered into contiguous rows, grouped by tier, which keeps the work in cache and leaves a
few vectorised torch calls per segment.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.quantisers import quantiser_for
from spectrumkv_sglang.kernels.row_coding import decode_rows, encode_rows
from spectrumkv_sglang.kernels.transforms import Angles, Transform
from spectrumkv_sglang.payload.key_rotation import RotatedRows
from spectrumkv_sglang.payload.kv_buffers import KVBuffers
from spectrumkv_sglang.payload.layout import PayloadLayout, Segment


def pack_by_torch(
    buffers: KVBuffers,
    rows: npt.NDArray[np.int64],
    layout: PayloadLayout,
    out: torch.Tensor,
    rotated: RotatedRows | None = None,
) -> None:
    """Write the body of the payload of ``rows`` (int64, grouped by tier, all valid) to ``out``, padding zeroed.

    ``rotated`` has the same order, and is there if the table asks for it.
    """
    out[layout.prologue_bytes : layout.total_bytes].zero_()
    index = torch.from_numpy(rows).to(buffers.device)
    gathered = torch.empty(0)
    block = (-1, -1)
    for segment in layout.segments:
        if block != (segment.layer, segment.kv):
            block = (segment.layer, segment.kv)
            gathered = torch.index_select(buffers.of(*block), 0, index)
        part = gathered[segment.row_start : segment.row_start + segment.rows, segment.head_lo : segment.head_hi]
        codes_out, params_out = _arrays(out, segment, part.shape[2])
        if segment.precision is Precision.NATIVE:
            codes_out.view(part.dtype).copy_(part)
            continue
        transform = layout.table.transform(segment.layer, segment.kv)
        codes, params = encode_rows(part, segment.precision, transform, _angles(segment, transform, rotated))
        codes_out.copy_(codes)
        params_out.copy_(params)


def unpack_by_torch(
    payload: torch.Tensor,
    buffers: KVBuffers,
    rows: npt.NDArray[np.int64],
    layout: PayloadLayout,
    rotated: RotatedRows | None = None,
) -> None:
    """Write the body of a payload to ``rows`` (int64, grouped by tier, all valid and distinct) of the pool.

    ``rotated`` as for `pack_by_torch`.
    """
    geometry = layout.geometry
    dtype = getattr(torch, geometry.dtype)
    index = torch.from_numpy(rows).to(buffers.device)
    gathered = [
        torch.empty((layout.rows, geometry.kv_heads, geometry.dim_of(kv)), dtype=dtype, device=buffers.device)
        for kv in (0, 1)
    ]
    last = len(layout.segments) - 1
    for number, segment in enumerate(layout.segments):
        codes, params = _arrays(payload, segment, geometry.dim_of(segment.kv))
        transform = layout.table.transform(segment.layer, segment.kv)
        angles = _angles(segment, transform, rotated)
        part = decode_rows(codes, params, dtype, segment.precision, transform, angles)
        block = gathered[segment.kv]
        block[segment.row_start : segment.row_start + segment.rows, segment.head_lo : segment.head_hi] = part
        following = layout.segments[number + 1] if number < last else None
        if following is None or (following.layer, following.kv) != (segment.layer, segment.kv):
            buffers.of(segment.layer, segment.kv).index_copy_(0, index, block)


def _angles(segment: Segment, transform: Transform, rotated: RotatedRows | None) -> Angles | None:
    if rotated is None or transform is not Transform.DEROPE:
        return None
    return rotated.of(segment.layer, segment.row_start, segment.row_start + segment.rows)


def _arrays(payload: torch.Tensor, segment: Segment, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [rows, heads, c] and float16 parameters of a segment, as views of the payload."""
    codes = payload[segment.codes_offset : segment.codes_offset + segment.codes_bytes]
    params = payload[segment.params_offset : segment.params_offset + segment.params_bytes].view(torch.float16)
    param_shape = quantiser_for(segment.precision).param_shape(segment.rows, segment.heads, head_dim)
    return codes.view(segment.rows, segment.heads, -1), params.view(param_shape)
