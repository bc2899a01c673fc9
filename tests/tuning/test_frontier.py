"""The envelope is the minimum of its lines at every bandwidth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectrumkv_sglang.tuning.frontier import Envelope

LINE = st.tuples(st.floats(0, 10), st.floats(0.01, 1.2))


@given(st.lists(LINE, min_size=1, max_size=12), st.floats(1e-6, 1e6))
def test_the_fastest_is_the_lowest_line(lines: list[tuple[float, float]], x: float) -> None:
    envelope = Envelope(lines)
    a, b = lines[envelope.fastest(x)]
    assert a + b * x == pytest.approx(min(a + b * x for a, b in lines), rel=1e-9)


@given(st.lists(LINE, min_size=1, max_size=12))
def test_members_get_slower_codecs_and_fewer_bytes(lines: list[tuple[float, float]]) -> None:
    envelope = Envelope(lines)
    members = [lines[index] for index in envelope.members]
    assert len(envelope.breakpoints) == len(members) - 1
    assert list(envelope.breakpoints) == sorted(envelope.breakpoints)
    assert [a for a, _ in members] == sorted(a for a, _ in members)
    assert [b for _, b in members] == sorted((b for _, b in members), reverse=True)


def test_the_breakpoint_against_native_is_kvserves_bypass_rule() -> None:
    speed, b = 5e9, 0.25
    envelope = Envelope([(0.0, 1.0), (1 / speed, b)])
    assert envelope.breakpoints == pytest.approx((1 / ((1 - b) * speed),))
    assert envelope.fastest(0.99 * envelope.breakpoints[0]) == 0
    assert envelope.fastest(1.01 * envelope.breakpoints[0]) == 1


def test_neighbours() -> None:
    envelope = Envelope([(0.0, 1.0), (1.0, 0.5), (2.0, 0.2), (9.0, 0.5)])
    assert envelope.members == (0, 1, 2)
    assert envelope.neighbours(0.1) == (0, 1)
    assert envelope.neighbours(2.5) == (0, 1, 2)
    assert envelope.neighbours(100.0) == (1, 2)
    assert Envelope([(3.0, 0.4)]).neighbours(1.0) == (0,)


def test_no_line_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Envelope([])
