"""Quantisers by channel keep to their channel of their block of 128 rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.quantisers import quantiser_for

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BY_CHANNEL = [precision for precision in Precision if precision.by_channel]

every_by_channel = pytest.mark.parametrize("precision", BY_CHANNEL, ids=lambda p: p.name)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def round_trip(precision: Precision, x: torch.Tensor) -> torch.Tensor:
    quantiser = quantiser_for(precision)
    return quantiser.dequantise(*quantiser.quantise(x), x.dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@every_by_channel
def test_blocks_of_128_rows_share_parameters(precision: Precision) -> None:
    quantiser = quantiser_for(precision)
    assert [quantiser.param_shape(rows, 3, 40) for rows in (1, 128, 129, 300)] == [
        (1, 3, 2, 40),
        (1, 3, 2, 40),
        (2, 3, 2, 40),
        (3, 3, 2, 40),
    ]


@pytest.mark.parametrize(
    ("by_channel", "by_row"),
    [
        (Precision.INT3_CHANNEL, Precision.INT3),
        (Precision.INT4_CHANNEL, Precision.INT4),
        (Precision.INT5_CHANNEL, Precision.INT5),
        (Precision.INT6_CHANNEL, Precision.INT6),
    ],
)
@given(rows=st.sampled_from([8, 32, 128, 136, 256, 304]), seed=st.integers(0, 2**31), broken=st.booleans())
@every_dtype
@settings(max_examples=10, deadline=None)
def test_by_channel_is_by_row_along_the_rows_of_each_block(
    by_channel: Precision, by_row: Precision, dtype: torch.dtype, rows: int, seed: int, broken: bool
) -> None:
    """A multiple of 8 rows can be turned, so that the quantiser by row sees a channel of a block as its row."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, 24, generator=generator) * 10.0 ** torch.randint(-4, 5, (1, 3, 24), generator=generator)
    if broken:
        for value in (float("nan"), float("inf"), float("-inf")):
            x[torch.rand(x.shape, generator=generator) < 0.02] = value
    x = x.to(dtype)
    turned = [block.permute(2, 1, 0).contiguous() for block in x.split(128)]
    expected = torch.cat([round_trip(by_row, block).permute(2, 1, 0) for block in turned])
    assert torch.equal(bits(round_trip(by_channel, x)), bits(expected))


@every_by_channel
@every_dtype
def test_non_finite_elements_are_kept_to_their_channel_of_their_block(precision: Precision, dtype: torch.dtype) -> None:
    clean = torch.randn(300, 2, 16).to(dtype)
    broken = clean.clone()
    broken[130, 0, 3], broken[131, 0, 4], broken[290, 1, 5] = float("nan"), float("inf"), float("-inf")
    restored = round_trip(precision, broken)
    assert bool(torch.isfinite(restored).all())
    touched = torch.zeros(300, 2, 16, dtype=torch.bool)
    touched[128:256, 0, 3:5] = touched[256:, 1, 5] = True
    assert torch.equal(restored[~touched], round_trip(precision, clean)[~touched])
    finite = torch.isfinite(broken)
    bound = quantiser_for(precision).error_bound(broken)
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
