"""Few bits spend their codes on the bulk of the elements where that leaves less error, and only there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.quantisers import quantiser_for

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CUTTING = [Precision.INT2, Precision.INT3]

every_cutting = pytest.mark.parametrize("precision", CUTTING, ids=lambda p: p.name)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def round_trip(precision: Precision, x: torch.Tensor, near_normal: bool = False) -> torch.Tensor:
    quantiser = quantiser_for(precision)
    return quantiser.dequantise(*quantiser.quantise(x, near_normal), x.dtype)


def test_cut_tails_more_than_halve_the_error_of_normal_rows_in_2_bits() -> None:
    x = torch.randn(4096, 2, 128, generator=torch.Generator().manual_seed(3))
    plain, cut = ((round_trip(Precision.INT2, x, near) - x).square().mean().item() for near in (False, True))
    assert plain / cut == pytest.approx(2.16, rel=0.03)


@pytest.mark.parametrize("precision", [p for p in Precision if p not in CUTTING], ids=lambda p: p.name)
@every_dtype
def test_only_few_bits_by_row_cut_the_tails_of_near_normal_rows(precision: Precision, dtype: torch.dtype) -> None:
    x = torch.randn(130, 2, 64).to(dtype)
    quantiser = quantiser_for(precision)
    for plain, near in zip(quantiser.quantise(x), quantiser.quantise(x, near_normal=True), strict=True):
        assert torch.equal(plain, near)
    assert torch.equal(quantiser.error_bound(x), quantiser.error_bound(x, near_normal=True))


@every_cutting
@given(seed=st.integers(0, 2**31), offset=st.sampled_from([0.0, 1.0, -10.0]), power=st.sampled_from([0.3, 1.0, 3.0]))
@settings(max_examples=25, deadline=None)
def test_cut_rows_state_the_step_of_the_best_quantiser_of_a_normal_variable(
    precision: Precision, seed: int, offset: float, power: float
) -> None:
    """Against numpy's mean and deviation of one row at a time; flat rows (small powers) keep their whole range."""
    x = torch.randn(6, 1, 64, generator=torch.Generator().manual_seed(seed))
    x = x.sign() * x.abs() ** power + offset
    last = 2**precision.bits - 1
    factor = {2: 0.9957, 3: 0.5860, 4: 0.3352}[precision.bits]
    _, params = quantiser_for(precision).quantise(x, near_normal=True)
    _, plain = quantiser_for(precision).quantise(x)
    for row, (scale, zero), whole in zip(x[:, 0].double().numpy(), params[:, 0].tolist(), plain[:, 0], strict=True):
        full = (row.max() - whole[1].item()) / last
        step = factor * row.std()
        if abs(step - full) < 1e-6 * full:
            continue  # float32 decides
        if step > full:
            assert [scale, zero] == whole.tolist()
            continue
        assert scale == pytest.approx(step, rel=2**-11 + 1e-6)
        centred = min(max(row.mean() - scale * last / 2, row.min()), row.max() - scale * last)
        assert zero == pytest.approx(centred, rel=2**-11, abs=1e-5)


def test_a_cut_range_is_moved_into_the_row() -> None:
    """Most elements at the low end: four steps centred at the mean would start below the least element."""
    x = torch.zeros(1, 1, 64)
    x[..., :4] = 8.0
    _, params = quantiser_for(Precision.INT2).quantise(x, near_normal=True)
    sigma = (4 / 64 * 60 / 64) ** 0.5 * 8
    assert params[0, 0, 0].item() == pytest.approx(0.9957 * sigma, rel=2**-10)
    assert params[0, 0, 1].item() == 0.0
    assert round_trip(Precision.INT2, x, near_normal=True)[0, 0, 4:].abs().max() == 0.0


@given(seed=st.integers(0, 2**31), rows=st.sampled_from([5, 128, 200]), power=st.sampled_from([0.3, 1.0, 3.0]))
@settings(max_examples=25, deadline=None)
def test_int2_channel_takes_the_range_of_least_squared_error(seed: int, rows: int, power: float) -> None:
    """No other of the four ranges around the middle leaves less, for any channel of any block."""
    x = torch.randn(rows, 1, 8, generator=torch.Generator().manual_seed(seed)) * 3
    x = x.sign() * x.abs() ** power
    restored = round_trip(Precision.INT2_CHANNEL, x).double()
    for block, decoded in zip(x.split(128), restored.split(128), strict=True):
        low, high = block.amin(0), block.amax(0)
        errors = []
        for factor in (1.0, 0.84, 0.68, 0.52):
            scale = ((high - low.half().float()) / 3 * factor).half()
            zero = (low if factor == 1 else low / 2 + high / 2 - scale.float() * 3 / 2).half()
            codes = ((block - zero.float()).double() / scale.double()).round().clamp(0, 3)
            errors.append((codes * scale.double() + zero.double() - block).square().sum(0))
        least = torch.stack(errors).amin(0)
        assert torch.allclose((decoded - block).square().sum(0), least, rtol=1e-4, atol=1e-9)


def test_int2_channel_halves_the_error_of_keys_with_an_outlier() -> None:
    x = torch.randn(128, 1, 64, generator=torch.Generator().manual_seed(5))
    turned = x[:, 0].T.reshape(64, 1, 128)
    cut = (round_trip(Precision.INT2_CHANNEL, x) - x).square().mean().item()
    whole = (round_trip(Precision.INT2, turned) - turned).square().mean().item()
    assert cut < 0.55 * whole
