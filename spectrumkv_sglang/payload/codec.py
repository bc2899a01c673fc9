"""Packing rows of the KV pool into a payload, and unpacking a payload into the pool.

Arguments are checked here, on the host; the work is done by torch on the CPU (`torch_codec`) and by a few Triton
launches on the current stream on CUDA (`device_codec`). Pools and precisions that the kernels do not take (head
dimensions that 16 does not divide, say) go the way of the CPU there.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from spectrumkv_sglang.kernels.checksum import payload_checksum
from spectrumkv_sglang.payload.device_codec import UnpackOutcome
from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.exchange import Pending
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.kernel_check import disagreement
from spectrumkv_sglang.payload.kernel_fitness import cells_without_kernels
from spectrumkv_sglang.payload.key_rotation import RotatedRows
from spectrumkv_sglang.payload.kv_buffers import KVBuffers
from spectrumkv_sglang.payload.layout import ARRAY_ALIGNMENT, PayloadLayout, plan_layout
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.payload.prologue import Prologue, decode_prologue, encode_prologue
from spectrumkv_sglang.payload.tier_map import check_tiers
from spectrumkv_sglang.payload.torch_codec import pack_by_torch, unpack_by_torch

Backend = Literal["torch", "triton"]

__all__ = [
    "Backend",
    "KVBuffers",
    "pack_payload",
    "pack_with_checksum",
    "read_prologue",
    "unpack_if_intact",
    "unpack_payload",
    "warm_up_kernels",
    "why_not_kernels",
    "write_prologue",
]


def pack_payload(
    buffers: KVBuffers,
    pool_slots: torch.Tensor,
    tiers: npt.NDArray[np.uint8],
    layout: PayloadLayout,
    out: torch.Tensor,
    backend: Backend | None = None,
    rotated: RotatedRows | None = None,
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
        backend: "torch" or "triton"; None takes Triton for a CUDA pool and a table that the kernels can work on, torch
            otherwise.
        rotated: angles of the rows' keys, in the order of the chunk, for a table that rotates keys back.

    Returns:
        ``layout.total_bytes``.

    Raises:
        PayloadError: arguments do not fit each other; nothing is written then.
    """
    rows = _checked_for_packing(buffers, pool_slots, tiers, layout, out)
    grouped = _grouped_rotation(rotated, tiers, layout)
    if _backend_for(buffers, layout.table, backend) == "triton":
        buffers.device_codec.pack(rows, layout, out)
    else:
        pack_by_torch(buffers, rows, layout, out, grouped)
    return layout.total_bytes


def pack_with_checksum(
    buffers: KVBuffers,
    pool_slots: torch.Tensor,
    tiers: npt.NDArray[np.uint8],
    layout: PayloadLayout,
    out: torch.Tensor,
    prologue: Prologue,
    backend: Backend | None = None,
    rotated: RotatedRows | None = None,
) -> Pending[int]:
    """`pack_payload`, `write_prologue` and `payload_checksum` in one; on CUDA one pass, queued on the current stream.

    With ``pool_slots`` on the CPU the host does not wait for the GPU.

    Returns:
        The checksum of the whole payload, prologue included. Waiting for it is waiting for the payload.

    Raises:
        PayloadError: as `pack_payload` and `encode_prologue`; nothing is written then.
    """
    rows = _checked_for_packing(buffers, pool_slots, tiers, layout, out)
    grouped = _grouped_rotation(rotated, tiers, layout)
    encode_prologue(prologue)
    if _backend_for(buffers, layout.table, backend) == "triton":
        return buffers.device_codec.pack(rows, layout, out, prologue)
    pack_by_torch(buffers, rows, layout, out, grouped)
    write_prologue(out, prologue)
    checksum = payload_checksum(out[: layout.total_bytes])
    return Pending(lambda: checksum)


def unpack_payload(
    payload: torch.Tensor,
    buffers: KVBuffers,
    pool_slots: torch.Tensor,
    tiers: npt.NDArray[np.uint8],
    layout: PayloadLayout,
    backend: Backend | None = None,
    rotated: RotatedRows | None = None,
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
        rotated: as for `pack_payload`.

    Raises:
        PayloadError: arguments do not fit each other; the pool is untouched then.
    """
    rows = _checked_for_unpacking(payload, buffers, pool_slots, tiers, layout)
    grouped = _grouped_rotation(rotated, tiers, layout)
    if _backend_for(buffers, layout.table, backend) == "triton":
        buffers.device_codec.unpack(payload, rows, layout)
    else:
        unpack_by_torch(payload, buffers, rows, layout, grouped)


def unpack_if_intact(
    payload: torch.Tensor,
    buffers: KVBuffers,
    pool_slots: torch.Tensor,
    tiers: npt.NDArray[np.uint8],
    layout: PayloadLayout,
    checksum: int,
    prologue: Prologue | None = None,
    backend: Backend | None = None,
    rotated: RotatedRows | None = None,
) -> Pending[UnpackOutcome]:
    """`unpack_payload` of a payload whose checksum and prologue are the announced ones; otherwise nothing is written.

    On CUDA everything is queued on the current stream, the comparison included, and with ``pool_slots`` on the CPU the
    host does not wait for the GPU.

    Args:
        payload: as for `unpack_payload`.
        buffers: KV pool to write.
        pool_slots: as for `unpack_payload`.
        tiers: as for `unpack_payload`.
        layout: as for `unpack_payload`.
        checksum: announced `payload_checksum`.
        prologue: announced prologue; None to leave it unchecked.
        backend: as for `pack_payload`.
        rotated: as for `pack_payload`.

    Raises:
        PayloadError: as `unpack_payload`; the pool is untouched then.
    """
    rows = _checked_for_unpacking(payload, buffers, pool_slots, tiers, layout)
    grouped = _grouped_rotation(rotated, tiers, layout)
    announced = None if prologue is None else encode_prologue(prologue)
    if _backend_for(buffers, layout.table, backend) == "triton":
        return buffers.device_codec.unpack(payload, rows, layout, checksum, prologue)
    found = payload_checksum(payload)
    fits = announced is None or payload[: len(announced)].cpu().numpy().tobytes() == announced
    outcome = UnpackOutcome(found, found == checksum, fits)
    if outcome.written:
        unpack_by_torch(payload, buffers, rows, layout, grouped)
        if buffers.device.type == "cuda":  # a pool or a precision that the kernels do not take
            torch.cuda.current_stream(buffers.device).synchronize()
    return Pending(lambda: outcome)


def warm_up_kernels(buffers: KVBuffers, geometry: KVGeometry, table: PrecisionTable) -> None:
    """Compile every kernel that payloads of ``table`` need, so that no request waits for it. The pool is not written.

    Packs one row of each tier into a scratch payload and has it refused by the unpacking side. Does nothing for a pool
    that the kernels do not run on.

    Raises:
        PayloadError: buffers or table do not belong to the geometry.
    """
    buffers.check_geometry(geometry)
    if _backend_for(buffers, table, None) != "triton":
        return
    layout = plan_layout(geometry, table, [1] * table.tiers)
    scratch = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=buffers.device)
    slots, tiers = torch.zeros(table.tiers, dtype=torch.int64), np.arange(table.tiers, dtype=np.uint8)
    prologue = Prologue(0, 0, 0, 0, layout.rows_per_tier, layout.total_bytes, geometry.digest(), table.digest())
    checksum = pack_with_checksum(buffers, slots, tiers, layout, scratch, prologue).wait()
    unpack_if_intact(scratch, buffers, slots, tiers, layout, checksum ^ 1, prologue).wait()


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


def _checked_for_packing(
    buffers: KVBuffers,
    pool_slots: torch.Tensor,
    tiers: npt.NDArray[np.uint8],
    layout: PayloadLayout,
    out: torch.Tensor,
) -> npt.NDArray[np.int64]:
    rows = _grouped_rows(buffers, pool_slots, tiers, layout)
    _check_memory(out, buffers)
    if out.numel() < layout.total_bytes:
        raise PayloadError(f"pack: expected room for {layout.total_bytes} bytes, got {out.numel()}")
    return rows


def _checked_for_unpacking(
    payload: torch.Tensor,
    buffers: KVBuffers,
    pool_slots: torch.Tensor,
    tiers: npt.NDArray[np.uint8],
    layout: PayloadLayout,
) -> npt.NDArray[np.int64]:
    rows = _grouped_rows(buffers, pool_slots, tiers, layout)
    _check_memory(payload, buffers)
    if payload.numel() != layout.total_bytes:
        raise PayloadError(f"unpack: expected a payload of {layout.total_bytes} bytes, got {payload.numel()}")
    return rows


def _grouped_rows(
    buffers: KVBuffers, pool_slots: torch.Tensor, tiers: npt.NDArray[np.uint8], layout: PayloadLayout
) -> npt.NDArray[np.int64]:
    """Pool slot of each row, grouped by tier in stable order, on the host: what is checked there waits for no GPU."""
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
    slots = pool_slots.cpu().numpy()
    if slots.size:
        low, high = int(slots.min()), int(slots.max())
        if low < 0 or high >= buffers.pool_slots:
            raise PayloadError(f"payload rows: expected pool slots 0 to {buffers.pool_slots - 1}, got {low} to {high}")
    if max(counts) == slots.size:
        return np.ascontiguousarray(slots)
    return slots[np.argsort(tiers, kind="stable")]


def _grouped_rotation(
    rotated: RotatedRows | None, tiers: npt.NDArray[np.uint8], layout: PayloadLayout
) -> RotatedRows | None:
    """Angles in the order of `_grouped_rows`; None for a table that needs none."""
    if not layout.table.needs_rotation:
        return None
    if rotated is None:
        raise PayloadError("payload rows: the precision table rotates keys back by position, but no angles were given")
    rotated.check(layout.geometry.layers, tiers.size)
    return rotated.reordered(np.argsort(tiers, kind="stable"))


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


def why_not_kernels(buffers: KVBuffers, table: PrecisionTable) -> str | None:
    """Why payloads of ``table`` go the way of torch on a GPU, or None if they do not.

    The first call of a process for a table on a GPU runs its kernels on a few rows.
    """
    if (why_not := _kernels_refuse(buffers, table)) is not None or buffers.device.type != "cuda":
        return why_not
    k, v = buffers.k[0], buffers.v[0]
    geometry = KVGeometry(len(buffers.k), k.shape[1], k.shape[2], v.shape[2], 1, str(k.dtype).removeprefix("torch."))
    differs = disagreement(table, geometry, buffers.device, pack_payload, unpack_payload)
    return None if differs is None else f"the kernels do not compute what torch does, please report it: {differs}"


def _kernels_refuse(buffers: KVBuffers, table: PrecisionTable) -> str | None:
    if buffers.unfit_for_kernels is not None:
        return f"the kernels take {buffers.unfit_for_kernels}"
    without = cells_without_kernels(table, buffers.k[0].shape[2], buffers.v[0].shape[2])
    return f"there are no kernels for {without}" if without else None


def _backend_for(buffers: KVBuffers, table: PrecisionTable, backend: Backend | None) -> Backend:
    if backend == "torch" or (backend is None and buffers.device.type != "cuda"):
        return "torch"
    if backend not in ("triton", None):
        raise PayloadError(f'payload backend: expected "torch" or "triton", got {backend!r}')
    if backend is None:
        return "torch" if why_not_kernels(buffers, table) else "triton"
    if (why_not := _kernels_refuse(buffers, table)) is not None:
        raise PayloadError(f"payload backend: {why_not}; use the torch backend")
    return "triton"
