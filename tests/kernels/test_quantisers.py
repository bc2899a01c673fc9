"""Every quantiser keeps its promises: sizes, error bound, isolation of broken rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.quantisers import quantiser_for

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROW_WISE = [Precision.INT8, Precision.FP8_E4M3, Precision.INT4]
LOSSY = [*ROW_WISE, Precision.INT4_CHANNEL]

every_precision = pytest.mark.parametrize("precision", list(Precision), ids=lambda p: p.name)
every_lossy = pytest.mark.parametrize("precision", LOSSY, ids=lambda p: p.name)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def round_trip(precision: Precision, x: torch.Tensor) -> torch.Tensor:
    quantiser = quantiser_for(precision)
    return quantiser.dequantise(*quantiser.quantise(x), x.dtype)


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
)
@settings(max_examples=60, deadline=None)
def test_error_stays_within_the_documented_bound(
    precision: Precision, dtype: torch.dtype, seed: int, exponent: float, offset: float, spread: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    row_magnitude = 10.0 ** (exponent + spread * (torch.rand(24, 2, 1, generator=generator) - 0.5))
    x = (torch.randn(24, 2, 40, generator=generator) + offset) * row_magnitude
    x = x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)
    error = (round_trip(precision, x).double() - x.double()).abs()
    bound = quantiser_for(precision).error_bound(x).double()
    assert torch.broadcast_to(bound, x.shape).shape == x.shape
    assert bool((error <= bound).all()), (error - bound).max().item()


@pytest.mark.parametrize(
    ("precision", "nominal"), [(Precision.INT8, 1 / 254), (Precision.FP8_E4M3, 1 / 16), (Precision.INT4, 2 / 30)]
)
def test_bound_is_no_looser_than_the_nominal_step(precision: Precision, nominal: float) -> None:
    x = torch.randn(500, 3, 128)
    bound = quantiser_for(precision).error_bound(x)
    assert bool((bound <= 1.01 * nominal * x.abs().amax(-1, keepdim=True)).all())


@every_precision
def test_relative_distortion_is_what_gaussian_rows_show(precision: Precision) -> None:
    x = torch.randn(4000, 2, 128, generator=torch.Generator().manual_seed(0))
    measured = (round_trip(precision, x) - x).square().mean().item()
    assert measured == pytest.approx(quantiser_for(precision).relative_distortion, rel=0.03)


@pytest.mark.parametrize("precision", ROW_WISE, ids=lambda p: p.name)
@every_dtype
def test_non_finite_elements_poison_neither_their_row_nor_others(precision: Precision, dtype: torch.dtype) -> None:
    clean = torch.randn(6, 2, 16).to(dtype)
    broken = clean.clone()
    broken[1, 0] = float("nan")
    broken[2, 1, 3] = float("nan")
    broken[3, 0, 5] = float("inf")
    broken[3, 0, 6] = float("-inf")
    broken[4, 1] = float("inf")
    restored = round_trip(precision, broken)
    assert bool(torch.isfinite(restored).all())
    touched = torch.zeros(6, 2, dtype=torch.bool)
    touched[1, 0] = touched[2, 1] = touched[3, 0] = touched[4, 1] = True
    assert torch.equal(bits(restored[~touched]), bits(round_trip(precision, clean)[~touched]))
    finite = torch.isfinite(broken)
    error = (restored.double() - broken.double()).abs()
    assert bool((error <= quantiser_for(precision).error_bound(broken))[finite].all())
    # NaN travels as 0, infinities as the ends of the row's range.
    zeroed = torch.where(finite, broken, 0.0)
    bound = quantiser_for(precision).error_bound(zeroed)
    assert bool((restored.double() - zeroed.double()).abs()[2, 1, 3] <= bound[2, 1].max())
    assert restored[3, 0, 5] == restored[3, 0].max() > 0
    assert restored[3, 0, 6] == restored[3, 0].min() < 0


@every_dtype
def test_native_keeps_every_bit(dtype: torch.dtype) -> None:
    x = torch.randint(0, 256, (5, 3, 16 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    assert torch.equal(bits(round_trip(Precision.NATIVE, x)), bits(x))


@every_lossy
@every_dtype
def test_zero_rows_stay_exactly_zero(precision: Precision, dtype: torch.dtype) -> None:
    x = torch.zeros(3, 2, 24, dtype=dtype)
    x[1] = -0.0
    assert not round_trip(precision, x).any()


@every_lossy
@every_dtype
def test_largest_numbers_of_the_pool_stay_finite(precision: Precision, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([largest, -largest, 0.0, 1.0] * 4).to(dtype).view(1, 1, 16)
    assert bool(torch.isfinite(round_trip(precision, x)).all())


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


@given(rows=st.sampled_from([2, 30, 128, 130, 256, 300]), seed=st.integers(0, 2**31), broken=st.booleans())
@every_dtype
@settings(max_examples=20, deadline=None)
def test_int4_channel_is_int4_along_the_rows_of_each_block(
    dtype: torch.dtype, rows: int, seed: int, broken: bool
) -> None:
    """An even number of rows can be turned, so that INT4 sees a channel of a block as its row."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, 24, generator=generator) * 10.0 ** torch.randint(-4, 5, (1, 3, 24), generator=generator)
    if broken:
        for value in (float("nan"), float("inf"), float("-inf")):
            x[torch.rand(x.shape, generator=generator) < 0.02] = value
    x = x.to(dtype)
    turned = [block.permute(2, 1, 0).contiguous() for block in x.split(128)]
    expected = torch.cat([round_trip(Precision.INT4, block).permute(2, 1, 0) for block in turned])
    assert torch.equal(bits(round_trip(Precision.INT4_CHANNEL, x)), bits(expected))


@every_dtype
def test_int4_channel_keeps_non_finite_elements_to_their_channel_of_their_block(dtype: torch.dtype) -> None:
    clean = torch.randn(300, 2, 16).to(dtype)
    broken = clean.clone()
    broken[130, 0, 3], broken[131, 0, 4], broken[290, 1, 5] = float("nan"), float("inf"), float("-inf")
    restored = round_trip(Precision.INT4_CHANNEL, broken)
    assert bool(torch.isfinite(restored).all())
    touched = torch.zeros(300, 2, 16, dtype=torch.bool)
    touched[128:256, 0, 3:5] = touched[256:, 1, 5] = True
    assert torch.equal(restored[~touched], round_trip(Precision.INT4_CHANNEL, clean)[~touched])
    finite = torch.isfinite(broken)
    bound = quantiser_for(Precision.INT4_CHANNEL).error_bound(broken)
    assert bool(((restored.double() - broken.double()).abs() <= bound)[finite].all())
    assert restored[131, 0, 4] == restored[128:256, 0, 4].max()
    assert restored[290, 1, 5] == restored[256:, 1, 5].min()


def test_int4_channel_resolves_small_channels_beside_large_ones() -> None:
    """What it is for: keys with a few channels that are large in every token."""
    x = torch.randn(256, 1, 64)
    x[:, :, 7] = 100.0 + x[:, :, 7]
    ordinary = torch.arange(64) != 7
    by_row, by_channel = (
        (round_trip(precision, x) - x)[..., ordinary].square().mean().item()
        for precision in (Precision.INT4, Precision.INT4_CHANNEL)
    )
    assert by_channel < 0.02 < 0.5 < by_row


def test_int4_channel_states_scales_of_all_channels_then_zeros_of_each_block() -> None:
    x = torch.zeros(131, 1, 4)
    x[:, 0, 1] = torch.arange(131) % 16 * 2.0  # blocks of rows 0 to 127 and 128 to 130
    x[:, 0, 2] = -3.0
    codes, params = quantiser_for(Precision.INT4_CHANNEL).quantise(x)
    assert params.tolist() == [
        [[[0.0, 2.0, 0.0, 0.0], [0.0, 0.0, -3.0, 0.0]]],
        [[[0.0, float(torch.tensor(4 / 15).half()), 0.0, 0.0], [0.0, 0.0, -3.0, 0.0]]],
    ]
    assert codes[:17, 0, 0].tolist() == [*range(0, 256, 16), 0]
    assert codes[128:, 0, 0].tolist() == [0x00, 0x80, 0xF0]
    assert not codes[:, 0, 1].any()


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


def test_reserved_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="4 is not a valid Precision"):
        Precision(4)
