"""Pairs under load, as the client saw them."""

from __future__ import annotations

from typing import Any

from spectrumkv_sglang.report.content import Section, Table, megabytes, number


def serving_sections(runs: list[dict[str, Any]]) -> list[Section]:
    """The result of benchmarks/serving.py, or the runs that gpu.json holds."""
    return [_section(run) for run in runs]


def _section(run: dict[str, Any]) -> Section:
    rows = []
    for one in run["samples"]:
        client = one["client"]
        link = f"{one['link_gbps']:g}" if one["link_gbps"] else "no limit"
        rows.append(
            [one["variant"], link, number(one["request_rate"]), f"{client['failures']} of {client['requests']}",
             *(number(client["ttft_ms"][p]) for p in ("p50", "p90", "p99")),
             *(number(client["itl_ms"][p]) for p in ("p50", "p99")),
             number(client["output_tokens_per_second"]), megabytes(one["link_bytes"]), number(one["cpu_seconds"])]
        )  # fmt: skip
    columns = ["variant", "link, Gb/s", "requests/s", "failed", "TTFT 50 %, ms", "90 %", "99 %", "between tokens, ms",
               "99 %", "tokens/s", "on the link, MB", "CPU, s"]  # fmt: skip
    text = f"{run.get('model', 'unknown model')}, {run.get('device', '')}."
    return Section("Under load", [text], [Table("Loads", columns, rows)])
