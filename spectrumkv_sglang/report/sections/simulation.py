"""What the controller chose in a replay, beside every fixed choice."""

from __future__ import annotations

from typing import Any

from spectrumkv_sglang.report.content import Picture, Section, Table, number
from spectrumkv_sglang.report.drawing import bars


def simulation_sections(document: dict[str, Any]) -> list[Section]:
    """What `spectrumkv simulate --json` wrote."""
    results = document["results"]
    rows = [
        [
            one["policy"], number(one["ttft_s"]["p50"]), number(one["ttft_s"]["p99"]), number(one["jct_s"]["mean"]),
            f"{one['wire_share']:.3f}", number(one["mean_kl"]), str(one["late"]), str(one["switches"]),
        ]
        for one in results
    ]  # fmt: skip
    columns = ["policy", "TTFT 50 %, s", "99 %", "JCT, s", "b", "KL", "late", "switches"]
    chosen = results[0]["chosen"]
    return [
        Section(
            "Controller decisions, replayed",
            [f"{results[0]['requests']:,} requests, link {document['link']}, seed {document['seed']}."],
            [
                Table("Policies", columns, rows),
                Picture(
                    "decisions",
                    "What the controller chose.",
                    lambda figure: bars(figure.add_subplot(), list(chosen), list(chosen.values()), "requests"),
                    (8.0, 0.8 + 0.35 * len(chosen)),
                ),
            ],
        )
    ]
