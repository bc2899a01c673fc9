"""Triton kernels against the torch reference, bit for bit.

`test_triton.py` runs this file in a process of its own under the Triton interpreter; on a machine with a GPU
``pytest tests/kernels/triton_against_reference.py`` runs the same cases compiled.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.kernels.checksum import combine, payload_checksum
from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.quantisers import quantiser_for
from spectrumkv_sglang.kernels.triton_checksum import mixed_block_sums
from spectrumkv_sglang.kernels.triton_pack import pack_rows
from spectrumkv_sglang.kernels.triton_unpack import unpack_rows
from spectrumkv_sglang.payload.codec import KVBuffers, pack_payload, unpack_payload
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.layout import plan_layout
from spectrumkv_sglang.payload.precision_table import PrecisionTable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
every_precision = pytest.mark.parametrize("precision", list(Precision), ids=lambda p: p.name)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


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


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8).cpu()


@every_precision
@every_dtype
@pytest.mark.parametrize(("heads", "dim"), [(1, 8), (3, 64), (2, 40)])
def test_pack_and_unpack_equal_the_quantiser(precision: Precision, dtype: torch.dtype, heads: int, dim: int) -> None:
    pool = difficult_pool(48, heads + 2, dim, dtype)
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(1))[:37]
    quantiser = quantiser_for(precision)
    codes, params = quantiser.quantise(pool[slots, 1 : 1 + heads])
    packed, packed_params = torch.zeros_like(codes).to(DEVICE), torch.zeros_like(params).to(DEVICE)
    pack_rows(precision, pool.to(DEVICE), slots.to(DEVICE), 1, packed, packed_params)
    assert torch.equal(packed.cpu(), codes)
    assert torch.equal(bits(packed_params), bits(params))

    expected = torch.full_like(pool, 3.0)
    expected[slots, 1 : 1 + heads] = quantiser.dequantise(codes, params, dtype)
    target = torch.full_like(pool, 3.0).to(DEVICE)
    unpack_rows(precision, packed, packed_params, target, slots.to(DEVICE), 1)
    assert torch.equal(bits(target), bits(expected))


@every_precision
def test_pool_strides_are_honoured(precision: Precision) -> None:
    pool = difficult_pool(20, 6, 16, torch.float32)[:, ::2]
    slots = torch.arange(19, -1, -1)
    codes, params = quantiser_for(precision).quantise(pool[slots])
    packed, packed_params = torch.zeros_like(codes).to(DEVICE), torch.zeros_like(params).to(DEVICE)
    # Copying to a device would drop the stride, so the target is strided there.
    wide = torch.zeros(20, 6, 16, device=DEVICE)
    wide[:, ::2] = pool.to(DEVICE)
    pack_rows(precision, wide[:, ::2], slots.to(DEVICE), 0, packed, packed_params)
    assert torch.equal(packed.cpu(), codes)
    wide.fill_(3.0)
    unpack_rows(precision, packed, packed_params, wide[:, ::2], slots.to(DEVICE), 0)
    expected = quantiser_for(precision).dequantise(codes, params, torch.float32)
    assert torch.equal(bits(wide[:, ::2][slots.to(DEVICE)]), bits(expected))
    assert bool((wide[:, 1::2] == 3.0).all())


@every_dtype
def test_whole_payloads_are_equal(dtype: torch.dtype) -> None:
    generator = np.random.default_rng(0)
    geometry = KVGeometry(2, 3, 40, 64, 1, str(dtype).removeprefix("torch."))
    table = PrecisionTable(generator.integers(0, 4, (3, 2, 2, 3)).astype(np.uint8))
    tiers = generator.integers(0, 3, 50).astype(np.uint8)
    layout = plan_layout(geometry, table, np.bincount(tiers, minlength=3).tolist())
    reference = KVBuffers(
        [difficult_pool(64, 3, 40, dtype, seed) for seed in (1, 2)],
        [difficult_pool(64, 3, 64, dtype, seed) for seed in (3, 4)],
    )
    slots = torch.randperm(64)[:50]
    expected = torch.full((layout.total_bytes,), 7, dtype=torch.uint8)
    pack_payload(reference, slots, tiers, layout, expected, backend="torch")
    device = KVBuffers([k.to(DEVICE) for k in reference.k], [v.to(DEVICE) for v in reference.v])
    got = torch.full((layout.total_bytes,), 7, dtype=torch.uint8, device=DEVICE)
    assert pack_payload(device, slots, tiers, layout, got, backend="triton") == layout.total_bytes
    assert torch.equal(got.cpu(), expected)
    assert combine(int(mixed_block_sums(got).sum().item()), layout.total_bytes // 8) == payload_checksum(expected)

    for buffers in (reference, device):
        for buffer in (*buffers.k, *buffers.v):
            buffer.zero_()
    unpack_payload(expected, reference, slots, tiers, layout, backend="torch")
    unpack_payload(got, device, slots, tiers, layout, backend="triton")
    for theirs, ours in zip((*device.k, *device.v), (*reference.k, *reference.v), strict=True):
        assert torch.equal(bits(theirs), bits(ours))


@pytest.mark.parametrize("words", [0, 1, 2047, 2048, 16384, 16385, 40000])
def test_checksum_is_the_same_number(words: int) -> None:
    payload = torch.randint(0, 256, (words * 8,), dtype=torch.uint8, generator=torch.Generator().manual_seed(words))
    assert combine(int(mixed_block_sums(payload.to(DEVICE)).sum().item()), words) == payload_checksum(payload)


def test_wrong_types_are_refused_before_a_launch() -> None:
    pool = torch.zeros(4, 2, 8, device=DEVICE)
    codes = torch.zeros(4, 2, 8, dtype=torch.uint8, device=DEVICE)
    params = torch.zeros(4, 2, 1, dtype=torch.float16, device=DEVICE)
    slots = torch.arange(4, device=DEVICE)
    with pytest.raises(SpectrumKVError, match="int64 pool slots"):
        pack_rows(Precision.INT8, pool, slots.int(), 0, codes, params)
    with pytest.raises(SpectrumKVError, match="contiguous heads"):
        pack_rows(Precision.INT8, pool.transpose(1, 2), slots, 0, codes, params)
    with pytest.raises(SpectrumKVError, match="uint8 codes"):
        unpack_rows(Precision.INT8, codes.char(), params, pool, slots, 0)
    with pytest.raises(SpectrumKVError, match="same rows and heads"):
        unpack_rows(Precision.INT8, codes, params[:, :1], pool, slots, 0)
