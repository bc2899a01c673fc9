"""Points of the space are profiles whose bytes keep to their budgets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrumkv_sglang.calibration.allocation import NominalChunk
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.profiles.chunk_plan import plan_chunk
from spectrumkv_sglang.profiles.tier import Tier
from spectrumkv_sglang.search.errors import TuneError
from spectrumkv_sglang.search.space import Point, Space, space_from
from spectrumkv_sglang.search.wire_cost import budget_of, upgraded_tokens, wire_cost
from spectrumkv_sglang.transfer.chunk_planner import CHUNK_MESSAGE_BYTES, SUBCHUNK_MESSAGE_BYTES

GEOMETRY = KVGeometry(6, 2, 64, 64, 1, "bfloat16")
LONG = NominalChunk(KVGeometry(30, 8, 128, 128, 1, "bfloat16"), 4096)
"""So many bytes that a plan goes by bounds."""
SMALL_MODEL = NominalChunk(KVGeometry(24, 2, 64, 64, 1, "bfloat16"))
SMALL_SLOTS = NominalChunk(KVGeometry(6, 2, 64, 64, 8, "bfloat16"), 1000, slot_bytes=2**17)
LARGE_HEADS = NominalChunk(KVGeometry(18, 1, 256, 256, 16, "bfloat16"))
NO_TRANSFORM = ("identity", "identity")
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


SHORT = NominalChunk(GEOMETRY, 260)
"""256 tokens beside the sinks: at a half the blocks of 128 of both tiers are full; one upgrade more takes another."""


@given(points.filter(lambda point: point.upgrade), st.sampled_from([NominalChunk(GEOMETRY, 1024), LONG]))
@settings(max_examples=25, deadline=None)
def test_the_budget_upgrades_the_share_of_tokens_that_the_point_says(point: Point, chunk: NominalChunk) -> None:
    cost = wire_cost(point, chunk)
    asked = upgraded_tokens(point, chunk)
    assert 0 <= round(cost.tier_shares[Tier.MID] * chunk.tokens) - asked <= 0.01 * chunk.tokens + 1
    assert cost.tier_shares[Tier.HIGH] * chunk.tokens == pytest.approx(chunk.sink_tokens)


@pytest.mark.parametrize("rounding", [-1e-9, 0.0, 1e-9])
@pytest.mark.parametrize("scales", ["row", "channel"])
def test_the_last_digit_of_a_budget_decides_nothing(rounding: float, scales: str) -> None:
    point = Point(2, 2, scales, "row", "derope", "identity", 0, 0.5)
    table = point.profile(GEOMETRY.layers).table(GEOMETRY)
    planned = plan_chunk(
        np.ones(SHORT.tokens),
        GEOMETRY,
        table,
        budget_of(point, SHORT) * (1 + rounding),
        SHORT.slot_bytes,
        np.arange(SHORT.tokens) < SHORT.sink_tokens,
        tuple(Tier),
        SUBCHUNK_MESSAGE_BYTES + CHUNK_MESSAGE_BYTES + len(table.to_bytes()),
    )
    assert (planned.tiers == Tier.MID).sum() == upgraded_tokens(point, SHORT) == 128


@pytest.mark.parametrize(
    ("chunk", "point", "budget", "wire_ratio"),
    [
        # Cut exactly: some sub-chunks, scales of rows, of channels, of both.
        (
            SMALL_MODEL,
            Point(2, 3, "channel", "channel", *NO_TRANSFORM, 0, 0.25),
            0.1885354071855545,
            0.18804712096850076,
        ),
        (SMALL_MODEL, Point(4, 3, "row", "channel", *NO_TRANSFORM, 2, 0.75), 0.3275328030188878, 0.3275124529997508),
        (SMALL_MODEL, Point(6, 5, "row", "channel", *NO_TRANSFORM, 2, 0.5), 0.42847367624441784, 0.4284736712773641),
        # Small slots, pages of 8 tokens, the last one not full.
        (SMALL_SLOTS, Point(3, 3, "row", "row", *NO_TRANSFORM, 1, 0.5), 0.34935139973958335, 0.34935123697916665),
        (SMALL_SLOTS, Point(6, 8, "channel", "row", *NO_TRANSFORM, 2, 0.75), 0.53054541015625, 0.5305452473958333),
        # By bounds.
        (
            LARGE_HEADS,
            Point(8, 6, "channel", "channel", *NO_TRANSFORM, 0, 0.75),
            0.5030239588684506,
            0.5008342862129211,
        ),
    ],
)
def test_budgets_are_to_the_last_digit_what_cutting_every_assignment_gave(
    chunk: NominalChunk, point: Point, budget: float, wire_ratio: float
) -> None:
    """Figures of the search as it was when it cut each of its assignments on its own."""
    cost = wire_cost(point, chunk)
    assert (cost.budget, cost.wire_ratio) == (budget, wire_ratio)
