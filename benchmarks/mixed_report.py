"""What `mixed_versions.py` writes: a row for each pair in each step, as JSON and as a Markdown table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """The requests of one pair in one step.

    Attributes:
        step: what was changed in the cluster.
        when: "while" it was changed, or "after" that.
        prefill: kind of the prefill server.
        decode: kind of the decode server.
        results: requests by what came of them.
        chunks: chunks by path and reason, as prefill logged them; empty for a plain prefill.
        wanted: the one path and reason that the chunks must have; "" for a plain prefill.
    """

    step: str
    when: str
    prefill: str
    decode: str
    results: dict[str, int]
    chunks: dict[str, int]
    wanted: str

    @property
    def passed(self) -> bool:
        """Every request was answered, rightly, and every chunk went the way it should."""
        return set(self.results) == {"right"} and set(self.chunks) == ({self.wanted} if self.wanted else set())


@dataclass(frozen=True)
class Change:
    """A step: which servers were started anew.

    Attributes:
        step: what was changed.
        seconds: from the end of the former servers to the health of the new ones.
        held: what the servers held after the step's requests: slots in use, pages or requests; empty: nothing.
    """

    step: str
    seconds: float
    held: list[str]


def write(rows: Sequence[Row], changes: Sequence[Change], folder: Path, machine: dict[str, str]) -> str:
    """Write ``mixed_versions.json`` and ``mixed_versions.md`` under ``folder``; returns the table."""
    document = {"machine": machine, "changes": [asdict(one) for one in changes], "rows": [asdict(row) for row in rows]}
    (folder / "mixed_versions.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    lines = [
        "| step | requests ran | prefill | decode | answers | chunks, by path and reason |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        chunks = _counted(row.chunks) if row.wanted else "SGLang's own"
        right = row.results.get("right", 0)
        answers = f"{right} right of {sum(row.results.values())}"
        others = {name: count for name, count in row.results.items() if name != "right"}
        lines.append(
            f"| {row.step} | {row.when} | {row.prefill} | {row.decode} | "
            f"{answers}{': ' + _counted(others) if others else ''} | {chunks}{'' if row.passed else ' **BAD**'} |"
        )
    table = "\n".join(lines)
    (folder / "mixed_versions.md").write_text(table + "\n", encoding="utf-8")
    return table


def _counted(counts: dict[str, int]) -> str:
    return "; ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"
