"""Packing rows of the KV pool into a payload, and unpacking a payload into the pool.

On CPU one (layer, K|V) at a time is gathered into contiguous rows, grouped by tier, which keeps the work in cache and
leaves a few vectorised torch calls per segment. On CUDA each segment is one Triton launch on the current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.quantisers import quantiser_for
from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.layout import ARRAY_ALIGNMENT, PayloadLayout, Segment
from spectrumkv_sglang.payload.prologue import Prologue, decode_prologue, encode_prologue
from spectrumkv_sglang.payload.tier_map import check_tiers

Backend = Literal["torch", "triton"]


@dataclass(frozen=True)
class KVBuffers:
    """KV pool of one rank.

    Attributes:
        k: one tensor [pool slots, kv_heads, head_dim] per layer, elements of a head contiguous.
        v: one tensor [pool slots, kv_heads, v_head_dim] per layer, elements of a head contiguous.
    """

    k: Sequence[torch.Tensor]
    v: Sequence[torch.Tensor]
    _checked: list[KVGeometry] = field(default_factory=list, repr=False, compare=False)

    def of(self, layer: int, kv: int) -> torch.Tensor:
        """K (``kv=0``) or V (``kv=1``) buffer of a layer."""
        return self.v[layer] if kv else self.k[layer]

    @property
    def device(self) -> torch.device:
        """Device of the pool."""
        return self.k[0].device

    @property
    def pool_slots(self) -> int:
        """Token slots of the pool."""
        return self.k[0].shape[0]

    def check_geometry(self, geometry: KVGeometry) -> None:
        """Raise PayloadError unless every buffer has the geometry's shape and dtype and all share one device."""
        if geometry in self._checked:
            return
        if len(self.k) != geometry.layers or len(self.v) != geometry.layers:
            raise PayloadError(
                f"KV buffers: expected {geometry.layers} layers, got {len(self.k)} of K and {len(self.v)} of V"
            )
        dtype = getattr(torch, geometry.dtype)
        for name, kv, buffers in (("K", 0, self.k), ("V", 1, self.v)):
            shape = (self.pool_slots, geometry.kv_heads, geometry.dim_of(kv))
            for layer, buffer in enumerate(buffers):
                got = (tuple(buffer.shape), buffer.dtype, buffer.device, buffer.stride(-1))
                want = (shape, dtype, self.device, 1)
                if got != want:
                    raise PayloadError(
                        f"KV buffers: {name} of layer {layer}: expected shape, dtype, device, last stride {want}, "
                        f"got {got}"
                    )
        self._checked.append(geometry)


def pack_payload(
    buffers: KVBuffers,
    pool_slots: torch.Tensor,
    tiers: npt.NDArray[np.uint8],
    layout: PayloadLayout,
    out: torch.Tensor,
    backend: Backend | None = None,
) -> int:
    """Quantise rows of the pool into the body of a payload.

    Bytes 0 to 255 belong to the prologue (`write_prologue`) and stay as they are; padding is zeroed, so that the body
    is a function of the rows alone.

    Args:
        buffers: KV pool to read.
        pool_slots: int64 [rows], pool slot of each row in the order of the chunk; on CPU or on the pool's device.
        tiers: host uint8 [rows], tier of each row.
        layout: `plan_layout` of exactly these rows per tier.
        out: contiguous uint8 vector of at least ``layout.total_bytes`` at a 16-byte boundary, on the pool's device
            (or pinned host memory for a CUDA pool).
        backend: "torch" or "triton"; None takes Triton for a CUDA pool and torch otherwise.

    Returns:
        ``layout.total_bytes``.

    Raises:
        PayloadError: arguments do not fit each other; nothing is written then.
    """
    rows = _grouped_rows(buffers, pool_slots, tiers, layout)
    _check_memory(out, buffers)
    if out.numel() < layout.total_bytes:
        raise PayloadError(f"pack: expected room for {layout.total_bytes} bytes, got {out.numel()}")
    out[layout.prologue_bytes : layout.total_bytes].zero_()
    if _backend_for(buffers, backend) == "triton":
        from spectrumkv_sglang.kernels.triton_pack import pack_rows

        for segment in layout.segments:
            pool_rows = rows[segment.row_start : segment.row_start + segment.rows]
            codes, params = _arrays(out, segment)
            pack_rows(
                segment.precision, buffers.of(segment.layer, segment.kv), pool_rows, segment.head_lo, codes, params
            )
        return layout.total_bytes
    gathered = torch.empty(0)
    block = (-1, -1)
    for segment in layout.segments:
        if block != (segment.layer, segment.kv):
            block = (segment.layer, segment.kv)
            gathered = torch.index_select(buffers.of(*block), 0, rows)
        part = gathered[segment.row_start : segment.row_start + segment.rows, segment.head_lo : segment.head_hi]
        codes_out, params_out = _arrays(out, segment)
        if segment.precision is Precision.NATIVE:
            codes_out.view(part.dtype).copy_(part)
            continue
        codes, params = quantiser_for(segment.precision).quantise(part)
        codes_out.copy_(codes)
        params_out.copy_(params)
    return layout.total_bytes


def unpack_payload(
    payload: torch.Tensor,
    buffers: KVBuffers,
    pool_slots: torch.Tensor,
    tiers: npt.NDArray[np.uint8],
    layout: PayloadLayout,
    backend: Backend | None = None,
) -> None:
    """Dequantise the body of a payload into rows of the pool.

    Everything is checked before the first byte of the pool changes. The prologue and the checksum are the caller's to
    check (`read_prologue`, `payload_checksum`).

    Args:
        payload: contiguous uint8 vector of exactly ``layout.total_bytes`` at a 16-byte boundary, on the pool's device
            (or pinned host memory for a CUDA pool).
        buffers: KV pool to write.
        pool_slots: int64 [rows], distinct pool slots in the order of the chunk; on CPU or on the pool's device.
        tiers: host uint8 [rows], tier of each row.
        layout: `plan_layout` of exactly these rows per tier.
        backend: as for `pack_payload`.

    Raises:
        PayloadError: arguments do not fit each other; the pool is untouched then.
    """
    rows = _grouped_rows(buffers, pool_slots, tiers, layout)
    _check_memory(payload, buffers)
    if payload.numel() != layout.total_bytes:
        raise PayloadError(f"unpack: expected a payload of {layout.total_bytes} bytes, got {payload.numel()}")
    if _backend_for(buffers, backend) == "triton":
        from spectrumkv_sglang.kernels.triton_unpack import unpack_rows

        for segment in layout.segments:
            pool_rows = rows[segment.row_start : segment.row_start + segment.rows]
            codes, params = _arrays(payload, segment)
            unpack_rows(
                segment.precision, codes, params, buffers.of(segment.layer, segment.kv), pool_rows, segment.head_lo
            )
        return
    geometry = layout.geometry
    dtype = getattr(torch, geometry.dtype)
    gathered = [
        torch.empty((layout.rows, geometry.kv_heads, geometry.dim_of(kv)), dtype=dtype, device=buffers.device)
        for kv in (0, 1)
    ]
    last = len(layout.segments) - 1
    for index, segment in enumerate(layout.segments):
        codes, params = _arrays(payload, segment)
        part = quantiser_for(segment.precision).dequantise(codes, params, dtype)
        block = gathered[segment.kv]
        block[segment.row_start : segment.row_start + segment.rows, segment.head_lo : segment.head_hi] = part
        following = layout.segments[index + 1] if index < last else None
        if following is None or (following.layer, following.kv) != (segment.layer, segment.kv):
            buffers.of(segment.layer, segment.kv).index_copy_(0, rows, block)


def write_prologue(out: torch.Tensor, prologue: Prologue) -> None:
    """Write the prologue into the first 256 bytes of a uint8 vector on any device."""
    encoded = torch.frombuffer(bytearray(encode_prologue(prologue)), dtype=torch.uint8)
    if out.numel() < encoded.numel():
        raise PayloadError(f"payload prologue: expected room for {encoded.numel()} bytes, got {out.numel()}")
    out[: encoded.numel()].copy_(encoded)


def read_prologue(payload: torch.Tensor, prologue_bytes: int = 256) -> Prologue:
    """Read the prologue of a payload on any device.

    Raises:
        PayloadError: as `decode_prologue`.
    """
    return decode_prologue(payload[:prologue_bytes].cpu().numpy().tobytes())


def _grouped_rows(
    buffers: KVBuffers, pool_slots: torch.Tensor, tiers: npt.NDArray[np.uint8], layout: PayloadLayout
) -> torch.Tensor:
    """Pool slot of each row, grouped by tier in stable order, on the pool's device."""
    buffers.check_geometry(layout.geometry)
    check_tiers(tiers, layout.table.tiers)
    counts = tuple(np.bincount(tiers, minlength=layout.table.tiers).tolist())
    if counts != layout.rows_per_tier:
        raise PayloadError(f"payload rows: the layout expects {layout.rows_per_tier} rows per tier, got {counts}")
    if pool_slots.dtype != torch.int64 or pool_slots.dim() != 1 or pool_slots.numel() != tiers.size:
        raise PayloadError(
            f"payload rows: expected int64 pool slots of {tiers.size} rows, "
            f"got {pool_slots.dtype} {tuple(pool_slots.shape)}"
        )
    if pool_slots.numel():
        low, high = (int(end) for end in torch.aminmax(pool_slots))
        if low < 0 or high >= buffers.pool_slots:
            raise PayloadError(f"payload rows: expected pool slots 0 to {buffers.pool_slots - 1}, got {low} to {high}")
    order = torch.from_numpy(np.argsort(tiers, kind="stable"))
    return pool_slots[order.to(pool_slots.device)].to(buffers.device)


def _arrays(payload: torch.Tensor, segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [rows, heads, c] and parameters float16 [rows, heads, p] of a segment, as views of the payload."""
    shape = (segment.rows, segment.heads, -1)
    codes = payload[segment.codes_offset : segment.codes_offset + segment.codes_bytes].view(shape)
    params = payload[segment.params_offset : segment.params_offset + segment.params_bytes].view(torch.float16)
    return codes, params.view(segment.rows, segment.heads, params.numel() // (segment.rows * segment.heads))


def _check_memory(payload: torch.Tensor, buffers: KVBuffers) -> None:
    if payload.dtype != torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
        raise PayloadError(
            f"payload memory: expected a contiguous uint8 vector, got {payload.dtype} {tuple(payload.shape)}"
        )
    if payload.data_ptr() % ARRAY_ALIGNMENT or payload.storage_offset() % ARRAY_ALIGNMENT:
        raise PayloadError(f"payload memory: expected an address and a storage offset divisible by {ARRAY_ALIGNMENT}")
    if payload.device != buffers.device and not (buffers.device.type == "cuda" and payload.is_pinned()):
        raise PayloadError(
            f"payload memory: expected device {buffers.device} (or pinned host memory for CUDA), got {payload.device}"
        )


def _backend_for(buffers: KVBuffers, backend: Backend | None) -> Backend:
    if backend is None:
        return "triton" if buffers.device.type == "cuda" else "torch"
    if backend not in ("torch", "triton"):
        raise PayloadError(f'payload backend: expected "torch" or "triton", got {backend!r}')
    return backend
