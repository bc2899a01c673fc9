"""Profiles: shipped files, overrides, fallback of tiers, and refused files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.quantisers import quantiser_for
from spectrumkv_sglang.kernels.transforms import Transform
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.layout import bytes_per_row
from spectrumkv_sglang.profiles.distortion import tier_distortion
from spectrumkv_sglang.profiles.errors import ProfileError
from spectrumkv_sglang.profiles.profile import Profile, load_profile, shipped_profiles
from spectrumkv_sglang.profiles.tier import Tier

GEOMETRY = KVGeometry(layers=4, kv_heads=3, head_dim=64, v_head_dim=64, page_size=1, dtype="bfloat16")
NATIVE, INT8, FP8, INT4 = Precision.NATIVE, Precision.INT8, Precision.FP8_E4M3, Precision.INT4
INT4_CHANNEL = Precision.INT4_CHANNEL
CHANNEL = {bits: Precision[f"INT{bits}_CHANNEL"] for bits in (3, 5, 8)}
ROW = {bits: Precision[f"INT{bits}"] for bits in (2, 3, 4, 6)}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("native-packed", {Tier.HIGH: (NATIVE, NATIVE)}),
        ("int8", {Tier.HIGH: (INT8, INT8)}),
        ("fp8", {Tier.HIGH: (FP8, FP8)}),
        ("spectrum-paper", {Tier.HIGH: (NATIVE, NATIVE), Tier.MID: (INT8, INT8), Tier.LOW: (INT4, INT4)}),
        ("spectrum-safe", {Tier.HIGH: (NATIVE, NATIVE), Tier.MID: (INT8, INT8)}),
        ("k8v4", {Tier.HIGH: (NATIVE, NATIVE), Tier.MID: (INT8, INT8), Tier.LOW: (INT8, INT4)}),
        ("near-lossless", {Tier.HIGH: (NATIVE, NATIVE), Tier.MID: (CHANNEL[8], INT8), Tier.LOW: (CHANNEL[8], ROW[6])}),
        ("balanced", {Tier.HIGH: (NATIVE, NATIVE), Tier.MID: (CHANNEL[8], INT8), Tier.LOW: (CHANNEL[5], ROW[3])}),
        ("aggressive", {Tier.HIGH: (NATIVE, NATIVE), Tier.MID: (CHANNEL[5], ROW[4]), Tier.LOW: (CHANNEL[3], ROW[2])}),
    ],
)
def test_shipped_profile(name: str, expected: dict[Tier, tuple[Precision, Precision]]) -> None:
    profile = load_profile(name)
    assert {tier: (entry.keys, entry.values) for tier, entry in profile.tiers.items()} == expected
    assert profile.tiers_defined == tuple(expected)


def test_a_profile_may_have_another_name() -> None:
    assert load_profile("spectrum") == load_profile("spectrum-paper")
    assert "spectrum" not in shipped_profiles()


def test_transforms_reach_the_table() -> None:
    balanced = load_profile("balanced").table(GEOMETRY)
    assert all(balanced.transform(layer, 0) is Transform.IDENTITY for layer in range(GEOMETRY.layers))
    assert all(balanced.transform(layer, 1) is Transform.HADAMARD for layer in range(GEOMETRY.layers))
    assert not load_profile("spectrum-paper").table(GEOMETRY).transforms.any()


def test_every_shipped_file_loads_under_its_own_name() -> None:
    assert len(shipped_profiles()) >= 7
    for name in shipped_profiles():
        profile = load_profile(name)
        assert profile.name == name
        assert profile.description
        cost = bytes_per_row(GEOMETRY, profile.table(GEOMETRY))
        assert (np.diff(cost) <= 0).all()


def test_a_missing_tier_gets_the_next_higher_one() -> None:
    table = load_profile("spectrum-safe").table(GEOMETRY).values
    assert (table[Tier.LOW] == INT8).all()
    assert (load_profile("fp8").table(GEOMETRY).values == FP8).all()


def test_a_tier_that_is_not_allowed_gets_the_next_higher_one() -> None:
    profile = load_profile("spectrum")
    without_low = profile.table(GEOMETRY, [Tier.HIGH, Tier.MID]).values
    assert (without_low[Tier.LOW] == INT8).all()
    without_mid = profile.table(GEOMETRY, [Tier.HIGH, Tier.LOW]).values
    assert (without_mid[Tier.MID] == NATIVE).all()
    assert (without_mid[Tier.LOW] == INT4).all()
    assert profile.usable_tiers([Tier.LOW, Tier.HIGH]) == (Tier.HIGH, Tier.LOW)
    with pytest.raises(ProfileError, match="must contain high"):
        profile.usable_tiers([Tier.MID])


def write_profile(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


SPECTRUM = """
name: mine
tiers:
  high: {keys: native, values: native}
  mid: {keys: int8, values: int8}
  low: {keys: int4, values: int4}
"""


def test_a_single_tier_may_share_scales_between_rows(tmp_path: Path) -> None:
    path = write_profile(tmp_path, "name: x\ntiers: {high: {keys: int4_channel, values: int4}}")
    table = load_profile(path).table(GEOMETRY).values
    assert (table[:, :, 0] == INT4_CHANNEL).all()
    assert (table[:, :, 1] == INT4).all()


def test_overrides_by_layer_then_by_head(tmp_path: Path) -> None:
    path = write_profile(
        tmp_path,
        SPECTRUM
        + """
layer_overrides:
  - {layers: first, keys: native, values: native}
  - {layers: last, tiers: [low], keys: int8}
  - {layers: [1, 2], tiers: [mid], keys: native}
head_overrides:
  - {heads: [2], tiers: [low], keys: fp8, values: fp8}
  - {heads: [0], layers: [1], tiers: [low], values: int8}
""",
    )
    table = load_profile(path).table(GEOMETRY).values
    assert (table[Tier.HIGH] == NATIVE).all()
    assert table[Tier.MID, :, 0, 0].tolist() == [NATIVE, NATIVE, NATIVE, INT8]
    assert table[Tier.MID, :, 1, 0].tolist() == [NATIVE, INT8, INT8, INT8]
    assert (table[Tier.LOW, :, :, 2] == FP8).all()
    assert table[Tier.LOW, :, 0, 1].tolist() == [NATIVE, INT4, INT4, INT8]
    assert table[Tier.LOW, :, 1, 1].tolist() == [NATIVE, INT4, INT4, INT4]
    assert table[Tier.LOW, :, 1, 0].tolist() == [NATIVE, INT8, INT4, INT4]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("layer_overrides: [{layers: [4], keys: native}]", "overrides layer 4, but this model has 4"),
        ("head_overrides: [{heads: [3], tiers: [low], keys: int8}]", "overrides KV head 3, but this model has 3"),
    ],
)
def test_a_profile_for_another_model_is_refused(tmp_path: Path, override: str, message: str) -> None:
    profile = load_profile(write_profile(tmp_path, SPECTRUM + override))
    with pytest.raises(ProfileError, match=message):
        profile.table(GEOMETRY)
    nominal = profile.nominal_geometry()
    assert profile.table(nominal).layers == nominal.layers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a list", "must be a mapping"),
        ("name: [", "not valid YAML"),
        ("name: x\ntiers: {}", "tier high must be defined"),
        ("name: x\ntiers: {mid: {keys: int8, values: int8}}", "tier high must be defined"),
        ("name: x\ntiers: {top: {keys: int8, values: int8}}", "choose from high, mid, low"),
        (
            "name: x\ntiers: {high: {keys: int7, values: int8}}",
            "tiers.high.keys: .*unknown precision 'int7'.*int2, int2_channel, int3, .*int8_channel, native",
        ),
        ("name: x\ntiers: {high: {keys: int8}}", "tiers.high.values: Field required"),
        ("tiers: {high: {keys: int8, values: int8}}", "name: Field required"),
        (SPECTRUM + "colour: red", "colour: Extra inputs"),
        (SPECTRUM + "transform: hadamard", "transform: .*Transforms"),
        (SPECTRUM + "transform: {values: fourier}", "transform.values: .*unknown transform 'fourier'.*hadamard"),
        (SPECTRUM + "transform: {values: derope}", "derope is for keys"),
        (SPECTRUM + "budget: 0", "budget"),
        (SPECTRUM + "codec: none", r"codec belongs in the launch config.*remove it here"),
        (SPECTRUM + "codec: zstd", r"codec belongs in the launch config.*remove it here"),
        (SPECTRUM + "layer_overrides: [{layers: first}]", "states keys, values, or both"),
        (SPECTRUM + "layer_overrides: [{layers: [], keys: int8}]", "layer_overrides"),
        (SPECTRUM + "layer_overrides: [{layers: [-1], keys: int8}]", "layer_overrides"),
        (SPECTRUM + "layer_overrides: [{layers: middle, keys: int8}]", "layer_overrides"),
        (SPECTRUM + "layer_overrides: [{layers: first, heads: [1], keys: int8}]", "heads: Extra inputs"),
        (SPECTRUM + "layer_overrides: [{layers: first, tiers: [low], keys: native}]", "tier low takes more bytes"),
        (
            "name: x\ntiers: {high: {keys: int8, values: int8}}\n"
            "layer_overrides: [{layers: all, tiers: [low], keys: int4}]",
            "tier low, which the profile does not define",
        ),
        (SPECTRUM.replace("keys: native", "keys: int4_channel"), "high travels in int4_channel, where 128 rows share"),
        (SPECTRUM + "head_overrides: [{heads: [0], values: int4_channel}]", "unused slots of a last page, would spoil"),
        ("name: x\ntiers: {high: {keys: int4, values: int8}, low: {keys: int8, values: int4}}", "takes more bytes"),
    ],
)
def test_a_malformed_file_is_refused_by_name_and_field(tmp_path: Path, text: str, message: str) -> None:
    path = write_profile(tmp_path, text)
    with pytest.raises(ProfileError, match=message) as caught:
        load_profile(path)
    assert str(path) in str(caught.value)


def test_unknown_names_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"unknown profile 'spektrum': choose from .*spectrum"):
        load_profile("spektrum")
    with pytest.raises(ProfileError, match="cannot read profile file"):
        load_profile(str(tmp_path / "absent.yaml"))


def test_distortion_is_the_mean_over_the_cells() -> None:
    d8, d4 = quantiser_for(INT8).relative_distortion, quantiser_for(INT4).relative_distortion
    assert tier_distortion(load_profile("spectrum").table(GEOMETRY)) == pytest.approx([0.0, d8, d4])
    assert tier_distortion(load_profile("k8v4").table(GEOMETRY)) == pytest.approx([0.0, d8, (d8 + d4) / 2])
    assert 0 < d8 < d4 < 1


def test_profiles_are_immutable() -> None:
    profile = load_profile("spectrum")
    with pytest.raises(ValueError, match="frozen"):
        profile.name = "other"
    assert profile == Profile.model_validate(
        {"name": "spectrum-paper", "description": profile.description, "tiers": dict(profile.tiers)}
    )
