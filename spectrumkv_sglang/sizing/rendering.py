"""The sizing for a terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spectrumkv_sglang.sizing.estimate import PromptEstimate
from spectrumkv_sglang.sizing.result import SizingResult


def print_sizing(result: SizingResult, console: Console) -> None:
    """Facts, a table for each prompt length, assumptions, and what to do."""
    console.print(Text(f"{result.model}: {result.detail}", style="bold"))
    if result.kv_bytes_per_token:
        ranks = f", TP {result.tp}" if result.tp > 1 else ""
        console.print(f"KV: {result.kv_bytes_per_token:,} bytes a token{ranks}", markup=False, highlight=False)
    if result.native_reason is not None:
        console.print(Text(f"Not worth turning on: {result.advice[0].text}", style="bold yellow"))
        return
    landing, staging = result.memory.landing_bytes / 2**20, result.memory.staging_bytes / 2**20
    console.print(
        f"memory beside SGLang's: {landing:,.0f} MiB for landing slots on decode, {staging:,.0f} MiB for staging slots "
        "on prefill",
        highlight=False,
    )
    for estimate in result.estimates:
        if estimate.prompt_tokens >= result.min_tokens:  # shorter ones are not tiered
            console.print(_table(estimate, result))
    console.print(Text("assumed", style="bold"))
    for line in result.assumptions:
        console.print(f"  {line}", markup=False, highlight=False)
    console.print(Text("worth turning on?", style="bold"))
    for advice in result.advice:
        style = "green" if advice.worth_it else "yellow"
        console.print(Text(f"  {advice.prompt_tokens:,} tokens: {advice.text}", style=style))
    if not result.worth_it:
        console.print(Text("Not worth turning on for these prompts on this link.", style="bold yellow"))


def _table(estimate: PromptEstimate, result: SizingResult) -> Table:
    table = Table(
        title=f"{estimate.prompt_tokens:,} tokens at {result.gbps:g} Gb/s; prefill "
        f"{estimate.prefill_seconds * 1e3:,.0f} ms",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        show_edge=False,
    )
    # Within 80 columns only the names of profiles give way, if they are long.
    table.add_column("profile", overflow="fold")
    for column in ("b", "MB", "transfer\nms", "TTFT\nms", "/\nnative", "pays\nbelow\nGb/s", "probe"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_row(
        "native",
        "1",
        f"{estimate.native_bytes / 1e6:,.0f}",
        f"{estimate.native_transfer_seconds * 1e3:,.0f}",
        f"{estimate.native_ttft_seconds * 1e3:,.0f}",
        "1.00",
    )
    for choice in estimate.choices:
        table.add_row(
            choice.profile,
            f"{choice.b:.3f}",
            f"{choice.wire_bytes / 1e6:,.0f}",
            f"{choice.transfer_seconds * 1e3:,.0f}",
            f"{choice.ttft_seconds * 1e3:,.0f}",
            f"{estimate.share(choice):.2f}",
            _three_digits(choice.break_even_gbps) if choice.break_even_gbps > 0 else "-",
            "needed" if choice.needs_probe else "",
        )
    return table


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
