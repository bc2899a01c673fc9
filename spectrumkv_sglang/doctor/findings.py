"""What the doctor found, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import msgspec


class Severity(str, Enum):
    """How much a finding matters: OK and INFO need nothing, a WARNING costs something, a PROBLEM stops the backend."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(msgspec.Struct, frozen=True):
    """One checked thing. `remedy` says what to do; it is empty when nothing need be done."""

    section: str
    name: str
    severity: Severity
    detail: str
    remedy: str = ""


class Section:
    """Collects the findings of one section in the order in which they are shown."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.findings: list[Finding] = []

    def ok(self, name: str, detail: str) -> None:
        """As it should be."""
        self.findings.append(Finding(self._name, name, Severity.OK, detail))

    def info(self, name: str, detail: str, remedy: str = "") -> None:
        """Worth knowing."""
        self.findings.append(Finding(self._name, name, Severity.INFO, detail, remedy))

    def warning(self, name: str, detail: str, remedy: str) -> None:
        """Works, at a cost."""
        self.findings.append(Finding(self._name, name, Severity.WARNING, detail, remedy))

    def problem(self, name: str, detail: str, remedy: str) -> None:
        """Does not work until the remedy is applied."""
        self.findings.append(Finding(self._name, name, Severity.PROBLEM, detail, remedy))


class Report(msgspec.Struct, frozen=True):
    """All findings; `problems` of them stop the backend. Its JSON form is what `doctor --json` writes."""

    version: str
    problems: int
    warnings: int
    findings: list[Finding]

    @property
    def exit_code(self) -> int:
        """0 when nothing stops the backend, else 1."""
        return 1 if self.problems else 0

    def to_json(self) -> bytes:
        """Indented JSON, UTF-8."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def make_report(version: str, sections: Iterable[Section]) -> Report:
    """Report over all findings of `sections`, in order."""
    findings = [finding for section in sections for finding in section.findings]
    return Report(
        version=version,
        problems=sum(finding.severity is Severity.PROBLEM for finding in findings),
        warnings=sum(finding.severity is Severity.WARNING for finding in findings),
        findings=findings,
    )
