"""Attention is observed only where there are tiers to choose between."""

from __future__ import annotations

import pytest
from conftest import MakePrefill, MakeRank


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"profile": "spectrum"}, True),
        ({"profile": "spectrum", "allowed_tiers": "high,mid"}, True),
        ({"profile": "spectrum", "allowed_tiers": "high"}, False),
        ({"profile": "int8"}, False),
        ({"profile": "native-packed"}, False),
        ({"profile": "spectrum", "scorer": "position"}, False),
    ],
)
def test_scores_are_kept_where_they_decide_something(
    make_rank: MakeRank, make_prefill: MakePrefill, settings: dict[str, str], kept: bool
) -> None:
    rank, source = make_rank(), make_prefill(**{"scorer": "window", **settings})
    assert (source.rank.scores is not None) is kept
    rank.open_room(1, 10)
    assert source.send(rank, 1, source.some_pages(10)).code == 0
