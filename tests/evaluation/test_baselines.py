"""Baselines: bytes by hand, errors within their bounds, budgets kept."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from spectrumkv_sglang.evaluation.baselines.affine_keys import AffineKeysBaseline
from spectrumkv_sglang.evaluation.baselines.channel_keys import ChannelKeysBaseline
from spectrumkv_sglang.evaluation.baselines.kivi import KiviBaseline
from spectrumkv_sglang.evaluation.baselines.paper import PaperBalancedBaseline, PaperGreedyBaseline, token_bytes
from spectrumkv_sglang.evaluation.baselines.pdtrim import RECENT_TOKENS, SINK_TOKENS, DropTokensBaseline
from spectrumkv_sglang.evaluation.baselines.registry import BUDGETED, FIXED
from spectrumkv_sglang.evaluation.baselines.rounding import affine_groups, symmetric
from spectrumkv_sglang.evaluation.baselines.row_groups import RowGroupsBaseline
from spectrumkv_sglang.evaluation.errors import EvaluationError
from spectrumkv_sglang.evaluation.methods import make_methods
from spectrumkv_sglang.evaluation.prefix import Method, MovedKV, PrefixKV
from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.quantisers import quantiser_for

from .conftest import HEAD_DIM, KV_HEADS, LAYERS, TOKENS

NATIVE = LAYERS * KV_HEADS * HEAD_DIM * 2 * 2  # bytes a token
CELLS = KV_HEADS * HEAD_DIM * TOKENS  # of K or V in a layer
ALL: dict[str, Method] = {**FIXED, **{f"{name}@0.4": make(0.4) for name, make in BUDGETED.items()}}


def key_error(prefix: PrefixKV, moved: MovedKV) -> float:
    """Mean squared error of the keys, all channels but the large one."""
    pairs = zip(moved.buffers.k, prefix.view.buffers.k, strict=True)
    channels = [channel for channel in range(HEAD_DIM) if channel != 5]
    return sum(float((a.float() - b.float())[..., channels].square().mean()) for a, b in pairs) / LAYERS


@pytest.mark.parametrize("name", ALL)
def test_every_baseline_saves_bytes_and_leaves_the_prefix_alone(prefix: PrefixKV, name: str) -> None:
    before = prefix.copied_view().buffers
    moved = ALL[name].move(prefix)
    assert 0.1 * prefix.native_bytes < moved.wire_bytes < prefix.native_bytes
    for layer in range(LAYERS):
        for kv in (0, 1):
            assert torch.equal(prefix.view.buffers.of(layer, kv), before.of(layer, kv))
            assert moved.buffers.of(layer, kv).shape == before.of(layer, kv).shape
            assert moved.buffers.of(layer, kv).dtype == torch.bfloat16
            assert moved.buffers.of(layer, kv).isfinite().all()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("axis", "group"), [(0, 32), (2, 32), (2, 64)])
def test_affine_rounding_errs_by_half_a_step(bits: int, axis: int, group: int) -> None:
    x = torch.randn(100, 2, 64, generator=torch.Generator().manual_seed(0))
    error = (affine_groups(x, bits, axis, group) - x).abs()
    for own, whole in zip(error.split(group, axis), x.split(group, axis), strict=True):
        step = (whole.amax(axis, keepdim=True) - whole.amin(axis, keepdim=True)) / (2**bits - 1)
        # float16 moves the zero by 2^-11 of its size and the scale, over all steps, by 2^-11 of the range.
        float16 = 2**-11 * (whole.abs().amax(axis, keepdim=True) + step * 2**bits)
        assert (own <= step / 2 + float16 + 1e-6).all()


def test_rounding_keeps_constants_and_zeros() -> None:
    assert torch.equal(affine_groups(torch.full((4, 1, 8), 3.0), 2, 0, 4), torch.full((4, 1, 8), 3.0))
    assert torch.equal(symmetric(torch.zeros(4, 2, 8), 4, (1, 2)), torch.zeros(4, 2, 8))


@pytest.mark.parametrize(("bits", "levels"), [(8, 255), (4, 15)])
def test_symmetric_rounding_has_one_scale_over_its_axes(bits: int, levels: int) -> None:
    x = torch.randn(5, 3, 128, generator=torch.Generator().manual_seed(0))
    for token in symmetric(x, bits, (1, 2)):
        assert len(token.unique()) <= levels
    assert (symmetric(x, bits, (1, 2)) - x).abs().amax() <= x.abs().amax() / (levels - 1) * 1.01


def test_bytes_of_kivi(prefix: PrefixKV) -> None:
    moved = KiviBaseline(2, 128).move(prefix)
    rounded = 160  # whole groups of 32 before the last 128 tokens: 172 -> 160
    cells = rounded * KV_HEADS * HEAD_DIM
    layer = 2 * cells // 4 + 2 * (cells // 32) * 4  # 2-bit codes; scale and zero a group of 32, for K and for V
    assert moved.wire_bytes == LAYERS * layer + (TOKENS - rounded) * NATIVE
    for kv in (0, 1):
        own, arrived = prefix.view.buffers.of(0, kv), moved.buffers.of(0, kv)
        assert torch.equal(arrived[rounded:], own[rounded:])
        assert not torch.equal(arrived[:rounded], own[:rounded])


def test_kivi_rounds_keys_by_channel_and_values_by_token(prefix: PrefixKV) -> None:
    moved = KiviBaseline(2, 32).move(prefix)
    key_block, value_row = moved.buffers.k[0][:32, 0].float(), moved.buffers.v[0][0, 0, :32].float()
    assert all(len(key_block[:, channel].unique()) <= 4 for channel in range(HEAD_DIM))
    assert len(value_row.unique()) <= 4


def test_a_prefix_shorter_than_kivi_s_window_stays_native(prefix: PrefixKV) -> None:
    moved = KiviBaseline(2, TOKENS).move(prefix)
    assert moved.wire_bytes == prefix.native_bytes
    assert torch.equal(moved.buffers.k[0], prefix.view.buffers.k[0])


@pytest.mark.parametrize("before_rotation", [True, False])
def test_bytes_of_channel_keys(prefix: PrefixKV, before_rotation: bool) -> None:
    blocks = 3  # 300 tokens in blocks of 128
    params = 4 * KV_HEADS * (blocks * HEAD_DIM + TOKENS)
    moved = ChannelKeysBaseline(4, before_rotation).move(prefix)
    assert moved.wire_bytes == LAYERS * (2 * CELLS // 2 + params)


def test_keys_are_turned_back_before_and_turned_again_after(prefix: PrefixKV) -> None:
    """A channel that is large before the rotation spreads over the others after it; per-channel scales bear only the
    first."""
    turned = dataclasses.replace(prefix, view=prefix.copied_view())
    assert prefix.rotation is not None
    cos, sin = prefix.rotation.layers[0]
    from spectrumkv_sglang.kernels.transforms.derope import rotate

    for keys in turned.view.buffers.k:
        keys.copy_(rotate(keys.float(), cos, sin))
    before = key_error(turned, ChannelKeysBaseline(3, before_rotation=True).move(turned))
    after = key_error(turned, ChannelKeysBaseline(3, before_rotation=False).move(turned))
    assert before < after


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize(("name", "transform"), [("channel", "identity"), ("kvquant", "derope")])
def test_profiles_and_baselines_of_the_same_scheme_agree(
    prefix: PrefixKV, tmp_path: Path, bits: int, name: str, transform: str
) -> None:
    """Two implementations, the served one and rounding in place, differ in where float32 rounds and in headers."""
    tier = {"keys": f"int{bits}_channel", "values": f"int{bits}"}
    path = tmp_path / "same.yaml"
    path.write_text(json.dumps({"name": "same", "tiers": {"high": tier}, "transform": {"keys": transform}}))
    made = make_methods([str(path)], [f"{name}-{bits}"], budget=None, scorer="window", seed=0, folder=tmp_path)
    served, rounded = made[str(path)].move(prefix), made[f"{name}-{bits}"].move(prefix)
    assert rounded.wire_bytes < served.wire_bytes < 1.04 * rounded.wire_bytes  # alignment, on few tokens
    for kv in (0, 1):
        for layer in range(LAYERS):
            own = prefix.view.buffers.of(layer, kv).float()
            errors = [float((moved.buffers.of(layer, kv).float() - own).square().mean()) for moved in (served, rounded)]
            assert errors[0] == pytest.approx(errors[1], rel=1e-3)


def test_bytes_of_affine_keys(prefix: PrefixKV) -> None:
    params = 4 * KV_HEADS * (2 * TOKENS + HEAD_DIM)  # scale and zero a row of K and of V, mean and scale a channel
    assert AffineKeysBaseline(4, False).move(prefix).wire_bytes == LAYERS * (2 * CELLS // 2 + params)
    assert AffineKeysBaseline(3, True).move(prefix).wire_bytes == LAYERS * (2 * CELLS * 3 // 8 + params)


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("by_deviation", [True, False])
def test_a_large_channel_costs_the_others_nothing_once_its_mean_is_out(
    prefix: PrefixKV, bits: int, by_deviation: bool
) -> None:
    """Channel 5 is 20 larger than the others: by row it takes the levels of the whole head."""
    affine, by_row = AffineKeysBaseline(bits, by_deviation).move(prefix), RowGroupsBaseline(bits, HEAD_DIM).move(prefix)
    assert key_error(prefix, affine) < key_error(prefix, by_row) / 8
    without = dataclasses.replace(prefix, view=prefix.copied_view())
    for keys in without.view.buffers.k:
        keys[..., 5] -= 20
    expected = key_error(without, RowGroupsBaseline(bits, HEAD_DIM).move(without))
    assert key_error(prefix, affine) == pytest.approx(expected, rel=0.1)
    assert torch.equal(affine.buffers.v[0], by_row.buffers.v[0])


@pytest.mark.parametrize("by_deviation", [True, False])
def test_a_channel_that_is_constant_or_beyond_float16_stays_finite(prefix: PrefixKV, by_deviation: bool) -> None:
    odd = dataclasses.replace(prefix, view=prefix.copied_view())
    odd.view.buffers.k[0][..., 1] = 3.0
    odd.view.buffers.k[0][..., 2] = 1e9
    arrived = AffineKeysBaseline(4, by_deviation).move(odd).buffers.k[0]
    assert arrived.isfinite().all()
    assert torch.equal(arrived[..., 1], odd.view.buffers.k[0][..., 1])


def test_a_channel_of_another_size_costs_no_more_than_its_size(prefix: PrefixKV) -> None:
    """With a scale of its own a channel 16 times as large leaves the others as they arrive without it."""
    large = dataclasses.replace(prefix, view=prefix.copied_view())
    for keys in large.view.buffers.k:
        keys[..., 5] = (keys[..., 5] - 20) * 16
    for by_deviation in (True, False):
        errors = [key_error(own, AffineKeysBaseline(4, by_deviation).move(own)) for own in (prefix, large)]
        assert errors[1] == pytest.approx(errors[0], rel=0.05)
        assert errors[1] < key_error(large, RowGroupsBaseline(4, HEAD_DIM).move(large)) / 8


@pytest.mark.parametrize(("group", "groups"), [(16, 4), (32, 2), (48, 2), (64, 1)])
def test_bytes_of_groups_of_a_row(prefix: PrefixKV, group: int, groups: int) -> None:
    moved = RowGroupsBaseline(4, group).move(prefix)
    assert moved.wire_bytes == LAYERS * (2 * CELLS // 2 + 2 * 4 * KV_HEADS * TOKENS * groups)


@pytest.mark.parametrize(("bits", "precision"), [(3, Precision.INT3), (4, Precision.INT4)])
@pytest.mark.parametrize("group", [16, 32])
def test_groups_of_a_row_are_the_served_quantiser_on_shorter_heads(
    prefix: PrefixKV, bits: int, precision: Precision, group: int
) -> None:
    moved, quantiser = RowGroupsBaseline(bits, group).move(prefix), quantiser_for(precision)
    wire_bytes = 0
    for layer in range(LAYERS):
        for kv in (0, 1):
            own = prefix.view.buffers.of(layer, kv)
            heads = own.reshape(TOKENS, -1, group)
            codes, params = quantiser.quantise(heads)
            wire_bytes += codes.numel() + params.numel() * params.itemsize
            served = quantiser.dequantise(codes, params, own.dtype).reshape(own.shape)
            errors = [float((x.float() - own).square().mean()) for x in (served, moved.buffers.of(layer, kv))]
            assert errors[0] == pytest.approx(errors[1], rel=1e-3)
    assert moved.wire_bytes == wire_bytes


def test_smaller_groups_cost_more_bytes_and_lose_less(prefix: PrefixKV) -> None:
    rows = [RowGroupsBaseline(4, group).move(prefix) for group in (16, 32, 64)]
    assert rows[0].wire_bytes > rows[1].wire_bytes > rows[2].wire_bytes
    errors = [key_error(prefix, moved) for moved in rows]
    assert errors[0] < errors[1] < errors[2]


def test_a_rotation_that_is_not_known_is_refused(prefix: PrefixKV) -> None:
    unknown = dataclasses.replace(prefix, view=dataclasses.replace(prefix.view, rotation=None))
    with pytest.raises(EvaluationError, match=r"not known.*leave baselines named kvquant"):
        ChannelKeysBaseline(4, before_rotation=True).move(unknown)
    ChannelKeysBaseline(4, before_rotation=False).move(unknown)


@pytest.mark.parametrize("budget", [0.3, 0.5, 0.9])
def test_dropping_keeps_the_budget_and_the_most_important(prefix: PrefixKV, budget: float) -> None:
    moved = DropTokensBaseline(budget).move(prefix)
    assert moved.kept is not None
    kept = int(moved.kept.sum())
    assert moved.wire_bytes == kept * NATIVE + -(-TOKENS // 8)
    assert budget * prefix.native_bytes - NATIVE < moved.wire_bytes <= budget * prefix.native_bytes
    assert moved.kept[:SINK_TOKENS].all()
    assert moved.kept[-RECENT_TOKENS:].all()
    # The observed importance falls from the first token on.
    assert moved.kept[: kept - RECENT_TOKENS].all()


def test_the_paper_s_shares(prefix: PrefixKV) -> None:
    int8, int4 = token_bytes(prefix.geometry, 8), token_bytes(prefix.geometry, 4)
    assert (int8, int4) == (LAYERS * (2 * 128 + 4), LAYERS * (128 + 4))
    uniform = (int8 * TOKENS + TOKENS // 4 + 1) / prefix.native_bytes
    assert PaperGreedyBaseline(uniform).counts(prefix) == (0, TOKENS, 0)
    high, mid, low = PaperGreedyBaseline(0.75).counts(prefix)
    assert (low, high + mid) == (0, TOKENS)
    assert abs(high - (2 * 0.75 - 1) * TOKENS) < 0.02 * TOKENS
    high, mid, low = PaperGreedyBaseline(0.4).counts(prefix)
    assert (high, mid + low) == (0, TOKENS)
    assert abs(mid - (4 * 0.4 - 1) * TOKENS) < 0.06 * TOKENS  # scales cost some of the share
    assert PaperGreedyBaseline(0.1).counts(prefix) == (0, 0, TOKENS)


@pytest.mark.parametrize("budget", [0.3, 0.45, 0.6, 0.95])
def test_the_paper_s_bytes_keep_the_budget(prefix: PrefixKV, budget: float) -> None:
    moved = PaperGreedyBaseline(budget).move(prefix)
    assert budget * prefix.native_bytes - NATIVE < moved.wire_bytes <= budget * prefix.native_bytes


def test_the_paper_s_balanced_split_favours_late_tokens(prefix: PrefixKV) -> None:
    moved = PaperBalancedBaseline().move(prefix)
    assert moved.tokens_by_tier == (60, 120, 120)
    own, arrived = prefix.view.buffers.k[0], moved.buffers.k[0]
    assert torch.equal(arrived[-60:], own[-60:])
    mid, low = ((arrived - own)[part].float().square().mean() for part in (slice(120, 240), slice(0, 120)))
    assert 0 < mid < low
