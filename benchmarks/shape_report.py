"""What `shapes.py` writes: one row a deployment shape, as JSON and as a Markdown table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Answers:
    """How many answers of a pair were what (`soak_judging`). ``first``: the first one that was not right, in words."""

    right: int = 0
    tie: int = 0
    wrong: int = 0
    error: int = 0
    first: str = ""

    @property
    def good(self) -> bool:
        """There were answers, and none was wrong."""
        return not self.wrong and not self.error and self.right + self.tie > 0

    def __str__(self) -> str:
        counts = {"right": self.right, "tie": self.tie, "wrong": self.wrong, "error": self.error}
        return ", ".join(f"{n} {name}" for name, n in counts.items() if n) or "none"


@dataclass(frozen=True)
class Row:
    """One shape.

    Attributes:
        shape: its name.
        what: in words.
        answers: of our pair.
        chunks: chunks by path and by reason: {"tiered": {"tiered": 4}, "native": {}}.
        failures: tiered chunks that failed, by cause.
        b: wire bytes over native bytes of the tiered chunks; 0 without any.
        not_started: which server did not start and SGLang's own line; empty: all did.
        sglang: what SGLang's own backend makes of the shape, asked where ours did not do well: its answers, or why it
            does not start.
        sglang_fails: it does not do well either.
    """

    shape: str
    what: str
    answers: Answers = Answers()
    chunks: dict[str, dict[str, int]] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    b: float = 0.0
    not_started: str = ""
    sglang: str = ""
    sglang_fails: bool = False

    @property
    def passed(self) -> bool:
        """Every answer was right; or SGLang's own backend fails at the shape just the same."""
        return (not self.not_started and self.answers.good) or self.sglang_fails

    @property
    def path(self) -> str:
        """ "tiered", "native" or both, with the counted reasons."""
        parts = []
        for path, reasons in self.chunks.items():
            if reasons:
                counted = ", ".join(f"`{reason}` {n}" for reason, n in reasons.items() if reason != "tiered")
                total = sum(reasons.values())
                parts.append(f"{path} {total}" + (f" ({counted})" if counted else ""))
        return "; ".join(parts) or "-"


def write(rows: Sequence[Row], folder: Path, machine: dict[str, str]) -> str:
    """Write ``shapes.json`` and ``shapes.md`` under ``folder``; returns the table."""
    document = {"machine": machine, "rows": [asdict(row) | {"passed": row.passed} for row in rows]}
    (folder / "shapes.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    lines = ["| shape | what | chunks, by path and reason | answers | notes |", "|---|---|---|---|---|"]
    for row in rows:
        notes = [row.not_started, row.sglang and f"SGLang's own backend: {row.sglang}", row.answers.first]
        notes += [f"failures {row.failures}" if row.failures else ""]
        note = "; ".join(one for one in notes if one).replace("|", "\\|")
        answers = "not started" if row.not_started else str(row.answers)
        lines.append(f"| {row.shape} | {row.what} | {row.path} | {answers} | {note} |")
    table = "\n".join(lines)
    (folder / "shapes.md").write_text(table + "\n", encoding="utf-8")
    return table
