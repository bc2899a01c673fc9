"""Points of the space are profiles whose bytes keep to their budgets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrumkv_sglang.calibration.allocation import NominalChunk
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.profiles.tier import Tier
from spectrumkv_sglang.search.errors import TuneError
from spectrumkv_sglang.search.space import Point, Space, space_from
from spectrumkv_sglang.search.wire_cost import wire_cost

GEOMETRY = KVGeometry(6, 2, 64, 64, 1, "bfloat16")
points = st.sampled_from(list(Space(value_scales=("row", "channel"))))


def test_thousands_of_points_each_once() -> None:
    space = Space()
    found = list(space)
    assert 3000 < len(found) <= space.size
    assert len({point.name for point in found}) == len(found) == len(set(found))


@given(points)
@settings(max_examples=25, deadline=None)
def test_a_points_bytes_keep_to_its_budget_and_fill_it(point: Point) -> None:
    cost = wire_cost(point, NominalChunk(GEOMETRY, 2048))
    assert cost.budget * 0.98 < cost.wire_ratio <= cost.budget + 1e-12
    assert sum(cost.tier_shares) == pytest.approx(1)
    assert (cost.tier_shares[Tier.MID] > 0) is (point.upgrade > 0 and (point.key_bits, point.value_bits) != (8, 8))


def test_edges_and_upgrades_cost_bytes() -> None:
    chunk = NominalChunk(GEOMETRY, 2048)
    plain = Point(4, 3, "channel", "row", "identity", "hadamard", 0, 0.0)
    edged = Point(4, 3, "channel", "row", "identity", "hadamard", 1, 0.0)
    upgraded = Point(4, 3, "channel", "row", "identity", "hadamard", 0, 0.5)
    assert wire_cost(plain, chunk).budget < min(wire_cost(edged, chunk).budget, wire_cost(upgraded, chunk).budget)
    table = edged.profile(6).table(GEOMETRY)
    assert [int(layer[0, 0]) for layer in table.values[Tier.LOW]] == [10, 5, 5, 5, 5, 10]
    assert 0.4 < wire_cost(upgraded, chunk).tier_shares[Tier.MID] < 0.6


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"key_bits": "2,7"}, "--key-bits 2,7: 7 is none of 2, 3, 4, 5, 6, 8"),
        ({"key_bits": "4,2"}, "from the least to the largest"),
        ({"value_bits": "3,3"}, "different choices"),
        ({"value_bits": "three"}, "expected numbers"),
        ({"value_transform": "derope"}, "derope is none of identity, hadamard"),
        ({"edges": "-1,0"}, "at least 0"),
        ({"upgrade": "0,1.5"}, "from 0 to 1"),
    ],
)
def test_choices_that_are_none(choices: dict[str, str], message: str) -> None:
    with pytest.raises(TuneError, match=message):
        space_from(**choices)


def test_edges_that_leave_no_layer() -> None:
    with pytest.raises(TuneError, match="has 4 layers"):
        Space(edges=(0, 2)).check_layers(4)
