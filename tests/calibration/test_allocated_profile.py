"""Allocations as profile files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spectrumkv_sglang.calibration.allocated_profile import make_profile, profile_yaml
from spectrumkv_sglang.calibration.allocation import Allocation, NominalChunk, allocate
from spectrumkv_sglang.calibration.candidates import DEFAULT
from spectrumkv_sglang.calibration.expected_cost import ExpectedCost, Granularity
from spectrumkv_sglang.calibration.sensitivity import Sensitivity
from spectrumkv_sglang.config import load_config
from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.transforms import Transform
from spectrumkv_sglang.profiles.profile import load_profile
from spectrumkv_sglang.profiles.tier import Tier


def _allocate(sensitivity: Sensitivity, granularity: Granularity, target: float) -> Allocation:
    expected = ExpectedCost(sensitivity, DEFAULT, granularity)
    return allocate(expected, DEFAULT, NominalChunk(sensitivity.geometry), target)


@pytest.mark.parametrize("granularity", Granularity)
@pytest.mark.parametrize("target", [0.17, 0.27, 0.5])
def test_the_file_says_what_was_allocated(
    sensitivity: Sensitivity, granularity: Granularity, target: float, tmp_path: Path
) -> None:
    allocation = _allocate(sensitivity, granularity, target)
    path = tmp_path / "made.yaml"
    path.write_text(profile_yaml(make_profile(allocation, "made", "for a test", target), ["one", "two"]))
    assert path.read_text().startswith("# one\n# two\nname: made\n")
    table = load_profile(path).table(sensitivity.geometry)
    assert np.array_equal(table.values[Tier.LOW], allocation.cells)
    assert np.array_equal(table.values[Tier.MID], allocation.stepped_up())
    assert (table.values[Tier.HIGH] == Precision.NATIVE).all()
    assert (table.transforms == [Transform.IDENTITY, Transform.HADAMARD]).all()


@pytest.mark.parametrize("granularity", Granularity)
def test_a_configuration_takes_the_file_with_its_budget(
    sensitivity: Sensitivity, granularity: Granularity, tmp_path: Path
) -> None:
    path = tmp_path / "made.yaml"
    path.write_text(profile_yaml(make_profile(_allocate(sensitivity, granularity, 0.27), "made", "", 0.27), []))
    assert load_config(None, {}, {"profile": ("--profile", str(path))}).budget == 0.27
    stated = load_config(None, {}, {"profile": ("--profile", str(path)), "budget": ("--budget", 0.27)})
    assert stated.reachable_budget <= 0.27


def test_mid_is_one_candidate_up_and_missing_where_there_is_none(sensitivity: Sensitivity) -> None:
    dearest = _allocate(sensitivity, Granularity.LAYERS, 0.6)
    assert (dearest.cells[:, 0] == Precision.INT8_CHANNEL).all()
    assert make_profile(dearest, "made", "", 0.6).tiers_defined == (Tier.HIGH, Tier.LOW)
    cheaper = _allocate(sensitivity, Granularity.PARTS, 0.25)
    up = cheaper.stepped_up()
    for kv in (0, 1):
        precisions = DEFAULT.of(kv).precisions
        place = precisions.index(Precision(int(cheaper.cells[0, kv, 0])))
        assert (up[:, kv] == precisions[place + 1]).all()


def test_layers_of_one_precision_share_a_line(sensitivity: Sensitivity) -> None:
    profile = make_profile(_allocate(sensitivity, Granularity.LAYERS, 0.27), "made", "", 0.27)
    said = [(override.tiers, override.keys, override.values) for override in profile.layer_overrides]
    assert len({repr(line) for line in said}) == len(said)
    assert not profile.head_overrides
