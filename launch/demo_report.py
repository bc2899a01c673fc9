"""What the demo shows: the answers side by side, and a table of what crossed the wire."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.box import SIMPLE, SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from spectrumkv_sglang.launch.client import Completion
from spectrumkv_sglang.launch.transfer_log_reader import RequestTransfer

_SHOWN_CHARACTERS = 220
_UNKNOWN = "-"
_LEGEND = (
    "b: achieved, wire / native bytes. lo: everything that crossed the loopback interface meanwhile, HTTP and headers "
    "too. writes: Mooncake writes. ms: transfer time. high is a profile's first tier: in int8 that is INT8."
)


@dataclass(frozen=True)
class RequestReport:
    """One prompt through one profile.

    Attributes:
        prompt: name of the prompt.
        profile: name of the profile, or of the backend where there is none.
        budget: b that the profile was given.
        plain: the plain server's answer.
        answer: the pair's answer.
        interface_bytes: bytes on the loopback interface while the pair answered: the KV and everything else.
        transfer: figures of the prefill server's transfer log; None for a backend that writes none.
    """

    prompt: str
    profile: str
    budget: float
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
    table = Table(title=f"{prompt} ({plain.prompt_tokens} tokens)", title_justify="left", box=SIMPLE, expand=True)
    table.add_column("server", no_wrap=True)
    table.add_column("same tokens", justify="right", no_wrap=True)
    table.add_column("answer", ratio=1)
    table.add_row("plain", _UNKNOWN, _one_line(plain.text))
    for report in reports:
        same = f"{report.identical_tokens} of {len(plain.output_ids)}"
        table.add_row(report.profile, same, _one_line(report.answer.text))
    return table


def _transfers(reports: list[RequestReport]) -> Table:
    table = Table(
        title="KV transfers",
        caption=_LEGEND,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    for heading in ("profile,\nbudget", "path"):
        table.add_column(heading, no_wrap=True)
    for heading in (
        *("prompt\ntokens", "native\nkB", "wire\nkB", "lo\nkB", "b"),
        *("tokens\nhigh/mid/low", "writes", "ms"),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for report in reports:
        transfer = report.transfer
        table.add_row(
            f"{report.profile}, {report.budget:g}",
            "native" if transfer is None else transfer.path,
            f"{report.answer.prompt_tokens:,}",
            _UNKNOWN if transfer is None else _kilobytes(transfer.native_bytes),
            _UNKNOWN if transfer is None else _kilobytes(transfer.wire_bytes),
            _kilobytes(report.interface_bytes),
            *([_UNKNOWN] * 4 if transfer is None else _counts(transfer)),
        )
    return table


def _counts(transfer: RequestTransfer) -> tuple[str, str, str, str]:
    return (
        f"{transfer.achieved_b:.3f}",
        "/".join(str(transfer.tokens_by_tier[tier]) for tier in ("high", "mid", "low")),
        str(transfer.writes),
        f"{transfer.transfer_seconds * 1e3:.0f}",
    )


def _kilobytes(count: int) -> str:
    return f"{count / 1000:,.0f}"


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else line[: _SHOWN_CHARACTERS - 1] + "…"
