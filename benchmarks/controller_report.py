"""Tables of a controller.json: ``python benchmarks/controller_report.py controller.json [--plot FILE.png]``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from controller_samples import (
    CONTROLLER,
    SETTLING,
    PhaseResult,
    Ratio,
    Whole,
    bypass_cost,
    choices_of,
    losses_of,
    phase_results,
    read_samples,
    whole,
)
from controller_targets import FEASIBLE, Violations, violations


def report_of(document: Mapping[str, Any]) -> str:
    """The run as Markdown."""
    phases, samples = read_samples(document)
    losses = losses_of(document)
    results = phase_results(phases, samples, losses)
    loads = [phase.load for phase in phases]
    parts = [
        f"{document['model']}, {document['device']}, SGLang {document['sglang']}, {document['cores']} cores, "
        f"load average {min(loads):.1f} to {max(loads):.1f}; prompts of {document['prompt_tokens']} tokens, "
        f"{'caches emptied' if document['fresh'] else 'in the prefix cache of prefill'}",
        _transfer_table(results),
        _choice_table(results),
        _whole_table(whole(samples), set(choices_of(samples, losses))),
    ]
    for name, ratio in (
        ("transfer", bypass_cost(phases, samples)),
        ("TTFT", bypass_cost(phases, samples, lambda sample: sample.ttft_s)),
    ):
        if ratio is not None:
            parts.append(f"Bypass on the link without a limit, {name} over plain SGLang's: {_interval(ratio)}")
    late = violations(phases, samples, losses)
    if late:
        parts.append(_target_table(late))
    if document["failures"]:
        parts.append("\n".join(f"* {failure[:300]}" for failure in document["failures"]))
    return "\n\n".join(parts) + "\n"


def _transfer_table(results: Sequence[PhaseResult]) -> str:
    arms = [CONTROLLER, *(arm for arm in results[0].transfer_s if arm != CONTROLLER)]
    rows = []
    for result in results:
        cells = [_emphasised(f"{result.transfer_s[arm] * 1e3:,.0f}", arm == result.best) for arm in arms]
        rows.append((result.phase.label, *cells, _interval(result.of_best), f"{result.whole_of_best:.3f}"))
    title = (
        f"Transfer, ms: medians of the requests after the first {SETTLING} of a phase; the best allowed one in bold."
    )
    columns = ("link", *arms, "controller / best, paired", "sums, settling included")
    return f"{title}\n\n{table(columns, rows)}"


def _choice_table(results: Sequence[PhaseResult]) -> str:
    rows = [
        (
            result.phase.label,
            str(result.phase.requests),
            ", ".join(f"{name} {count}" for name, count in result.chosen.items()),
            "never" if result.settled_after is None else str(result.settled_after),
            str(result.switches),
            f"{result.ttft_s[CONTROLLER] * 1e3:,.0f}",
            f"{min(result.ttft_s.items(), key=lambda item: (item[0] == CONTROLLER, item[1]))[1] * 1e3:,.0f}",
        )
        for result in results
    ]
    columns = ("link", "requests", "chosen", "settled after", "switches", "TTFT ms", "least of the fixed, ms")
    return table(columns, rows)


def _whole_table(results: Sequence[Whole], allowed: set[str]) -> str:
    rows = [
        (
            result.arm if result.arm in {CONTROLLER, *allowed} else f"{result.arm} (loses more than was asked for)",
            f"{result.transfer_s:.1f}",
            f"{result.transfer_ratio:.3f}",
            f"{result.geometric_transfer_ratio:.3f}",
            f"{result.ttft_ratio:.3f}",
            f"{result.geometric_ttft_ratio:.3f}",
        )
        for result in results
    ]
    columns = ("arm", "transfer s, sum", "controller / it: sums", "geometric mean", "TTFT: sums", "geometric mean")
    return f"Over the whole, settling included.\n\n{table(columns, rows)}"


def _target_table(found: Sequence[Violations]) -> str:
    arms = list(found[0].late)
    rows = [
        (
            one.phase.label,
            f"{one.target_s:g}",
            str(one.phase.requests),
            *(str(one.late.get(arm, 0)) for arm in arms),
            f"{one.avoidable} ({one.avoidable_settled})",
            f"{one.feasible} ({one.feasible_settled})",
        )
        for one in found
    ]
    late = [str(sum(one.late.get(arm, 0) for one in found)) for arm in arms]
    avoidable = f"{sum(one.avoidable for one in found)} ({sum(one.avoidable_settled for one in found)})"
    feasible = f"{sum(one.feasible for one in found)} ({sum(one.feasible_settled for one in found)})"
    rows.append(("all", "", str(sum(one.phase.requests for one in found)), *late, avoidable, feasible))
    columns = ("link", "target s", "requests", *(f"late: {arm}" for arm in arms), "avoidable", "by a feasible profile")
    title = (
        "Requests over their TTFT target. The last two: the controller's, of those that a fixed arm it may choose "
        f"answered in time, and that one did which was late in at most {FEASIBLE:.0%} of the phase's requests; in "
        f"brackets without the first {SETTLING} of a phase."
    )
    return f"{title}\n\n{table(columns, rows)}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _interval(ratio: Ratio) -> str:
    return f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def _emphasised(text: str, yes: bool) -> str:
    return f"**{text}**" if yes else text


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python benchmarks/controller_report.py", description="Tables of a run.")
    parser.add_argument("run", type=Path, metavar="controller.json")
    parser.add_argument("--plot", type=Path, default=None, metavar="FILE.png")
    options = parser.parse_args()
    document = json.loads(options.run.read_text(encoding="utf-8"))
    print(report_of(document))
    if options.plot is not None:
        from controller_plot import plot_phases

        plot_phases(document, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
