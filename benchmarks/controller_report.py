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
    phase_results,
    read_samples,
    whole,
)


def report_of(document: Mapping[str, Any]) -> str:
    """The run as Markdown."""
    phases, samples = read_samples(document)
    results = phase_results(phases, samples)
    loads = [phase.load for phase in phases]
    parts = [
        f"{document['model']}, {document['device']}, SGLang {document['sglang']}, {document['cores']} cores, "
        f"load average {min(loads):.1f} to {max(loads):.1f}; prompts of {document['prompt_tokens']} tokens, "
        f"{'caches emptied' if document['fresh'] else 'in the prefix cache of prefill'}",
        _transfer_table(results),
        _choice_table(results),
        _whole_table(whole(samples)),
    ]
    for name, ratio in (
        ("transfer", bypass_cost(phases, samples)),
        ("TTFT", bypass_cost(phases, samples, lambda sample: sample.ttft_s)),
    ):
        if ratio is not None:
            parts.append(f"Bypass on the link without a limit, {name} over plain SGLang's: {_interval(ratio)}")
    if document["target_s"]:
        parts.append(_target_table(results, document["target_s"]))
    if document["failures"]:
        parts.append("\n".join(f"* {failure[:300]}" for failure in document["failures"]))
    return "\n\n".join(parts) + "\n"


def _transfer_table(results: Sequence[PhaseResult]) -> str:
    arms = [CONTROLLER, *(arm for arm in results[0].transfer_s if arm != CONTROLLER)]
    rows = []
    for result in results:
        cells = [_emphasised(f"{result.transfer_s[arm] * 1e3:,.0f}", arm == result.best) for arm in arms]
        rows.append((result.phase.label, *cells, _interval(result.of_best)))
    title = (
        f"Transfer, ms: medians of the requests after the first {SETTLING} of a phase; the best fixed choice in bold."
    )
    return f"{title}\n\n{table(('link', *arms, 'controller / best, paired'), rows)}"


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


def _whole_table(results: Sequence[Whole]) -> str:
    rows = [
        (
            result.arm,
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


def _target_table(results: Sequence[PhaseResult], target: float) -> str:
    rows = [
        (
            result.phase.label,
            str(result.phase.requests),
            str(result.late),
            str(result.avoidable),
            str(result.avoidable_settled),
        )
        for result in results
    ]
    columns = ("link", "requests", "late", "some fixed arm was in time", f"after the first {SETTLING}")
    return f"TTFT target of {target:g} s.\n\n{table(columns, rows)}"


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
