"""Kernels for codes in planes and for the Hadamard transform against the torch reference.

Without a transform they are equal bit for bit. The transform's float32 sums are made in another order: a code next to
the edge between two may be its neighbour, a parameter the next float16, and a decoded value is off by rounding.

`test_triton.py` runs this file in a process of its own under the Triton interpreter; on a machine with a GPU
``pytest tests/kernels/triton_planes_against_reference.py`` runs the same cases compiled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import (
    DEVICE,
    Case,
    case_of,
    check_both_directions,
    precisions_and_dtypes,
    precisions_dtypes_and_difficulties,
)

from spectrumkv_sglang.kernels.checksum import WORDS_PER_BLOCK, payload_checksum
from spectrumkv_sglang.kernels.precision import CHANNEL_BLOCK_ROWS, Precision
from spectrumkv_sglang.kernels.quantisers import code_planes, quantiser_for
from spectrumkv_sglang.kernels.segment_group import unfit_cell
from spectrumkv_sglang.kernels.transforms import Transform, transform_for
from spectrumkv_sglang.payload.codec import (
    KVBuffers,
    pack_payload,
    pack_with_checksum,
    unpack_if_intact,
    unpack_payload,
    warm_up_kernels,
    why_not_kernels,
    write_prologue,
)
from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.kernel_check import disagreement
from spectrumkv_sglang.payload.layout import Segment, plan_layout
from spectrumkv_sglang.payload.precision_table import PrecisionTable

IN_PLANES = [p for p in Precision if unfit_cell(p, Transform.IDENTITY, 16) is not None]
BY_CHANNEL = [p for p in Precision if p.by_channel]
QUANTISED = [p for p in Precision if p is not Precision.NATIVE]
every_precision_in_planes = pytest.mark.parametrize("precision", IN_PLANES, ids=lambda p: p.name)

MOST_CODES_THAT_DIFFER = 0.005
"""Share of a payload's; rows that are constants make most of them, whose transform is zeros but for rounding."""
ROW_ROUNDING = 2.0**-19
"""Of the largest element of a row: float32 sums of up to 256 terms in two orders."""


def uniform(
    precision: Precision,
    dtype: torch.dtype,
    dims: tuple[int, int],
    rows: int,
    transform: Transform = Transform.IDENTITY,
    heads: int = 2,
    **kind: bool,
) -> Case:
    geometry = KVGeometry(1, heads, *dims, 1, str(dtype).removeprefix("torch."))
    table = np.full((1, 1, 2, heads), precision, dtype=np.uint8)
    return case_of(geometry, table, rows, transforms=np.full((1, 2), transform, dtype=np.uint8), **kind)


def mixed_case(rows: int) -> Case:
    """Three tiers of native, by-row and by-channel heads; the keys of a layer and the values of another transformed."""
    table = np.random.default_rng(rows).choice(np.array(Precision, dtype=np.uint8), (3, 2, 2, 3))
    transforms = np.array([[Transform.HADAMARD, Transform.IDENTITY], [Transform.IDENTITY, Transform.HADAMARD]])
    return case_of(KVGeometry(2, 3, 64, 128, 1, "bfloat16"), table, rows, True, transforms=transforms.astype(np.uint8))


def packed_by_kernels(case: Case) -> torch.Tensor:
    got = case.scratch()
    checksum = pack_with_checksum(
        case.device, case.slots, case.tiers, case.layout, got, case.prologue(), backend="triton"
    ).wait()
    assert checksum == payload_checksum(got)
    return got.cpu()


def arrays(payload: torch.Tensor, segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, on a scale where neighbours are 1 apart, and float16 parameters."""
    codes = payload[segment.codes_offset : segment.codes_offset + segment.codes_bytes]
    codes = codes.view(segment.rows, segment.heads, -1)
    if segment.precision is Precision.INT8:
        codes = codes.view(torch.int8)
    elif segment.precision is Precision.FP8_E4M3:
        codes = torch.where(codes < 128, codes.int(), 128 - codes.int())
    else:
        codes = code_planes.unpack(codes, segment.precision.bits)
    params = payload[segment.params_offset : segment.params_offset + segment.params_bytes].view(torch.float16)
    return codes.int(), params


def check_transformed(case: Case) -> None:
    reference, got = case.reference(), packed_by_kernels(case)
    write_prologue(reference, case.prologue())
    covered = torch.zeros(case.layout.total_bytes, dtype=torch.bool)
    codes_that_differ, elements = 0, 0
    for segment in case.layout.segments:
        (codes, params), (ours, our_params) = arrays(reference, segment), arrays(got, segment)
        steps = (codes - ours).abs()
        assert steps.max() <= 1
        codes_that_differ += int(steps.count_nonzero())
        elements += steps.numel()
        torch.testing.assert_close(our_params, params, rtol=2.0**-9, atol=2.0**-10 * float(params.abs().max()))
        covered[segment.codes_offset : segment.codes_offset + segment.codes_bytes] = True
        covered[segment.params_offset : segment.params_offset + segment.params_bytes] = True
    assert codes_that_differ <= MOST_CODES_THAT_DIFFER * elements
    assert torch.equal(got[~covered], reference[~covered])

    originals = [*case.host.k, *case.host.v]
    originals = [buffer[case.slots].float().nan_to_num(0.0, 0.0, 0.0) for buffer in originals]
    for payload in (reference, got):
        case.clear()
        unpack_payload(payload, case.host, case.slots, case.tiers, case.layout, backend="torch")
        unpack_payload(payload.to(DEVICE), case.device, case.slots, case.tiers, case.layout, backend="triton")
        pools = zip((*case.host.k, *case.host.v), (*case.device.k, *case.device.v), originals, strict=True)
        for expected, decoded, original in pools:
            theirs, ours = expected.float(), decoded.cpu().float()
            untouched = torch.ones(len(ours), dtype=torch.bool)
            untouched[case.slots] = False
            assert bool((ours[untouched] == 3.0).all())
            theirs, ours = theirs[case.slots], ours[case.slots]
            ulp = torch.finfo(expected.dtype).eps * theirs.abs() + torch.finfo(expected.dtype).smallest_normal
            rounding = ulp + ROW_ROUNDING * original.abs().amax(-1, keepdim=True)
            assert bool(((ours - theirs).abs() <= rounding).all())
            if payload is got:
                check_error(case, original, ours, rounding)


def check_error(case: Case, original: torch.Tensor, decoded: torch.Tensor, rounding: torch.Tensor) -> None:
    """What the kernels packed and unpacked is as far from the original as the quantiser says, measured where it
    works: behind the transform, which keeps the length of a row."""
    (precision,) = case.layout.table.precisions
    transform = transform_for(Transform(int(case.layout.table.transforms[0, 0])))
    y = transform.forward(original)
    bound = quantiser_for(precision).error_bound(y, transform.near_normal).expand_as(y)
    # A code that is its neighbour is wrong by rounding of the sum only, and so is a parameter by one of float16.
    slack = ROW_ROUNDING * y.abs().amax((0, -1), keepdim=True) + rounding
    error = (decoded - original).square().sum(-1).sqrt()
    assert bool((error <= (bound + slack).square().sum(-1).sqrt() * (1 + 2.0**-9)).all())


@precisions_dtypes_and_difficulties(IN_PLANES)
def test_codes_in_planes_equal_the_reference(precision: Precision, dtype: torch.dtype, ordinary: bool) -> None:
    check_both_directions(uniform(precision, dtype, (64, 128), 17, heads=1, ordinary=ordinary))


@pytest.mark.parametrize("precision", BY_CHANNEL, ids=lambda p: p.name)
def test_blocks_of_channels_that_are_full_and_that_are_not(precision: Precision) -> None:
    check_both_directions(uniform(precision, torch.bfloat16, (64, 128), 129, by_channel=True))


@pytest.mark.parametrize(
    "precision",
    [Precision.INT3, Precision.INT2_CHANNEL, Precision.INT5_CHANNEL, Precision.INT6_CHANNEL],
    ids=lambda p: p.name,
)
@pytest.mark.parametrize("many", [False, True], ids=["one-row", "rows"])
def test_wide_heads(precision: Precision, many: bool) -> None:
    # A full block of channels; of rows, which end within a tile, fewer do, and are many tiles already.
    rows = (CHANNEL_BLOCK_ROWS if precision.by_channel else 33) if many else 1
    check_both_directions(uniform(precision, torch.float16, (256, 256), rows, heads=1, by_channel=True))


@pytest.mark.parametrize("precision", BY_CHANNEL, ids=lambda p: p.name)
def test_codes_round_at_exact_halves_in_every_channel(precision: Precision) -> None:
    case = uniform(precision, torch.float32, (64, 64), 32, heads=1)
    # A step of 1/2 in each channel; what lies half a step from two codes goes to the even one.
    last = (1 << precision.bits) - 1
    rows, channels = torch.arange(43)[:, None, None], torch.arange(64)
    halves = (rows * 7 + channels) % (2 * last + 1)
    values = (halves / 4 - channels % 5).float()
    slots = case.slots[:2]
    values[slots[0], 0] = -(channels % 5).float()
    values[slots[1], 0] = last / 2 - channels % 5
    for buffers in (case.host, case.device):
        for buffer in (*buffers.k, *buffers.v):
            buffer.copy_(values)
    check_both_directions(case)


@precisions_and_dtypes(QUANTISED)
def test_transformed_keys_and_values_equal_the_reference_within_rounding(
    precision: Precision, dtype: torch.dtype
) -> None:
    check_transformed(uniform(precision, dtype, (64, 128), 33, Transform.HADAMARD, heads=1, by_channel=True))


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT3, Precision.INT6_CHANNEL], ids=lambda p: p.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_transformed_rows_of_every_magnitude(precision: Precision, dtype: torch.dtype) -> None:
    check_transformed(uniform(precision, dtype, (64, 256), 17, Transform.HADAMARD))


@pytest.mark.parametrize("precision", [Precision.INT5, Precision.INT3_CHANNEL], ids=lambda p: p.name)
def test_a_block_of_the_checksum_ends_within_codes_in_planes(precision: Precision) -> None:
    # Native keys of 254 rows end 2048 bytes before the first checksum block does; those of twenty more rows follow.
    geometry = KVGeometry(1, 2, 128, 64, 1, "bfloat16")
    table = np.array([Precision.NATIVE, precision], dtype=np.uint8)
    case = case_of(geometry, np.broadcast_to(table[:, None, None, None], (2, 1, 2, 2)).copy(), 274)
    tiers = np.zeros(274, dtype=np.uint8)
    tiers[::14] = 1
    layout = plan_layout(geometry, case.layout.table, [254, 20])
    codes = layout.segments[1]
    assert codes.codes_offset < WORDS_PER_BLOCK * 8 < codes.codes_offset + codes.codes_bytes
    check_both_directions(replace(case, tiers=tiers, layout=layout))


@every_precision_in_planes
def test_pool_strides_are_honoured(precision: Precision) -> None:
    case = uniform(precision, torch.float32, (64, 64), 20)
    # Copying to a device would drop the stride, so the pool is strided there.
    wide = [torch.full((31, 4, 64), 5.0, device=DEVICE) for _ in range(2)]
    for whole, part in zip(wide, (case.device.k[0], case.device.v[0]), strict=True):
        whole[:, ::2] = part
    check_both_directions(replace(case, device=KVBuffers([wide[0][:, ::2]], [wide[1][:, ::2]])))
    assert all(bool((whole[:, 1::2] == 5.0).all()) for whole in wide)


@pytest.fixture(scope="module")
def packed_mixed_case() -> torch.Tensor:
    """Payload of `mixed_case` of 40 rows, by the kernels."""
    return packed_by_kernels(mixed_case(40))


@pytest.mark.parametrize("fault", ["none", "payload", "checksum", "prologue"])
def test_only_an_intact_payload_is_written(packed_mixed_case: torch.Tensor, fault: str) -> None:
    case = mixed_case(40)
    payload = packed_mixed_case.to(DEVICE, copy=True)
    checksum, announced = payload_checksum(payload), case.prologue()
    if fault == "payload":
        payload[case.layout.total_bytes // 2] ^= 1
    elif fault == "checksum":
        checksum ^= 1 << 63
    elif fault == "prologue":
        announced = replace(announced, generation=announced.generation + 1)
    case.clear()
    outcome = unpack_if_intact(
        payload, case.device, case.slots, case.tiers, case.layout, checksum, announced, backend="triton"
    ).wait()
    assert outcome.written == (fault == "none")
    if fault == "none":
        unpack_payload(payload.cpu(), case.host, case.slots, case.tiers, case.layout, backend="torch")
        for expected, decoded in zip((*case.host.k, *case.host.v), (*case.device.k, *case.device.v), strict=True):
            torch.testing.assert_close(decoded.cpu(), expected, rtol=2.0**-7, atol=1e-4)
    else:
        assert case.pools_are_equal()


def test_warming_up_leaves_the_pool_alone() -> None:
    case = mixed_case(13)
    warm_up_kernels(case.device, case.layout.geometry, case.layout.table)
    assert case.pools_are_equal()


def table_of(*cells: Precision, transforms: tuple[Transform, Transform] = (Transform.IDENTITY,) * 2) -> PrecisionTable:
    return PrecisionTable(np.array(cells, dtype=np.uint8).reshape(1, 1, 2, 1), np.array([transforms], dtype=np.uint8))


HADAMARD_VALUES = (Transform.IDENTITY, Transform.HADAMARD)


@pytest.mark.parametrize(
    ("table", "dim", "reason"),
    [
        (table_of(Precision.INT8, Precision.INT4), 64, None),
        (table_of(Precision.INT8, Precision.NATIVE, transforms=HADAMARD_VALUES), 64, None),
        (table_of(Precision.INT5_CHANNEL, Precision.INT3, transforms=HADAMARD_VALUES), 64, None),
        (table_of(Precision.INT8, Precision.INT3), 80, "there are no kernels for INT3 with a head dimension of 80"),
        (
            table_of(Precision.INT8, Precision.INT4, transforms=HADAMARD_VALUES),
            80,
            "there are no kernels for INT4 behind HADAMARD with a head dimension of 80",
        ),
        (
            table_of(Precision.INT8, Precision.INT4, transforms=(Transform.DEROPE, Transform.IDENTITY)),
            64,
            "there are no kernels for DEROPE",
        ),
    ],
    ids=["heads", "native-untransformed", "balanced", "dim", "hadamard-dim", "derope"],
)
def test_a_gpu_keeps_to_torch_where_there_are_no_kernels(table: PrecisionTable, dim: int, reason: str | None) -> None:
    buffers = KVBuffers([torch.zeros(4, 1, dim)], [torch.zeros(4, 1, dim)])
    why_not = why_not_kernels(buffers, table)
    assert why_not is None if reason is None else why_not is not None and why_not.startswith(reason)


def test_kernels_are_held_against_the_reference_before_they_are_used() -> None:
    table = table_of(Precision.INT5_CHANNEL, Precision.INT3, transforms=HADAMARD_VALUES)
    geometry = KVGeometry(1, 1, 64, 64, 1, "float16")
    device = torch.device(DEVICE)
    assert disagreement(table, geometry, device, pack_payload, unpack_payload) is None

    # What follows is about the comparison: any kernels will do, and these take the interpreter the least time.
    table = table_of(Precision.INT4_CHANNEL, Precision.INT4_CHANNEL)

    def places_swapped(*arguments: Any) -> None:
        unpack_payload(*arguments)
        if arguments[-1] == "triton":
            values = arguments[1].v[0]
            values.copy_(values.roll(1, -1))

    found = disagreement(table, geometry, device, pack_payload, places_swapped)
    assert str(found).startswith("unpacked elements are off by")

    def values_that_are_no_numbers(*arguments: Any) -> None:
        unpack_payload(*arguments)
        if arguments[-1] == "triton":
            arguments[1].v[0][50:] = float("nan")

    found = disagreement(table, geometry, device, pack_payload, values_that_are_no_numbers)
    assert str(found).startswith("unpacked elements are off by inf")

    def no_memory(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("none left")

    found = disagreement(table, geometry, device, no_memory, unpack_payload)
    assert found == "they could not be tried: OutOfMemoryError: none left"

    def another_scale(*arguments: Any) -> None:
        pack_payload(*arguments)
        if arguments[-1] == "triton":
            arguments[4][arguments[3].segments[0].params_offset :].zero_()

    found = disagreement(table, geometry, device, another_scale, unpack_payload)
    assert str(found).startswith("what was packed differs by")


def test_tables_that_the_kernels_cannot_take_are_refused() -> None:
    case = uniform(Precision.INT3, torch.float16, (80, 64), 9)
    with pytest.raises(PayloadError, match=r"INT3 with a head dimension of 80 .* use the torch backend"):
        pack_payload(case.device, case.slots, case.tiers, case.layout, case.scratch(), backend="triton")
