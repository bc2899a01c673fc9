"""What a calibration expects of the profile that it wrote."""

from __future__ import annotations

from typing import Any

from spectrumkv_sglang.report.content import Section, Table, number


def calibration_sections(document: dict[str, Any]) -> list[Section]:
    """What `spectrumkv calibrate --json` wrote."""
    expected = [[tier, number(kl)] for tier, kl in document["expected_kl"].items()]
    additivity = [
        [part, precision, number(ratio)]
        for part, by_precision in document["additivity"].items()
        for precision, ratio in by_precision.items()
    ]
    return [
        Section(
            f"Calibration: {document['model']}",
            [
                f"{document['profile']}: b {document['wire_ratio']:.3f} for a budget of {document['budget']:g}, "
                f"{document['granularity']}."
            ],
            [
                Table("Expected KL if every token were in the tier, nats a token", ["tier", "KL"], expected),
                Table("Single layers' KL over that of all at once", ["part", "precision", "ratio"], additivity),
            ],
        )
    ]
