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
