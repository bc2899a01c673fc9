"""Every quantiser keeps its promises: sizes, error bound, isolation of broken rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.quantisers import quantiser_for

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LOSSY = [precision for precision in Precision if precision is not Precision.NATIVE]
ROW_WISE = [precision for precision in LOSSY if not precision.by_channel]

every_precision = pytest.mark.parametrize("precision", list(Precision), ids=lambda p: p.name)
every_lossy = pytest.mark.parametrize("precision", LOSSY, ids=lambda p: p.name)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def round_trip(precision: Precision, x: torch.Tensor, near_normal: bool = False) -> torch.Tensor:
    quantiser = quantiser_for(precision)
    return quantiser.dequantise(*quantiser.quantise(x, near_normal), x.dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@every_precision
@every_dtype
@given(
    rows=st.one_of(st.integers(1, 9), st.integers(120, 270)),
    heads=st.integers(1, 5),
    dim=st.sampled_from([8, 24, 40, 64, 80, 128]),
)
@settings(max_examples=15, deadline=None)
def test_arrays_have_the_announced_sizes(
    precision: Precision, dtype: torch.dtype, rows: int, heads: int, dim: int
) -> None:
    quantiser = quantiser_for(precision)
    x = torch.randn(rows, heads, dim).to(dtype)
    codes, params = quantiser.quantise(x)
    assert (codes.dtype, codes.shape[:2]) == (torch.uint8, (rows, heads))
    assert (params.dtype, params.shape) == (torch.float16, quantiser.param_shape(rows, heads, dim))
    assert codes.numel() == quantiser.code_bytes(rows, heads, dim, dtype.itemsize)
    assert params.numel() * 2 == quantiser.param_bytes(rows, heads, dim)
    restored = quantiser.dequantise(codes, params, dtype)
    assert (restored.dtype, restored.shape) == (dtype, x.shape)


@every_precision
@every_dtype
@given(
    seed=st.integers(0, 2**31),
    exponent=st.floats(-9, 9),
    offset=st.sampled_from([0.0, 1.0, -10.0, 100.0]),
    spread=st.floats(0, 4),
    near_normal=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_error_stays_within_the_documented_bound(
    precision: Precision,
    dtype: torch.dtype,
    seed: int,
    exponent: float,
    offset: float,
    spread: float,
    near_normal: bool,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    row_magnitude = 10.0 ** (exponent + spread * (torch.rand(24, 2, 1, generator=generator) - 0.5))
    x = (torch.randn(24, 2, 40, generator=generator) + offset) * row_magnitude
    x = x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)
    error = (round_trip(precision, x, near_normal).double() - x.double()).abs()
    bound = quantiser_for(precision).error_bound(x, near_normal).double()
    assert torch.broadcast_to(bound, x.shape).shape == x.shape
    assert bool((error <= bound).all()), (error - bound).max().item()


@pytest.mark.parametrize(
    ("precision", "nominal"),
    [
        (Precision.INT8, 1 / 254),
        (Precision.FP8_E4M3, 1 / 16),
        (Precision.INT6, 2 / 126),
        (Precision.INT5, 2 / 62),
        (Precision.INT4, 2 / 30),
        (Precision.INT3, 2 / 14),
        (Precision.INT2, 2 / 6),
    ],
)
def test_bound_is_no_looser_than_the_nominal_step(precision: Precision, nominal: float) -> None:
    x = torch.randn(500, 3, 128)
    bound = quantiser_for(precision).error_bound(x)
    assert bool((bound <= 1.01 * nominal * x.abs().amax(-1, keepdim=True)).all())


@every_precision
@pytest.mark.parametrize("near_normal", [False, True])
def test_distortion_is_what_gaussian_rows_show(precision: Precision, near_normal: bool) -> None:
    x = torch.randn(4096, 2, 128, generator=torch.Generator().manual_seed(0))
    measured = (round_trip(precision, x, near_normal) - x).square().mean().item()
    assert measured == pytest.approx(quantiser_for(precision).distortion(near_normal), rel=0.03)
    assert quantiser_for(precision).distortion() == quantiser_for(precision).relative_distortion


@pytest.mark.parametrize("precision", ROW_WISE, ids=lambda p: p.name)
@pytest.mark.parametrize("near_normal", [False, True])
@every_dtype
def test_non_finite_elements_poison_neither_their_row_nor_others(
    precision: Precision, dtype: torch.dtype, near_normal: bool
) -> None:
    clean = torch.randn(6, 2, 16).to(dtype)
    broken = clean.clone()
    broken[1, 0] = float("nan")
    broken[2, 1, 3] = float("nan")
    broken[3, 0, 5] = float("inf")
    broken[3, 0, 6] = float("-inf")
    broken[4, 1] = float("inf")
    restored = round_trip(precision, broken, near_normal)
    assert bool(torch.isfinite(restored).all())
    touched = torch.zeros(6, 2, dtype=torch.bool)
    touched[1, 0] = touched[2, 1] = touched[3, 0] = touched[4, 1] = True
    assert torch.equal(bits(restored[~touched]), bits(round_trip(precision, clean, near_normal)[~touched]))
    finite = torch.isfinite(broken)
    error = (restored.double() - broken.double()).abs()
    assert bool((error <= quantiser_for(precision).error_bound(broken, near_normal))[finite].all())
    # NaN travels as 0, infinities as the ends of the row's range.
    zeroed = torch.where(finite, broken, 0.0)
    bound = quantiser_for(precision).error_bound(zeroed, near_normal)
    assert bool((restored.double() - zeroed.double()).abs()[2, 1, 3] <= bound[2, 1].max())
    assert restored[3, 0, 5] == restored[3, 0].max() > 0
    assert restored[3, 0, 6] == restored[3, 0].min() < 0


@every_dtype
def test_native_keeps_every_bit(dtype: torch.dtype) -> None:
    x = torch.randint(0, 256, (5, 3, 16 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    assert torch.equal(bits(round_trip(Precision.NATIVE, x)), bits(x))


@every_lossy
@pytest.mark.parametrize("near_normal", [False, True])
@every_dtype
def test_zero_rows_stay_exactly_zero(precision: Precision, dtype: torch.dtype, near_normal: bool) -> None:
    x = torch.zeros(3, 2, 24, dtype=dtype)
    x[1] = -0.0
    assert not round_trip(precision, x, near_normal).any()


@every_lossy
@pytest.mark.parametrize("near_normal", [False, True])
@pytest.mark.parametrize("value", [1.0, -2.5, 96.0])
def test_constant_rows_and_channels_are_kept(precision: Precision, value: float, near_normal: bool) -> None:
    """Numbers that float16 has: the zero alone says them. Symmetric formats say them to the rounding of their scale."""
    restored = round_trip(precision, torch.full((131, 2, 16), value), near_normal)
    if precision in (Precision.INT8, Precision.FP8_E4M3):
        assert torch.allclose(restored, torch.full_like(restored, value), rtol=2**-11, atol=0.0)
    else:
        assert bool((restored == value).all())


@every_lossy
@pytest.mark.parametrize("near_normal", [False, True])
@every_dtype
def test_largest_numbers_of_the_pool_stay_finite(precision: Precision, dtype: torch.dtype, near_normal: bool) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([largest, -largest, 0.0, 1.0] * 4).to(dtype).view(1, 1, 16)
    for shaped in (x, x.view(4, 2, 2, 1).expand(4, 2, 2, 8).flatten(1, 2)):
        assert bool(torch.isfinite(round_trip(precision, shaped, near_normal)).all())


@pytest.mark.parametrize(
    ("precision", "dim", "multiple"),
    [
        (Precision.INT2, 6, 4),
        (Precision.INT2_CHANNEL, 70, 4),
        (Precision.INT3, 12, 8),
        (Precision.INT3_CHANNEL, 68, 8),
        (Precision.INT4, 7, 2),
        (Precision.INT4_CHANNEL, 65, 2),
        (Precision.INT5, 12, 8),
        (Precision.INT5_CHANNEL, 4, 8),
        (Precision.INT6, 6, 4),
        (Precision.INT6_CHANNEL, 66, 4),
    ],
)
def test_head_dimensions_that_fill_no_whole_bytes_are_refused(precision: Precision, dim: int, multiple: int) -> None:
    assert quantiser_for(precision).dim_multiple == multiple
    with pytest.raises(ValueError, match=f"expected a multiple of {multiple} for this precision, got {dim}"):
        quantiser_for(precision).quantise(torch.zeros(2, 1, dim))
    quantiser_for(precision).quantise(torch.zeros(2, 1, multiple))


@pytest.mark.parametrize("precision", [Precision.NATIVE, Precision.INT8, Precision.FP8_E4M3, Precision.INT8_CHANNEL])
def test_codes_of_whole_bytes_take_any_head_dimension(precision: Precision) -> None:
    assert round_trip(precision, torch.ones(2, 1, 7)).shape == (2, 1, 7)


@pytest.mark.parametrize(
    ("precision", "per_row"),
    [
        (Precision.NATIVE, 256),
        (Precision.INT8, 130),
        (Precision.FP8_E4M3, 130),
        (Precision.INT6, 100),
        (Precision.INT5, 84),
        (Precision.INT4, 68),
        (Precision.INT3, 52),
        (Precision.INT2, 36),
        (Precision.INT8_CHANNEL, 132),
        (Precision.INT6_CHANNEL, 100),
        (Precision.INT5_CHANNEL, 84),
        (Precision.INT4_CHANNEL, 68),
        (Precision.INT3_CHANNEL, 52),
        (Precision.INT2_CHANNEL, 36),
    ],
)
def test_bytes_of_a_head_of_128_elements(precision: Precision, per_row: int) -> None:
    quantiser = quantiser_for(precision)
    assert quantiser.code_bytes(128, 1, 128, 2) + quantiser.param_bytes(128, 1, 128) == 128 * per_row
    assert quantiser.block_rows == (128 if precision.by_channel else 1)


@every_precision
@every_dtype
def test_head_slices_encode_like_their_copies(precision: Precision, dtype: torch.dtype) -> None:
    x = torch.randn(7, 4, 16).to(dtype)
    sliced = quantiser_for(precision).quantise(x[2:5, 1:3])
    copied = quantiser_for(precision).quantise(x[2:5, 1:3].clone())
    assert torch.equal(sliced[0], copied[0])
    assert torch.equal(sliced[1], copied[1])


def test_int4_puts_even_elements_in_the_low_nibble() -> None:
    x = torch.arange(16.0).view(1, 1, 16)
    codes, params = quantiser_for(Precision.INT4).quantise(x)
    assert codes.flatten().tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert params.flatten().tolist() == [1.0, 0.0]


def test_int8_rounds_ties_to_even() -> None:
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0, 0.0]).view(1, 1, 8)
    codes, params = quantiser_for(Precision.INT8).quantise(x)
    assert params.item() == 1.0
    assert codes.view(torch.int8).flatten().tolist() == [127, 0, 2, 2, 0, -2, -127, 0]


def test_fp8_decodes_every_code_as_the_format_says() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    decoded = quantiser_for(Precision.FP8_E4M3).dequantise(
        codes.view(1, 1, -1), torch.ones(1, 1, 1, dtype=torch.float16), torch.float32
    )
    assert torch.equal(bits(decoded.flatten()), bits(codes.view(torch.float8_e4m3fn).float()))


@given(seed=st.integers(0, 2**31), exponent=st.floats(-12, 12))
@settings(max_examples=30, deadline=None)
def test_fp8_never_emits_the_nan_code(seed: int, exponent: float) -> None:
    x = torch.randn(50, 1, 8, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    codes, _ = quantiser_for(Precision.FP8_E4M3).quantise(x)
    assert not bool(((codes & 0x7F) == 0x7F).any())


def test_wire_values_and_bits() -> None:
    assert {precision.name: (int(precision), precision.bits) for precision in Precision} == {
        "NATIVE": (0, 0),
        "INT8": (1, 8),
        "FP8_E4M3": (2, 8),
        "INT4": (3, 4),
        "INT2": (4, 2),
        "INT4_CHANNEL": (5, 4),
        "INT2_CHANNEL": (6, 2),
        "INT3_CHANNEL": (7, 3),
        "INT5_CHANNEL": (8, 5),
        "INT6_CHANNEL": (9, 6),
        "INT8_CHANNEL": (10, 8),
        "INT3": (11, 3),
        "INT5": (12, 5),
        "INT6": (13, 6),
    }
    with pytest.raises(ValueError, match="14 is not a valid Precision"):
        Precision(14)
