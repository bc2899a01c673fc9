"""What `soak.py` writes: ``soak.json`` and ``soak.md``, both small, anew each time; and whether the run passed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from soak_account import Account
from soak_judging import Verdict
from soak_watch import MOST_GROWTH_PERCENT, SHORTEST_LIFE_SECONDS, Check
from soak_windows import Growth, LatencyPart, Window, latency_parts


@dataclass
class Soak:
    """All that is known of a run so far.

    Attributes:
        machine: what it ran on.
        options: of the command line.
        account: how requests ended.
        windows: the faults.
        checks: the quiet moments.
        growth: of the servers' memory.
        chunks: by reason.
        failed: chunks by cause.
        seconds: of load so far.
        plain_noise: how the plain server's answers under load differ from those it gave alone.
        unended: clients whose last request did not end.
        broken: why the run could not go on; "" where it could.
        least_agreement: of a lossy profile's answers with the pair's own without load or with the plain server's.
    """

    machine: dict[str, str]
    options: dict[str, Any]
    account: Account
    windows: Sequence[Window]
    checks: Sequence[Check] = ()
    growth: Sequence[Growth] = ()
    chunks: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    plain_noise: str = ""
    unended: bool = False
    broken: str = ""
    least_agreement: float = 0.0

    @property
    def agreement(self) -> float:
        """Share of the compared answers that are right or a tie."""
        account = self.account
        good = account.verdicts[Verdict.RIGHT.value] + account.verdicts[Verdict.TIE.value]
        return good / account.answered if account.answered else 0.0

    def faults_found(self) -> list[str]:
        """Why the run does not pass; empty: it does."""
        account = self.account
        found = [self.broken] if self.broken else []
        if account.verdicts[Verdict.WRONG.value]:
            found.append(f"{account.verdicts[Verdict.WRONG.value]} wrong answers")
        if account.unexpected.total():
            found.append(f"{account.unexpected.total()} errors that no fault explains: {_listed(account.unexpected)}")
        found += [f"held after {check.at:.0f} s: {_listed(check.held)}" for check in self.checks if check.held]
        never = [window.fault for window in self.windows if window.ended and window.recovery_seconds is None]
        if never:
            found.append(f"not well again after: {', '.join(never)}")
        if self.unended:
            found.append("requests that did not end")
        found += [
            f"memory of {life.server} grew by {life.percent:.0f} %"
            for life in self.growth
            if life.seconds >= SHORTEST_LIFE_SECONDS and life.percent > MOST_GROWTH_PERCENT
        ]
        if not account.answered:
            found.append("no answer was compared")
        elif account.lossy and self.agreement < self.least_agreement:
            found.append(f"{self.agreement:.1%} of the answers agree, fewer than {self.least_agreement:.0%}")
        return found

    def fault_rows(self) -> list[dict[str, Any]]:
        """One row a kind of fault."""
        rows = []
        for fault in sorted({window.fault for window in self.windows}):
            mine = [window for window in self.windows if window.fault == fault]
            recoveries = [one.recovery_seconds for one in mine if one.recovery_seconds is not None and one.ended]
            restarts = [one.restart_seconds for one in mine if one.restart_seconds]
            missed = sum(one.note == "the stage was not reached" for one in mine)
            rows.append(
                {
                    "fault": fault,
                    "times": len(mine) - missed,
                    "not_reached": missed,
                    "errors": dict(sum((one.errors for one in mine), start=type(mine[0].errors)())),
                    "median_recovery_s": statistics.median(recoveries) if recoveries else None,
                    "most_recovery_s": max(recoveries) if recoveries else None,
                    "most_restart_s": max(restarts) if restarts else None,
                }
            )
        return rows

    def write(self, folder: Path) -> str:
        """Write both files under ``folder``; returns the Markdown."""
        account = self.account
        latency = latency_parts(list(account.first_tokens))
        document = {
            "machine": self.machine,
            "options": self.options,
            "seconds": round(self.seconds, 1),
            "failed_because": self.faults_found(),
            "answered": account.answered,
            "verdicts": dict(account.verdicts),
            "of_these_in_fault_windows": dict(account.in_windows),
            "errors_explained": dict(account.errors),
            "errors_unexpected": dict(account.unexpected),
            "plain_noise": self.plain_noise,
            "largest_shift_of_right_answers": account.largest_shift,
            "tie_gaps": [float(f"{gap:.2e}") for gap in account.tie_gaps[:200]],
            "chunks_by_reason": self.chunks,
            "failed_chunks_by_cause": self.failed,
            "faults": self.fault_rows(),
            "checks": [asdict(check) for check in self.checks],
            "memory": [asdict(life) | {"percent": round(life.percent, 2)} for life in self.growth],
            "latency": [asdict(part) for part in latency],
            "details": account.details,
            "windows": [_window(window) for window in self.windows][:2000],
        }
        (folder / "soak.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        text = self._markdown(latency)
        (folder / "soak.md").write_text(text, encoding="utf-8")
        return text

    def _markdown(self, latency: list[LatencyPart]) -> str:
        account = self.account
        lines = [
            f"{account.answered} answers compared in {self.seconds:.0f} s of load: {_listed(account.verdicts)}",
            f"of these met a fault: {_listed(account.in_windows)}",
            f"errors that a fault explains: {_listed(account.errors)}",
            f"errors that none explains: {_listed(account.unexpected)}",
            f"log-probabilities of right answers shifted by at most {account.largest_shift:.1e}; {self.plain_noise}",
            f"chunks: {_listed(self.chunks)}; failed: {_listed(self.failed)}",
            "",
            "| fault | times | errors of load requests | median recovery, s | longest, s | of it a restart, s |",
            "|---|---|---|---|---|---|",
        ]
        for row in self.fault_rows():
            numbers = [_number(row[name]) for name in ("median_recovery_s", "most_recovery_s", "most_restart_s")]
            lines.append(f"| {row['fault']} | {row['times']} | {_listed(row['errors'])} | {' | '.join(numbers)} |")
        lines += ["", "| from s | requests without a fault | TTFT p50, s | p99, s |", "|---|---|---|---|"]
        lines += [
            f"| {one.begin:.0f} | {one.requests} | {_number(one.p50, 3)} | {_number(one.p99, 3)} |" for one in latency
        ]
        lines += ["", "| server | life, s | memory in its first quarter, MB | last quarter, MB |", "|---|---|---|---|"]
        for life in self.growth:
            lines.append(
                f"| {life.server} | {life.seconds:.0f} | {life.first / 1e6:.0f} | "
                f"{life.last / 1e6:.0f} ({life.percent:+.1f} %) |"
            )
        lines.append("")
        for check in self.checks:
            again = f"; asked again alone: {check.repeated}" if check.repeated else ""
            held = _listed(check.held)
            lines.append(f"- quiet at {check.at:.0f} s: held {held} after {check.settled_seconds:.1f} s{again}")
        found = self.faults_found()
        lines += ["", "passed" if not found else "FAILED: " + "; ".join(found)]
        return "\n".join(lines) + "\n"


def _listed(counts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {number:g}" for name, number in sorted(counts.items()) if number) or "nothing"


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _window(window: Window) -> dict[str, Any]:
    told = {"fault": window.fault, "started": round(window.started, 1), "note": window.note}
    ended = None if window.ended is None else round(window.ended, 1)
    return told | {"ended": ended, "errors": dict(window.errors), "recovery_s": window.recovery_seconds}
