"""What the demo shows: the answers side by side, and a table of what crossed the wire."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from spectrumkv_sglang.launch.client import Completion
from spectrumkv_sglang.launch.transfer_log_reader import RequestTransfer

_SHOWN_CHARACTERS = 220
_UNKNOWN = "-"


@dataclass(frozen=True)
class RequestReport:
    """One prompt through one profile.

    Attributes:
        prompt: name of the prompt.
        profile: name of the profile, or of the backend where there is none.
        plain: the plain server's answer.
        answer: the pair's answer.
        interface_bytes: bytes on the loopback interface while the pair answered: the KV and everything else.
        transfer: figures of the prefill server's transfer log; None for a backend that writes none.
    """

    prompt: str
    profile: str
    plain: Completion
    answer: Completion
    interface_bytes: int
    transfer: RequestTransfer | None

    @property
    def identical_tokens(self) -> int:
        """Positions at which the pair generated the same token as the plain server."""
        return sum(ours == plain for ours, plain in zip(self.answer.output_ids, self.plain.output_ids, strict=False))

    def as_json(self) -> dict[str, Any]:
        """Return the request's entry in the JSON file; what is not known is null."""
        transfer = self.transfer
        return {
            "profile": self.profile,
            "prompt_tokens": self.answer.prompt_tokens,
            "output_tokens": len(self.answer.output_ids),
            "identical_tokens": self.identical_tokens,
            "native_bytes": None if transfer is None else transfer.native_bytes,
            "wire_bytes": None if transfer is None else transfer.wire_bytes,
            "interface_bytes": self.interface_bytes,
            "writes": None if transfer is None else transfer.writes,
            "tokens_by_tier": None if transfer is None else transfer.tokens_by_tier,
            "transfer_seconds": None if transfer is None else transfer.transfer_seconds,
            "path": "native" if transfer is None else transfer.path,
        }


def print_report(console: Console, reports: list[RequestReport]) -> None:
    """Print the answers of each prompt, then the table of transfers. Reports of one prompt stand together."""
    for prompt, group in groupby(reports, key=lambda report: report.prompt):
        console.print(_answers(prompt, list(group)))
    console.print(_transfers(reports))


def _answers(prompt: str, reports: list[RequestReport]) -> Table:
    plain = reports[0].plain
    table = Table(title=f"{prompt} ({plain.prompt_tokens} tokens)", title_justify="left", expand=True)
    table.add_column("server", no_wrap=True)
    table.add_column("same tokens", justify="right", no_wrap=True)
    table.add_column("answer", ratio=1)
    table.add_row("plain", _UNKNOWN, _one_line(plain.text))
    for report in reports:
        same = f"{report.identical_tokens} of {len(plain.output_ids)}"
        table.add_row(report.profile, same, _one_line(report.answer.text))
    return table


def _transfers(reports: list[RequestReport]) -> Table:
    table = Table(title="KV transfers", title_justify="left", expand=True)
    for heading in ("profile", "path"):
        table.add_column(heading)
    for heading in (
        *("prompt tokens", "native bytes", "wire bytes", "interface bytes", "achieved b"),
        *("high / mid / low", "writes", "transfer ms"),
    ):
        table.add_column(heading, justify="right")
    for report in reports:
        common = (f"{report.answer.prompt_tokens:,}", f"{report.interface_bytes:,}")
        transfer = report.transfer
        if transfer is None:
            unknown = [_UNKNOWN] * 2
            table.add_row(report.profile, "native", common[0], *unknown, common[1], *[_UNKNOWN] * 4)
            continue
        tiers = transfer.tokens_by_tier
        table.add_row(
            report.profile,
            transfer.path,
            common[0],
            f"{transfer.native_bytes:,}",
            f"{transfer.wire_bytes:,}",
            common[1],
            f"{transfer.achieved_b:.3f}",
            f"{tiers['high']} / {tiers['mid']} / {tiers['low']}",
            str(transfer.writes),
            f"{transfer.transfer_seconds * 1e3:.0f}",
        )
    return table


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else line[: _SHOWN_CHARACTERS - 1] + "…"
