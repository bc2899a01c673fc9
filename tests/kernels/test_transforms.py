"""Transforms undo themselves, are the same on every machine, and do what they are for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.quantisers import quantiser_for
from spectrumkv_sglang.kernels.transforms import Angles, Transform, transform_for
from spectrumkv_sglang.kernels.transforms.derope import rotate
from spectrumkv_sglang.kernels.transforms.hadamard import hadamard_block, signed_matrices, signs

every_transform = pytest.mark.parametrize("transform", list(Transform), ids=lambda t: t.name)


def angles_of(positions: torch.Tensor, rotated: int, factor: float = 1.0) -> Angles:
    """cos and sin as a model gives them: both halves of the rotated dims turn by the same angle."""
    turns = positions[:, None] / 10_000 ** (torch.arange(0, rotated, 2) / rotated)
    turns = torch.cat([turns, turns], dim=-1)
    return turns.cos() * factor, turns.sin() * factor


def round_trip_error(x: torch.Tensor, transform: Transform, precision: Precision, angles: Angles | None) -> float:
    chosen, quantiser = transform_for(transform), quantiser_for(precision)
    sent = quantiser.quantise(chosen.forward(x, angles), chosen.near_normal)
    return (chosen.inverse(quantiser.dequantise(*sent, torch.float32), angles) - x).square().mean().item()


@every_transform
@given(
    rows=st.integers(0, 20),
    heads=st.integers(1, 3),
    dim=st.sampled_from([16, 64, 80, 96, 128, 256]),
    exponent=st.floats(-6, 6),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=30, deadline=None)
def test_inverse_undoes_forward_within_float32_rounding(
    transform: Transform, rows: int, heads: int, dim: int, exponent: float, seed: int
) -> None:
    x = torch.randn(rows, heads, dim, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    angles = angles_of(torch.arange(rows) * 1000.0, dim // 2, factor=1.3)
    chosen = transform_for(transform)
    chosen.check_dim(dim)
    there = chosen.forward(x, angles)
    assert (there.dtype, there.shape) == (torch.float32, x.shape)
    assert bool(((chosen.inverse(there, angles) - x).abs() <= 2**-20 * x.norm(dim=-1, keepdim=True)).all())


def test_wire_values() -> None:
    assert {transform.name: int(transform) for transform in Transform} == {"IDENTITY": 0, "HADAMARD": 1, "DEROPE": 2}


def test_identity_keeps_every_bit_and_needs_no_angles() -> None:
    x = torch.tensor([0.0, -0.0, float("inf"), 1e-42, 3.5, -7.0, 2.0, 1.0]).view(1, 1, 8)
    identity = transform_for(Transform.IDENTITY)
    assert torch.equal(identity.inverse(identity.forward(x)).view(torch.int32), x.view(torch.int32))


def test_signs_never_change() -> None:
    assert "".join("-" if sign < 0 else "+" for sign in signs(64)) == (
        "-+---++--++-+--++-+--++-+-+++--+++++--+-+++-+-+++-+---+---+---++"
    )
    assert signs(256)[:64] == signs(64)


def test_hadamard_is_sylvesters_matrix_with_signed_rows() -> None:
    sylvester = torch.ones(1, 1)
    while len(sylvester) < 64:
        sylvester = torch.cat([torch.cat([sylvester, sylvester], 1), torch.cat([sylvester, -sylvester], 1)])
    x = torch.randn(5, 2, 64)
    expected = (x * torch.tensor(signs(64))) @ sylvester / 8
    assert torch.allclose(transform_for(Transform.HADAMARD).forward(x), expected, atol=1e-5)


def test_hadamard_of_unit_vectors_has_these_signs() -> None:
    unit = torch.eye(16)[[0, 1, 5]].view(3, 1, 16)  # elements 1 and 5 keep their sign, 0 is negated
    assert (transform_for(Transform.HADAMARD).forward(unit)[:, 0] * 4).tolist() == [
        [-1.0] * 16,
        [1.0, -1.0] * 8,
        [1.0, -1.0, 1.0, -1.0, -1.0, 1.0, -1.0, 1.0] * 2,
    ]


@pytest.mark.parametrize(("dim", "block"), [(16, 16), (64, 64), (80, 16), (96, 32), (128, 128), (192, 64), (256, 256)])
def test_hadamard_works_on_the_largest_power_of_two_that_divides_a_head(dim: int, block: int) -> None:
    assert hadamard_block(dim) == block
    matrices = signed_matrices(dim).double()
    assert matrices.shape == (dim // block, block, block)
    assert torch.allclose(matrices @ matrices.mT, torch.eye(block, dtype=torch.float64).expand_as(matrices), atol=1e-6)
    x = torch.zeros(1, 1, dim)
    x[..., dim - 1] = 1.0
    spread = transform_for(Transform.HADAMARD).forward(x).flatten()
    assert not spread[: dim - block].any()
    assert torch.allclose(spread[dim - block :].abs(), torch.tensor(block**-0.5))


@pytest.mark.parametrize("dim", [8, 24, 72, 100])
def test_hadamard_refuses_heads_that_it_could_only_cut_small(dim: int) -> None:
    hadamard = transform_for(Transform.HADAMARD)
    for refused in (lambda: hadamard.check_dim(dim), lambda: hadamard.forward(torch.zeros(1, 1, dim))):
        with pytest.raises(ValueError, match=f"expected a head dimension that is a multiple of 16, got {dim}"):
            refused()


def test_hadamard_and_cut_tails_take_outliers_out_of_2_bit_values() -> None:
    x = torch.randn(500, 2, 128, generator=torch.Generator().manual_seed(0))
    x[..., 17] *= 12.0
    plain = round_trip_error(x, Transform.IDENTITY, Precision.INT2, None)
    assert round_trip_error(x, Transform.HADAMARD, Precision.INT2, None) < 0.4 * plain


def test_derope_takes_the_turns_of_positions_out_of_keys() -> None:
    """Keys of one direction, turned by their positions: by channel they are constant only before the turn."""
    positions = torch.arange(128.0)
    angles = angles_of(positions, 64)
    x = rotate(torch.randn(1, 2, 64).expand(128, 2, 64), *angles)
    derotated = transform_for(Transform.DEROPE).forward(x, angles)
    assert derotated.std(dim=0).max() < 1e-4 < 0.1 < x.std(dim=0).max()
    turned = round_trip_error(x, Transform.IDENTITY, Precision.INT3_CHANNEL, None)
    assert round_trip_error(x, Transform.DEROPE, Precision.INT3_CHANNEL, angles) < 1e-3 * turned


def test_derope_turns_halves_and_leaves_dimensions_behind_the_rotated_ones() -> None:
    cos, sin = torch.tensor([[0.6, 1.0, 0.6, 1.0]]), torch.tensor([[0.8, 0.0, 0.8, 0.0]])
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).view(1, 1, 6)
    derope = transform_for(Transform.DEROPE)
    # Dimensions 0 and 2 are a pair, turned by the angle of cosine 0.6 and sine 0.8.
    assert derope.inverse(x, (cos, sin)).flatten().tolist() == pytest.approx([-1.8, 2.0, 2.6, 4.0, 5.0, 6.0])
    assert derope.forward(x, (cos, sin)).flatten().tolist() == pytest.approx([3.0, 2.0, 1.0, 4.0, 5.0, 6.0])


def test_derope_divides_the_factor_of_yarn_out() -> None:
    positions = torch.arange(7.0)
    keys = torch.randn(7, 2, 32)
    angles = angles_of(positions, 32, factor=1.4)
    seen = rotate(keys, *angles)
    assert torch.allclose(seen.norm(dim=-1), keys.norm(dim=-1) * 1.4, rtol=1e-5)
    assert torch.allclose(transform_for(Transform.DEROPE).forward(seen, angles), keys, atol=1e-5)


@pytest.mark.parametrize(
    ("angles", "message"),
    [
        (None, "expected cos and sin of 4 rows, got none"),
        ((torch.ones(3, 8), torch.ones(3, 8)), r"expected cos and sin \[4, rotated dims\], got \[3, 8\] and \[3, 8\]"),
        ((torch.ones(4, 8), torch.ones(4, 6)), r"got \[4, 8\] and \[4, 6\]"),
        ((torch.ones(4, 18), torch.ones(4, 18)), "at most the head dimension 16, got 18"),
        ((torch.ones(4, 7), torch.ones(4, 7)), "an even number of rotated dims"),
    ],
)
def test_derope_refuses_angles_of_other_rows_or_models(angles: Angles | None, message: str) -> None:
    derope = transform_for(Transform.DEROPE)
    for turn in (derope.forward, derope.inverse):
        with pytest.raises(ValueError, match=message):
            turn(torch.zeros(4, 1, 16), angles)


@pytest.mark.parametrize("transform", [Transform.HADAMARD, Transform.DEROPE], ids=lambda t: t.name)
def test_elements_that_are_not_finite_are_transformed_as_zeros(transform: Transform) -> None:
    angles = angles_of(torch.arange(4.0), 16)
    broken = torch.randn(4, 2, 16)
    broken[1, 0, 3], broken[1, 0, 9], broken[2, 1, 0] = float("nan"), float("inf"), float("-inf")
    zeroed = torch.where(torch.isfinite(broken), broken, 0.0)
    chosen = transform_for(transform)
    assert torch.equal(chosen.forward(broken, angles), chosen.forward(zeroed, angles))
    assert bool(torch.isnan(broken).any())  # the rows of the caller are left alone
