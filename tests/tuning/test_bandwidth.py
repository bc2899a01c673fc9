"""Estimates of a link: what is refused, how soon a change is known, and what counts as the link's time."""

from __future__ import annotations

import math

import pytest
from simulated_link import GBPS, MIB

from spectrumkv_sglang.tuning.bandwidth import MOST_REFUSED, LinkBandwidth, LinkClock

SIZE = 8.0 * MIB


def link(rate: float = GBPS) -> LinkBandwidth:
    found = LinkBandwidth(max_age_s=60.0)
    assert found.add(SIZE, SIZE / rate, 100.0)
    return found


def test_nothing_is_known_before_the_first_sample() -> None:
    assert LinkBandwidth(60.0).estimate(0.0) is None


@pytest.mark.parametrize(
    ("size", "seconds"),
    [
        (0.0, 1.0),
        (-1.0, 1.0),
        (SIZE, 0.0),
        (SIZE, -0.5),
        (math.nan, 1.0),
        (SIZE, math.nan),
        (math.inf, 1.0),
        (SIZE, math.inf),
        (SIZE, 1e-12),
        (1e-265, 1e58),
    ],
)
def test_an_absurd_sample_changes_nothing_and_a_broken_source_all(size: float, seconds: float) -> None:
    bandwidth = link()
    assert not bandwidth.add(size, seconds, 101.0)
    assert bandwidth.estimate(101.0) == pytest.approx(GBPS)
    for _ in range(MOST_REFUSED - 1):
        bandwidth.add(size, seconds, 101.0)
    assert bandwidth.estimate(101.0) is None
    assert bandwidth.add(SIZE, 1.0, 102.0)
    assert bandwidth.estimate(102.0) == pytest.approx(SIZE)


def test_small_writes_say_nothing_until_they_add_up() -> None:
    bandwidth = LinkBandwidth(60.0)
    for number in range(3):
        assert bandwidth.add(40_000.0, 0.0005, 100.0 + number)
        assert bandwidth.estimate(100.0 + number) is None
    assert bandwidth.add(64e6, 0.001, 104.0)
    assert bandwidth.estimate(104.0) == pytest.approx(64.12e6 / 0.0025)


def test_a_clock_that_went_back_or_far_ahead_leaves_nothing_known() -> None:
    bandwidth = link()
    assert bandwidth.estimate(99.0) is None
    assert bandwidth.estimate(161.0) is None
    assert not bandwidth.add(SIZE, 1.0, 99.0)
    assert bandwidth.estimate(100.0) is None
    assert not bandwidth.add(SIZE, 1.0, math.nan)


@pytest.mark.parametrize("factor", [0.01, 0.1, 0.4, 3.0, 10.0, 1000.0])
def test_two_samples_make_a_new_rate_known(factor: float) -> None:
    bandwidth = link()
    regime = bandwidth.regime
    for now in (101.0, 102.0):
        assert bandwidth.add(SIZE, SIZE / GBPS / factor, now)
    assert bandwidth.estimate(102.0) == pytest.approx(GBPS * factor)
    assert bandwidth.regime == regime + 1


def test_one_outlier_is_no_new_rate() -> None:
    bandwidth = link()
    regime = bandwidth.regime
    for number in range(20):
        slow = number % 2 == 0
        assert bandwidth.add(SIZE, SIZE / GBPS * (4.0 if slow else 1.0), 101.0 + number)
    assert bandwidth.regime == regime
    assert GBPS / 4 < (bandwidth.estimate(120.0) or 0.0) < GBPS


def test_small_windows_are_added_up() -> None:
    bandwidth = link()
    for _ in range(3):
        assert bandwidth.add(1000.0, 0.001, 101.0)
    assert bandwidth.estimate(101.0) == pytest.approx(GBPS)  # 3 ms of latency say nothing yet
    for _ in range(60):
        assert bandwidth.add(1000.0, 0.001, 101.0)
    assert bandwidth.estimate(101.0) == pytest.approx(1e6)


Told = list[tuple[str, float, float, bool]]


@pytest.fixture
def told() -> Told:
    return []


@pytest.fixture
def clock(told: Told) -> LinkClock:
    return LinkClock(lambda *sample: told.append(sample))


def test_overlapping_writes_are_one_busy_time(clock: LinkClock, told: Told) -> None:
    for start in (0.0, 0.1, 0.2):
        clock.started("a", 100.0, start)
    for end in (1.0, 1.1, 1.2):
        clock.ended("a", 100.0, end, end)
    assert told == [("a", 300.0, 1.2, False)]


def test_pauses_between_windows_do_not_count_and_peers_are_apart(clock: LinkClock, told: Told) -> None:
    for start in (0.0, 10.0):
        clock.started("a", 100.0, start)
        clock.started("b", 50.0, start, native=True)
        clock.ended("a", 100.0, start + 1.0, start + 1.0)
        clock.ended("b", 50.0, start + 2.0, start + 2.0)
    assert told == [("a", 100.0, 1.0, False), ("b", 50.0, 2.0, True)] * 2


def test_an_end_that_was_noticed_late_says_nothing(clock: LinkClock, told: Told) -> None:
    clock.started("a", 100.0, 0.0)
    clock.ended("a", 100.0, 1.0, 0.5)  # the sender was packing meanwhile
    assert told == []
    clock.started("a", 100.0, 2.0)
    clock.started("a", 100.0, 2.5)
    clock.ended("a", 100.0, 3.0, 2.5)  # the other write kept the link busy, so the window is as long as it looks
    clock.ended("a", 100.0, 3.2, 3.2)
    assert told == [("a", 200.0, pytest.approx(1.2), False)]


def test_a_failed_write_spoils_its_window_only(clock: LinkClock, told: Told) -> None:
    clock.started("a", 100.0, 0.0)
    clock.started("a", 100.0, 0.0)
    clock.failed("a", 100.0)
    clock.ended("a", 100.0, 1.0, 1.0)
    assert told == []
    clock.started("a", 100.0, 2.0)
    clock.ended("a", 100.0, 3.0, 3.0)
    assert told == [("a", 100.0, 1.0, False)]
    clock.ended("a", 100.0, 4.0, 4.0)  # nothing is under way
    clock.failed("b", 1.0)
    assert len(told) == 1


def test_a_link_that_never_rests_is_measured_all_the_same(clock: LinkClock, told: Told) -> None:
    """Two writes are always under way, one ends every second: 100 bytes a second."""
    clock.started("a", 100.0, 0.0)
    for second in range(1, 100):
        clock.started("a", 100.0, float(second))
        clock.ended("a", 100.0, float(second) + 0.5, float(second) + 0.5)
    assert len(told) > 5
    for _, size, seconds, _ in told[1:]:
        assert size / seconds == pytest.approx(100.0, rel=0.15)
