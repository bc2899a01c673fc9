"""The result of a calibration as a file for machines."""

from __future__ import annotations

import msgspec

from spectrumkv_sglang.calibration.held_out import HeldOutCheck

CALIBRATION_FORMAT = 1


class CalibrationResult(msgspec.Struct, frozen=True):
    """What `spectrumkv calibrate` found.

    Attributes:
        format: of this record.
        model: directory of the model.
        profile: file that was written.
        budget: b that was asked for.
        chunk_tokens: tokens of the chunk that the map's bytes are stated for.
        wire_ratio: b of that chunk.
        expected_kl: of the map, nats a token, by tier: every token but the sinks in it.
        granularity: how finely the map tells cells apart.
        additivity: single layers' KL / KL of all layers at once, by part and precision.
        held_out: the check on other windows; None: not made.
    """

    format: int
    model: str
    profile: str
    budget: float
    chunk_tokens: int
    wire_ratio: float
    expected_kl: dict[str, float]
    granularity: str
    additivity: dict[str, dict[str, float]]
    held_out: HeldOutCheck | None


def encode_calibration(result: CalibrationResult) -> bytes:
    """As the file holds it."""
    return msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n"
