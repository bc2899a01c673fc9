"""Triton kernels against the torch reference, bit for bit.

`test_triton.py` runs this file in a process of its own under the Triton interpreter; on a machine with a GPU
``pytest tests/kernels/triton_against_reference.py`` runs the same cases compiled.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from kernel_cases import (
    DEVICE,
    Case,
    case_of,
    check_both_directions,
    every_dtype,
    precisions_dtypes_and_difficulties,
)

from spectrumkv_sglang.kernels.checksum import WORDS_PER_BLOCK, combine, payload_checksum
from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.segment_group import KernelFamily, family_of, unfit_cell
from spectrumkv_sglang.kernels.transforms import Transform
from spectrumkv_sglang.kernels.triton_checksum import sum_payload
from spectrumkv_sglang.payload.codec import (
    KVBuffers,
    pack_payload,
    pack_with_checksum,
    unpack_if_intact,
    unpack_payload,
    warm_up_kernels,
)
from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.layout import plan_layout

# Those whose codes are in several planes have a file of their own.
_IN_PLANES = (KernelFamily.PLANES, KernelFamily.LANES)
PRECISIONS = [
    p
    for p in Precision
    if family_of(p, Transform.IDENTITY) not in _IN_PLANES and unfit_cell(p, Transform.IDENTITY, 16) is None
]
every_precision = pytest.mark.parametrize("precision", PRECISIONS, ids=lambda p: p.name)


def random_table(seed: int, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).choice(np.array(PRECISIONS, dtype=np.uint8), shape)


def mixed_case(rows: int = 13) -> Case:
    table = random_table(0, (3, 2, 2, 3))
    return case_of(KVGeometry(2, 3, 48, 64, 1, "bfloat16"), table, rows)


def native_case() -> Case:
    return case_of(KVGeometry(1, 2, 16, 16, 1, "float16"), np.zeros((1, 1, 2, 2), dtype=np.uint8), 13)


@precisions_dtypes_and_difficulties(PRECISIONS)
@pytest.mark.parametrize(("heads", "dim"), [(2, 16), (1, 48)])
def test_one_precision(precision: Precision, dtype: torch.dtype, ordinary: bool, heads: int, dim: int) -> None:
    geometry = KVGeometry(1, heads, dim, dim, 1, str(dtype).removeprefix("torch."))
    check_both_directions(case_of(geometry, np.full((1, 1, 2, heads), precision, dtype=np.uint8), 17, ordinary))


@every_dtype
@pytest.mark.parametrize("rows", [1, 23])
def test_tiers_and_heads_of_different_precisions(dtype: torch.dtype, rows: int) -> None:
    table = random_table(1, (3, 1, 2, 3))
    check_both_directions(case_of(KVGeometry(1, 3, 32, 64, 1, str(dtype).removeprefix("torch.")), table, rows))


@pytest.mark.parametrize("precision", PRECISIONS[1:], ids=lambda p: p.name)
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
    geometry = KVGeometry(1, 9, 256, 16, 1, "bfloat16")
    precisions = np.array([Precision.INT8_CHANNEL, Precision.NATIVE], dtype=np.uint8)
    case = case_of(
        geometry, np.broadcast_to(precisions[None, None, :, None], (1, 1, 2, 9)).copy(), 128, by_channel=True
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


@pytest.fixture(scope="module")
def packed_mixed_case() -> tuple[torch.Tensor, int]:
    """Payload and checksum of `mixed_case`, by the kernels."""
    case = mixed_case()
    payload = case.scratch()
    arguments = (case.device, case.slots, case.tiers, case.layout, payload, case.prologue())
    return payload, pack_with_checksum(*arguments, backend="triton").wait()


@pytest.mark.parametrize("fault", ["none", "payload", "checksum", "prologue"])
def test_only_an_intact_payload_is_written(packed_mixed_case: tuple[torch.Tensor, int], fault: str) -> None:
    case = mixed_case()
    payload, checksum = packed_mixed_case[0].clone(), packed_mixed_case[1]
    slots, tiers, layout, announced = case.slots, case.tiers, case.layout, case.prologue()
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
