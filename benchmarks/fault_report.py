"""What `faults.py` writes: one row a case, as JSON and as a Markdown table."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

NOT_REACHED = "the stage was not reached"


@dataclass(frozen=True)
class Row:
    """One fault at one stage.

    Attributes:
        fault: what happened to whom.
        stage: when, in the life of a transfer.
        victim: what the request that was hit got: "right", "wrong", or the error.
        others_right: answers of other requests that equalled the plain server's.
        others: how many there were.
        recovery_seconds: from the fault, or from the end of the outage, to the next right answer.
        restart_seconds: of these, a killed server's start.
        leaked: what the surviving servers hold more than before; empty: nothing.
        reasons: chunks by path and reason that the case added.
    """

    fault: str
    stage: str
    victim: str
    others_right: int
    others: int
    recovery_seconds: float
    restart_seconds: float = 0.0
    leaked: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """The fault happened, nobody got a wrong answer, others got theirs, nothing leaked, and all was well again."""
        harmless = "wrong" not in self.victim and self.others_right == self.others and not self.leaked
        return harmless and NOT_REACHED not in self.victim and math.isfinite(self.recovery_seconds)


def write(rows: Sequence[Row], folder: Path, machine: dict[str, str]) -> str:
    """Write ``faults.json`` under ``folder``; returns the table."""
    document = {"machine": machine, "rows": [asdict(row) for row in rows]}
    (folder / "faults.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    lines = [
        "| fault | stage | the request that was hit | others right | recovery, s | of it a restart, s | leaked |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        leaked = ", ".join(f"{name} +{n:g}" for name, n in row.leaked.items()) or "nothing"
        restart = f"{row.restart_seconds:.0f}" if row.restart_seconds else ""
        lines.append(
            f"| {row.fault} | {row.stage} | {row.victim} | {row.others_right} of {row.others} | "
            f"{row.recovery_seconds:.1f} | {restart} | {leaked} |"
        )
    return "\n".join(lines)
