"""What each layer of some model costs in few bits."""

from __future__ import annotations

import numpy as np
import pytest

from spectrumkv_sglang.calibration.candidates import DEFAULT
from spectrumkv_sglang.calibration.sensitivity import SENSITIVITY_FORMAT, MeasuredOn, PartSensitivity, Sensitivity
from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.payload.geometry import KVGeometry


def _curve(precisions: tuple[Precision, ...], first: float) -> dict[str, float]:
    return {precision.name.lower(): first / 4.5**place for place, precision in enumerate(precisions)}


@pytest.fixture
def sensitivity() -> Sensitivity:
    """4 layers of 3 KV heads of 64 whose costs differ by layer and head."""
    geometry = KVGeometry(4, 3, 64, 64, 1, "bfloat16")
    generator = np.random.default_rng(3)

    def part(kv: int, first: float) -> PartSensitivity:
        candidates = DEFAULT.of(kv)
        heads = generator.lognormal(-8, 1.5, size=(geometry.layers, geometry.kv_heads))
        return PartSensitivity(
            transform=candidates.transform.name.lower(),
            curve=_curve(candidates.precisions, first),
            layers={
                coarse.name.lower(): (heads.sum(axis=1) * generator.uniform(1, 2, size=geometry.layers)).tolist()
                for coarse in candidates.coarse
            },
            heads=heads.tolist(),
        )

    return Sensitivity(
        format=SENSITIVITY_FORMAT,
        model="m",
        fingerprint=dict.fromkeys(("weights", "config", "tokenizer", "quantization", "dtype"), "x"),
        geometry=geometry,
        measured_on=MeasuredOn("t.txt", "0", ["text-1"], 64, 16, 0, 4),
        keys=part(0, 0.2),
        values=part(1, 0.02),
        versions={},
        date="",
    )
