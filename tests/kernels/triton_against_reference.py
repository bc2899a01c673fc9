"""Triton kernels against the torch reference, bit for bit.

`test_triton.py` runs this file in a process of its own under the Triton interpreter; on a machine with a GPU
``pytest tests/kernels/triton_against_reference.py`` runs the same cases compiled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from spectrumkv_sglang.kernels.checksum import WORDS_PER_BLOCK, combine, payload_checksum
from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.segment_group import WITH_KERNELS
from spectrumkv_sglang.kernels.triton_checksum import sum_payload
from spectrumkv_sglang.payload.codec import (
    KVBuffers,
    pack_payload,
    pack_with_checksum,
    unpack_if_intact,
    unpack_payload,
    warm_up_kernels,
    write_prologue,
)
from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.layout import PayloadLayout, plan_layout
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.payload.prologue import Prologue

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
every_precision = pytest.mark.parametrize("precision", sorted(WITH_KERNELS), ids=lambda p: p.name)
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
    geometry: KVGeometry, table: npt.NDArray[np.uint8], rows: int, ordinary: bool = False, by_channel: bool = False
) -> Case:
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
    return Case(host, device, slots, tiers, plan_layout(geometry, PrecisionTable(table), counts))


def random_table(seed: int, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).choice(np.array(sorted(WITH_KERNELS), dtype=np.uint8), shape)


def mixed_case(rows: int = 13) -> Case:
    table = random_table(0, (3, 2, 2, 3))
    return case_of(KVGeometry(2, 3, 48, 64, 1, "bfloat16"), table, rows)


def native_case() -> Case:
    return case_of(KVGeometry(1, 2, 16, 16, 1, "float16"), np.zeros((1, 1, 2, 2), dtype=np.uint8), 13)


def check_both_directions(case: Case) -> None:
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


@every_precision
@every_dtype
@pytest.mark.parametrize("ordinary", [True, False], ids=["ordinary", "difficult"])
@pytest.mark.parametrize(("heads", "dim"), [(2, 16), (1, 48)])
def test_one_precision(precision: Precision, dtype: torch.dtype, ordinary: bool, heads: int, dim: int) -> None:
    geometry = KVGeometry(1, heads, dim, dim, 1, str(dtype).removeprefix("torch."))
    check_both_directions(case_of(geometry, np.full((1, 1, 2, heads), precision, dtype=np.uint8), 17, ordinary))


@every_dtype
@pytest.mark.parametrize("rows", [1, 23])
def test_tiers_and_heads_of_different_precisions(dtype: torch.dtype, rows: int) -> None:
    table = random_table(1, (3, 1, 2, 3))
    check_both_directions(case_of(KVGeometry(1, 3, 32, 64, 1, str(dtype).removeprefix("torch.")), table, rows))


@pytest.mark.parametrize("precision", sorted(WITH_KERNELS)[1:], ids=lambda p: p.name)
def test_a_block_of_the_checksum_ends_within_quantised_rows(precision: Precision) -> None:
    # Native keys of 290 rows end 896 bytes before the first checksum block does; those of ten more rows follow.
    geometry = KVGeometry(1, 2, 112, 16, 1, "bfloat16")
    table = np.array([Precision.NATIVE, precision], dtype=np.uint8)
    case = case_of(geometry, np.broadcast_to(table[:, None, None, None], (2, 1, 2, 2)).copy(), 300)
    tiers = np.zeros(300, dtype=np.uint8)
    tiers[::30] = 1
    layout = plan_layout(geometry, case.layout.table, [290, 10])
    codes = layout.segments[1]
    assert codes.codes_offset < WORDS_PER_BLOCK * 8 < codes.codes_offset + codes.codes_bytes
    check_both_directions(replace(case, tiers=tiers, layout=layout))


@every_dtype
@pytest.mark.parametrize("rows", [1, 127, 128, 129, 300])
def test_blocks_of_channels_that_are_full_and_that_are_not(dtype: torch.dtype, rows: int) -> None:
    geometry = KVGeometry(1, 1, 64, 80, 1, str(dtype).removeprefix("torch."))
    table = np.full((1, 1, 2, 1), Precision.INT4_CHANNEL, dtype=np.uint8)
    check_both_directions(case_of(geometry, table, rows, by_channel=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("by_channel", [True, False], ids=["channels", "difficult"])
def test_blocks_of_wide_heads(dtype: torch.dtype, by_channel: bool) -> None:
    geometry = KVGeometry(1, 2, 128, 256, 1, str(dtype).removeprefix("torch."))
    table = np.full((1, 1, 2, 2), Precision.INT4_CHANNEL, dtype=np.uint8)
    check_both_directions(case_of(geometry, table, 150, by_channel=by_channel))


@every_dtype
def test_keys_by_channel_beside_values_by_row_below_native_and_int8_tiers(dtype: torch.dtype) -> None:
    tiers = [
        (Precision.NATIVE, Precision.NATIVE),
        (Precision.INT8, Precision.INT8),
        (Precision.INT4_CHANNEL, Precision.INT4),
    ]
    table = np.array(tiers, dtype=np.uint8)[:, None, :, None]
    case = case_of(KVGeometry(1, 1, 64, 16, 1, str(dtype).removeprefix("torch.")), table, 134, by_channel=True)
    counts = [3, 2, 129]
    tiers_of_rows = np.random.default_rng(2).permutation(np.repeat(np.arange(3, dtype=np.uint8), counts))
    layout = plan_layout(case.layout.geometry, case.layout.table, counts)
    check_both_directions(replace(case, tiers=tiers_of_rows, layout=layout))
    # The tiers without rows have no segments; the kernels stay the same.
    layout = plan_layout(case.layout.geometry, case.layout.table, [134, 0, 0])
    check_both_directions(replace(case, tiers=np.zeros(134, dtype=np.uint8), layout=layout))


def test_a_block_of_channels_reaches_over_several_blocks_of_the_checksum() -> None:
    geometry = KVGeometry(1, 17, 256, 16, 1, "bfloat16")
    precisions = np.array([Precision.INT4_CHANNEL, Precision.NATIVE], dtype=np.uint8)
    case = case_of(
        geometry, np.broadcast_to(precisions[None, None, :, None], (1, 1, 2, 17)).copy(), 128, by_channel=True
    )
    assert case.layout.segments[0].codes_bytes > 2 * WORDS_PER_BLOCK * 8
    check_both_directions(case)


def test_no_rows_make_a_prologue_only() -> None:
    check_both_directions(mixed_case(rows=0))


@every_precision
def test_pool_strides_are_honoured(precision: Precision) -> None:
    case = case_of(KVGeometry(1, 3, 16, 32, 1, "float32"), np.full((1, 1, 2, 3), precision, dtype=np.uint8), 20)
    # Copying to a device would drop the stride, so the pool is strided there.
    wide = [torch.full((31, 6, dim), 5.0, device=DEVICE) for dim in (16, 32)]
    for whole, part in zip(wide, (case.device.k[0], case.device.v[0]), strict=True):
        whole[:, ::2] = part
    check_both_directions(replace(case, device=KVBuffers([wide[0][:, ::2]], [wide[1][:, ::2]])))
    assert all(bool((whole[:, 1::2] == 5.0).all()) for whole in wide)


@pytest.mark.parametrize("fault", ["none", "payload", "checksum", "prologue"])
def test_only_an_intact_payload_is_written(fault: str) -> None:
    case = mixed_case()
    payload = case.scratch()
    slots, tiers, layout, announced = case.slots, case.tiers, case.layout, case.prologue()
    checksum = pack_with_checksum(case.device, slots, tiers, layout, payload, announced, backend="triton").wait()
    case.clear()
    if fault == "none":
        unpack_payload(payload.cpu(), case.host, slots, tiers, layout, backend="torch")
    elif fault == "payload":
        payload[layout.total_bytes // 2] ^= 1
    elif fault == "checksum":
        checksum ^= 1 << 63
    else:
        announced = replace(announced, generation=announced.generation + 1)
    outcome = unpack_if_intact(payload, case.device, slots, tiers, layout, checksum, announced, backend="triton").wait()
    assert outcome.checksum == payload_checksum(payload)
    assert outcome.written == (fault == "none")
    assert outcome.checksum_fits == (fault in ("none", "prologue"))
    assert outcome.prologue_fits == (fault != "prologue")
    assert case.pools_are_equal()


def test_results_of_many_payloads_come_in_any_order() -> None:
    case = native_case()
    payloads = [case.scratch() for _ in range(6)]
    pending = [
        pack_with_checksum(
            case.device,
            case.slots,
            case.tiers,
            case.layout,
            out,
            replace(case.prologue(), sequence=i),
            backend="triton",
        )
        for i, out in enumerate(payloads)
    ]
    for packed, out in reversed(list(zip(pending, payloads, strict=True))):
        assert packed.wait() == packed.wait() == payload_checksum(out)


def test_a_result_keeps_while_many_others_come_and_go() -> None:
    case = native_case()
    out = case.scratch()
    arguments = (case.device, case.slots, case.tiers, case.layout, out, case.prologue(), "triton")
    first = pack_with_checksum(*arguments)
    expected = payload_checksum(out)
    for sequence in range(12):
        prologue = replace(case.prologue(), sequence=sequence)
        pack_with_checksum(case.device, case.slots, case.tiers, case.layout, case.scratch(), prologue, "triton")
    assert first.wait() == expected


def test_warming_up_leaves_the_pool_alone() -> None:
    case = mixed_case()
    warm_up_kernels(case.device, case.layout.geometry, case.layout.table)
    assert case.pools_are_equal()


@pytest.mark.parametrize("words", [0, 1, 2047, 2048, 16384, 16385])
def test_checksum_is_the_same_number(words: int) -> None:
    payload = torch.randint(0, 256, (words * 8,), dtype=torch.uint8, generator=torch.Generator().manual_seed(words))
    on_device = payload.to(DEVICE).view(torch.int64)
    verdict = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    sum_payload(on_device, on_device, verdict)
    assert combine(int(verdict[0].item()), words) == payload_checksum(payload)
    assert int(verdict[2].item()) == 0


def test_pools_that_the_kernels_cannot_take_are_refused() -> None:
    geometry = KVGeometry(1, 2, 24, 24, 1, "float16")
    case = case_of(geometry, np.full((1, 1, 2, 2), Precision.INT8, dtype=np.uint8), 9)
    with pytest.raises(PayloadError, match="head dimensions divisible by 16, got 24; use the torch backend"):
        pack_payload(case.device, case.slots, case.tiers, case.layout, case.scratch(), backend="triton")
    # Left to choose, the codec takes the reference.
    out = case.scratch()
    pack_payload(case.device, case.slots, case.tiers, case.layout, out)
    assert torch.equal(out.cpu(), case.reference())
