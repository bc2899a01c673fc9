"""Speeds of packing and unpacking: what is taken in, and what is refused."""

from __future__ import annotations

import math

import pytest

from spectrumkv_sglang.tuning.codec_speed import CodecSpeeds
from spectrumkv_sglang.tuning.frontier import Candidate

BALANCED = Candidate("balanced", b=0.3, kl=0.005)
SIZE = 64e6


@pytest.mark.parametrize(
    ("size", "seconds"), [(0.0, 1.0), (SIZE, 0.0), (SIZE, math.nan), (math.inf, 1.0), (1e-265, 1e58), (1e58, 1e-265)]
)
def test_an_absurd_sample_changes_nothing(size: float, seconds: float) -> None:
    speeds = CodecSpeeds()
    assert speeds.add(BALANCED, SIZE, 0.064)
    assert not speeds.add(BALANCED, size, seconds)
    assert speeds.of(BALANCED) == pytest.approx(1e-9)
    assert speeds.add(BALANCED, SIZE, 0.064)
    assert speeds.of(BALANCED) == pytest.approx(1e-9)


OTHER = Candidate("other", b=0.5, kl=0.0001)


def test_a_second_transfer_replaces_the_first() -> None:
    speeds = CodecSpeeds()
    speeds.add(BALANCED, SIZE, 6.4, first=True)
    speeds.add(BALANCED, SIZE, 0.064)
    assert speeds.of(BALANCED) == pytest.approx(1e-9)


def test_a_first_transfer_that_was_far_too_slow_is_forgotten_in_time() -> None:
    """Kernels were compiled while it was under way: without this, the candidate would never be tried again."""
    speeds = CodecSpeeds()
    for _ in range(2):
        speeds.add(OTHER, SIZE, 0.064)
    speeds.add(BALANCED, SIZE, 6.4, first=True)
    assert speeds.of(BALANCED) == pytest.approx(1e-7)
    for _ in range(50):
        assert speeds.fade()
    assert speeds.of(BALANCED) < speeds.of(OTHER) == pytest.approx(1e-9)


def test_a_first_transfer_like_the_others_is_believed() -> None:
    speeds = CodecSpeeds()
    for _ in range(2):
        speeds.add(OTHER, SIZE, 0.064)
    speeds.add(BALANCED, SIZE, 0.16, first=True)
    assert not speeds.fade()
    assert speeds.of(BALANCED) == pytest.approx(2.5e-9)


def test_a_new_peers_first_transfer_says_nothing_against_a_known_speed() -> None:
    speeds = CodecSpeeds()
    for _ in range(2):
        speeds.add(BALANCED, SIZE, 0.064)
    speeds.add(BALANCED, SIZE, 6.4, first=True)
    assert speeds.of(BALANCED) == pytest.approx(1e-9)
    speeds.add(BALANCED, SIZE, 0.032, first=True)
    assert speeds.of(BALANCED) < 1e-9
