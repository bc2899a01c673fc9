"""Pools, and cases of rows of them, that the Triton kernels and the torch reference are compared on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch

from spectrumkv_sglang.kernels.checksum import payload_checksum
from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.payload.codec import (
    KVBuffers,
    pack_payload,
    pack_with_checksum,
    unpack_payload,
    write_prologue,
)
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.layout import PayloadLayout, plan_layout
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.payload.prologue import Prologue

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
ALL_COMBINATIONS = DEVICE == "cuda" or bool(os.environ.get("ALL_KERNEL_CASES"))
"""Under the interpreter, which takes seconds for a case, precisions and dtypes meet in turn instead of all in all;
``ALL_KERNEL_CASES=1`` lets them meet there, too."""


def precisions_and_dtypes(precisions: Sequence[Precision]) -> pytest.MarkDecorator:
    """Parametrizes ``precision`` and ``dtype``: every precision, and every dtype with a third of them."""
    pairs = [
        (precision, dtype)
        for i, precision in enumerate(precisions)
        for dtype in (DTYPES if ALL_COMBINATIONS else DTYPES[i % 3 : i % 3 + 1])
    ]
    return pytest.mark.parametrize(("precision", "dtype"), pairs, ids=[f"{p.name}-{d}" for p, d in pairs])


def precisions_dtypes_and_difficulties(precisions: Sequence[Precision]) -> pytest.MarkDecorator:
    """Parametrizes ``precision``, ``dtype``, ``ordinary``: difficult rows have the dtype after the ordinary ones'."""
    cases = [
        (precision, dtype, ordinary)
        for i, precision in enumerate(precisions)
        for ordinary in (True, False)
        for dtype in (DTYPES if ALL_COMBINATIONS else [DTYPES[(i + (not ordinary)) % 3]])
    ]
    ids = [f"{p.name}-{d}-{'ordinary' if ordinary else 'difficult'}" for p, d, ordinary in cases]
    return pytest.mark.parametrize(("precision", "dtype", "ordinary"), cases, ids=ids)


def difficult_pool(slots: int, heads: int, dim: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows of every magnitude, with zeros, ties, constants, subnormals and non-finite elements."""
    generator = torch.Generator().manual_seed(seed)
    magnitude = 10.0 ** (torch.rand(slots, heads, 1, generator=generator) * 17 - 9)
    x = torch.randn(slots, heads, dim, generator=generator) * magnitude
    x[0] = 0.0
    x[1] = x[1, :, :1]
    x[2] = torch.arange(dim) - 127.0 + 0.5
    x[3] = float("nan")
    x[4, 0, 1], x[4, 0, 2] = float("inf"), float("-inf")
    x[5, :, 3] = float("nan")
    x[6] = -0.0
    return x.to(dtype)


def ordinary_pool(slots: int, heads: int, dim: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows that take the fast path, with exact ties, zeros of both signs and elements far below the scale."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(slots, heads, dim, generator=generator) * torch.rand(slots, heads, 1, generator=generator) * 9
    x[..., :2] = torch.tensor([0.0, -0.0])
    x[..., 2:4] *= 1e-6
    # Scales of 1, 3/4 and 1/8, where halves of a step are exact.
    for row, step in enumerate((1.0, 0.75, 0.125)):
        x[row] = (torch.arange(dim) % 15 - 7 + 0.5) * step
        x[row, :, 0], x[row, :, 1] = 127 * step, -127 * step
        x[row + 3] = (torch.arange(dim) % 15 + 0.5) * step
        x[row + 3, :, 0], x[row + 3, :, 1] = 0.0, 15 * step
    return x.to(dtype)


def pool_of_channels(slots: int, heads: int, dim: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Channels of a spread and an offset each, with exact ties and zeros of both signs; no row is like the others.

    Blocks of many rows take the fast path, but those with one of the first four slots: they hold NaN and infinities.
    """
    generator = torch.Generator().manual_seed(seed)
    spread, offset = torch.rand(heads, dim, generator=generator) * 3 + 0.1, torch.randn(heads, dim, generator=generator)
    x = torch.randn(slots, heads, dim, generator=generator) * spread + offset * 4
    slot = torch.arange(slots)[:, None]
    x[..., 0] = torch.where(slot % 2 == 0, 0.0, -0.0)
    x[..., 1] = slot % 31 / 2
    x[..., dim - 1] = (slot % 31 / 2 - 7.5) / 8
    x[0] = float("nan")
    x[1, 0, 2::4], x[2, 0, 3::4] = float("inf"), float("-inf")
    x[3, :, dim // 2] = float("nan")
    return x.to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8).cpu()


@dataclass
class Case:
    """Rows of a pool on the CPU, and the same pool where the kernels run."""

    host: KVBuffers
    device: KVBuffers
    slots: torch.Tensor
    tiers: npt.NDArray[np.uint8]
    layout: PayloadLayout

    def prologue(self) -> Prologue:
        layout = self.layout
        digests = layout.geometry.digest(), layout.table.digest()
        return Prologue(2**63, 7, 3, 0, layout.rows_per_tier, layout.total_bytes, *digests)

    def reference(self) -> torch.Tensor:
        out = torch.full((self.layout.total_bytes,), 7, dtype=torch.uint8)
        pack_payload(self.host, self.slots, self.tiers, self.layout, out, backend="torch")
        return out

    def scratch(self) -> torch.Tensor:
        return torch.full((self.layout.total_bytes,), 7, dtype=torch.uint8, device=DEVICE)

    def clear(self) -> None:
        for buffers in (self.host, self.device):
            for buffer in (*buffers.k, *buffers.v):
                buffer.fill_(3.0)

    def pools_are_equal(self) -> bool:
        ours, theirs = (*self.host.k, *self.host.v), (*self.device.k, *self.device.v)
        return all(torch.equal(bits(a), bits(b)) for a, b in zip(ours, theirs, strict=True))


def case_of(
    geometry: KVGeometry,
    table: npt.NDArray[np.uint8],
    rows: int,
    ordinary: bool = False,
    by_channel: bool = False,
    transforms: npt.NDArray[np.uint8] | None = None,
) -> Case:
    """A case of precisions and transforms; rows of random tiers in slots of a pool in random order."""
    pool = pool_of_channels if by_channel else ordinary_pool if ordinary else difficult_pool
    dtype = getattr(torch, geometry.dtype)
    host = KVBuffers(
        [pool(rows + 11, geometry.kv_heads, geometry.head_dim, dtype, i) for i in range(geometry.layers)],
        [pool(rows + 11, geometry.kv_heads, geometry.v_head_dim, dtype, 9 + i) for i in range(geometry.layers)],
    )
    # Copies, so that the device's pool is another one where the device is the CPU.
    device = KVBuffers([k.to(DEVICE, copy=True) for k in host.k], [v.to(DEVICE, copy=True) for v in host.v])
    tiers = np.random.default_rng(rows).integers(0, table.shape[0], rows).astype(np.uint8)
    counts = np.bincount(tiers, minlength=table.shape[0]).tolist()
    slots = torch.randperm(rows + 11, generator=torch.Generator().manual_seed(rows))[:rows]
    return Case(host, device, slots, tiers, plan_layout(geometry, PrecisionTable(table, transforms), counts))


def check_both_directions(case: Case) -> None:
    """Kernels and reference pack the same bytes and unpack them to the same pool."""
    expected, got = case.reference(), case.scratch()
    pack_payload(case.device, case.slots, case.tiers, case.layout, got, backend="triton")
    assert torch.equal(got.cpu(), expected)
    write_prologue(expected, case.prologue())
    got = case.scratch()
    packed = pack_with_checksum(
        case.device, case.slots, case.tiers, case.layout, got, case.prologue(), backend="triton"
    )
    assert packed.wait() == payload_checksum(expected)
    assert torch.equal(got.cpu(), expected)
    case.clear()
    unpack_payload(expected, case.host, case.slots, case.tiers, case.layout, backend="torch")
    unpack_payload(got, case.device, case.slots, case.tiers, case.layout, backend="triton")
    assert case.pools_are_equal()
