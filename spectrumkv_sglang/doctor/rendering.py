"""The doctor's report for a terminal."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spectrumkv_sglang.doctor.findings import Report, Severity

_MARKS = {
    Severity.OK: ("ok", "green"),
    Severity.INFO: ("note", "cyan"),
    Severity.WARNING: ("warning", "yellow"),
    Severity.PROBLEM: ("PROBLEM", "bold red"),
}


def print_report(report: Report, console: Console) -> None:
    """Prints findings by section, each with its remedy, and a closing line."""
    for section, findings in groupby(report.findings, key=lambda finding: finding.section):
        console.print(Text(section, style="bold"))
        lines = Table.grid(padding=(0, 1))
        for finding in findings:
            mark, style = _MARKS[finding.severity]
            lines.add_row(" ", Text(mark, style), Text.assemble((finding.name, "bold"), ": ", finding.detail))
            if finding.remedy:
                lines.add_row("", "", Text(f"-> {finding.remedy}"))
        console.print(lines)
    console.print(_closing_line(report))


def _closing_line(report: Report) -> Text:
    if report.problems:
        return Text(f"{report.problems} problem(s) stop SpectrumKV, {report.warnings} warning(s)", style="bold red")
    if report.warnings:
        return Text(f"SpectrumKV can run; {report.warnings} warning(s)", style="yellow")
    return Text("SpectrumKV can run", style="green")
