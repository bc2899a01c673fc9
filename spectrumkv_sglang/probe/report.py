"""The probe's result for people: tables and a verdict in words; two results side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.probe.result import ProbeResult

_VERDICTS = {
    "low_allowed": "[green]low tier allowed[/]",
    "low_not_allowed": "[yellow]low tier not allowed[/]",
    "inconclusive": "[yellow]inconclusive[/]: the low tier stays off",
}
_MEANINGS = {
    "native": "nothing lost",
    "policy": "as served: tiers by importance",
    "random": "as many tokens a tier, at random",
    "high": "every token in high",
    "mid": "every token in mid",
    "low": "every token in low",
    "low_keys": "low for the keys only",
    "low_values": "low for the values only",
}


def print_result(result: ProbeResult, console: Console) -> None:
    """Tables of needles and text, the verdict with its reasons, and what to do."""
    console.print(_needle_table(result))
    console.print(_text_table(result))
    console.print(
        f"{_VERDICTS[result.verdict]}; tiers: {', '.join(result.allowed_tiers)}  (profile {escape(result.profile)})"
    )
    section = result.launch.get("spectrumkv", {})
    if section:
        console.print(budget_line(result, section), markup=False, highlight=False)
    for reason in result.reasons:
        console.print(f"  because {escape(reason)}", highlight=False)
    for advice in result.advice:
        console.print(f"  to do: {escape(advice)}", highlight=False)
    seconds, memory = result.seconds, result.memory
    console.print(
        f"[dim]{seconds.total:.0f} s in all: server start {seconds.load:.0f}, needles {seconds.needles:.0f}, text "
        f"{seconds.text:.0f}; memory of the server {_gigabytes(memory.loaded)} when ready, "
        f"{_gigabytes(memory.peak)} at most[/]",
        highlight=False,
    )


def budget_line(result: ProbeResult, section: dict[str, Any]) -> str:
    """The budget that servers started with ``section``, the launch config's ``spectrumkv:``, run at, and the budgets
    that its record covers. The record goes lower than the judged mix of tiers because each tier was judged alone."""
    served = SpectrumKVConfig(**{field: value for field, value in section.items() if field != "probe"}).budget
    least = section["probe"]["policy"]["budget"]
    line = f"servers run at budget {served:g}; the probe covers every budget from {least:g} up"
    if not {"mid", "low"} & result.kl.keys():  # a profile of one tier has one size
        return line
    return f"{line} (judged: tiers mixed at b {result.budget:.3f}, and each lower tier alone)"


def print_comparison(first: ProbeResult, second: ProbeResult, names: tuple[str, str], console: Console) -> None:
    """Two results side by side, and what differs between the two models and policies."""
    table = Table(title="Two probes", title_justify="left")
    table.add_column("")
    for name, result in zip(names, (first, second), strict=True):
        table.add_column(escape(f"{name}\n{Path(result.model).name}"), justify="right", overflow="fold")
    table.add_row("verdict", first.verdict, second.verdict)
    table.add_row("allowed tiers", ", ".join(first.allowed_tiers), ", ".join(second.allowed_tiers))
    table.add_row("profile", first.profile, second.profile)
    table.add_row("judged at b", f"{first.budget:.3f}", f"{second.budget:.3f}")
    table.add_row("needles, native", *(f"{r.control.passed}/{r.control.trials}" for r in (first, second)))
    table.add_row("needles, tiered", *(f"{r.niah.passed}/{r.niah.trials}" for r in (first, second)))
    for policy in dict.fromkeys([*first.kl, *second.kl]):
        table.add_row(policy, *(_scores(result, policy) for result in (first, second)))
    table.add_row("seconds", f"{first.seconds.total:.0f}", f"{second.seconds.total:.0f}")
    console.print(table)
    differing = [key for key in first.fingerprint if first.fingerprint[key] != second.fingerprint.get(key)]
    differing += [] if first.thresholds == second.thresholds else ["thresholds"]
    console.print(f"differs: {', '.join(differing)}" if differing else "same model, dtype and thresholds")


def _needle_table(result: ProbeResult) -> Table:
    names = list(result.niah.passed_by_policy)
    table = Table(title="Needles", title_justify="left")
    for column in ("length", "depth", "expected", *names):
        table.add_column(column)
    for trial in result.niah.results:
        cells = []
        for name in names:
            answer = trial.answers[name]
            text = " ".join(answer.text.split())[:24]
            cells.append(f"[green]found[/] b {answer.wire_ratio:.2f}" if answer.passed else f"[red]{escape(text)}[/]")
        table.add_row(str(trial.prompt_tokens), f"{trial.depth:g}", trial.expected, *cells)
    return table


def _text_table(result: ProbeResult) -> Table:
    limits = result.thresholds
    table = Table(title="Text, teacher-forced", title_justify="left")
    for column in ("policy", "what travels", "PPL", "change", "KL", "top-1"):
        table.add_column(column, justify="left" if column in ("policy", "what travels") else "right")
    for name in result.ppl:
        table.add_row(
            name,
            _MEANINGS.get(name, ""),
            f"{result.ppl[name]:.3f}",
            _limited(f"{result.dppl_pct[name]:+.2f} %", result.dppl_pct[name] <= limits["max_dppl_pct"]),
            _limited(f"{result.kl[name]:.4f}", result.kl[name] <= limits["max_kl"]),
            _limited(f"{result.top1[name]:.3f}", result.top1[name] >= limits["min_top1"]),
        )
    return table


def _limited(text: str, within: bool) -> str:
    return text if within else f"[red]{text}[/]"


def _scores(result: ProbeResult, policy: str) -> str:
    if policy not in result.kl:
        return "-"
    return f"{result.dppl_pct[policy]:+.2f} %, KL {result.kl[policy]:.4f}, top-1 {result.top1[policy]:.3f}"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
