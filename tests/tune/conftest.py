"""Speeds that nothing was measured for, and a space that is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.transforms import Transform
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.search.codec_speeds import CodecSpeeds
from spectrumkv_sglang.search.known_costs import KnownCosts
from spectrumkv_sglang.search.space import Point, Space
from spectrumkv_sglang.search.wire_cost import WireCost


@pytest.fixture(scope="session")
def speeds_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Speeds of every precision and transform, without a measurement."""
    seconds = {
        (precision, transform): 1e-9 * (1 + precision / 10 + transform / 3)
        for precision in Precision
        for transform in Transform
    }
    geometry = KVGeometry(3, 2, 16, 16, 1, "float32")
    path = tmp_path_factory.mktemp("speeds") / "speeds.json"
    path.write_bytes(CodecSpeeds("somewhere", seconds, geometry, 512).encode())
    return path


@pytest.fixture
def small_space() -> tuple[KnownCosts, Callable[[int, int], float]]:
    """144 points whose costs follow rules of thumb, and their KL on two texts."""
    points = tuple(Space(key_scales=("channel",), key_transform=("identity",), edges=(0,), upgrade=(0.0, 0.5)))

    def ratio(point: Point) -> float:
        return (point.key_bits + point.value_bits + 0.75 + point.upgrade) / 32

    def seconds(point: Point) -> float:
        return 1e-9 * (2 + (point.value_transform == "hadamard") + point.key_bits % 3 / 4)

    wire = tuple(WireCost(ratio(point), ratio(point), (0.0, point.upgrade, 1 - point.upgrade)) for point in points)
    costs = KnownCosts(points, wire, tuple(seconds(point) for point in points))

    def kl(place: int, text: int) -> float:
        point = points[place]
        values = 0.05 * 4.3**-point.value_bits * (0.4 if point.value_transform == "hadamard" else 1)
        return (0.3 * 4.5**-point.key_bits + values) * 15 * (1 - 0.5 * point.upgrade) * (1.2 if text else 0.8)

    return costs, kl
