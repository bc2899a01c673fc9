"""Pairs over limited links: times to the first token, where they go, and bytes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from spectrumkv_sglang.report.content import Picture, Section, Table, megabytes, milliseconds
from spectrumkv_sglang.report.drawing import stacked

Sample = dict[str, Any]
Case = tuple[float, int]
_FIELDS = ("ttft_seconds", "transfer_seconds", "pack_seconds", "write_seconds", "wait_seconds", "wire_bytes",
           "native_bytes", "link_bytes")  # fmt: skip


def transfer_sections(runs: list[dict[str, Any]]) -> list[Section]:
    """The result of benchmarks/transfer.py, or the runs that gpu.json holds."""
    return [_section(run) for run in runs]


def _section(run: dict[str, Any]) -> Section:
    samples = [one for one in run["samples"] if one.get("status", "ok") == "ok" and one.get("repeat", 0) >= 0]
    cases: dict[Case, list[Sample]] = {}
    for one in samples:
        cases.setdefault((one["rate_gbps"], one["prompt_tokens"]), []).append(one)
    shown: list[Table | Picture] = []
    for case in sorted(cases, key=lambda case: (case[0] or float("inf"), case[1])):
        shown += _case(case, cases[case])
    failed = [one for one in run["samples"] if one.get("status", "ok") != "ok"]
    text = [
        f"{run.get('model', 'unknown model')}; {run.get('what') or run.get('machine') or 'medians of the repeats'}."
    ]
    if failed:
        text.append(f"{len(failed)} requests did not end well or were skipped; they are left out here.")
    return Section("Pairs over a link", text, shown)


def _case(case: Case, samples: list[Sample]) -> list[Table | Picture]:
    rate, prompt = case
    title = f"{prompt:,} tokens, {f'{rate:g} Gb/s' if rate else 'no limit'}"
    medians = {name: _medians(one for one in samples if one["variant"] == name) for name in _names(samples)}
    reference = medians.get("plain-tuned", medians.get("plain", {})).get("ttft_seconds")
    rows = []
    for name, one in medians.items():
        ttft, wire, native = one["ttft_seconds"], one["wire_bytes"], one["native_bytes"]
        rows.append(
            [name, milliseconds(ttft), f"{ttft / reference:.2f}" if ttft and reference else "",
             milliseconds(one["transfer_seconds"]), milliseconds(one["pack_seconds"]),
             milliseconds(one["write_seconds"]), milliseconds(one["wait_seconds"]),
             megabytes(one["link_bytes"]), f"{wire / native:.3f}" if wire and native else ""]
        )  # fmt: skip
    columns = [
        "variant",
        "TTFT, ms",
        "of plain, tuned",
        "transfer, ms",
        "pack",
        "write",
        "wait",
        "on the link, MB",
        "b",
    ]
    found: list[Table | Picture] = [Table(title, columns, rows)]
    split = {name: (one["ttft_seconds"], one["transfer_seconds"]) for name, one in medians.items()}
    known = {name: (ttft, took) for name, (ttft, took) in split.items() if ttft and took and ttft >= took}
    if known:
        parts = {
            "prefill and the rest": [ttft - took for ttft, took in known.values()],
            "transfer": [took for _, took in known.values()],
        }
        found.append(
            Picture(
                f"ttft {prompt} {rate:g}",
                f"{title}: time to the first token. Pack, write and wait are sums over payloads that overlap.",
                lambda figure: stacked(figure.add_subplot(), list(known), parts, "seconds"),
                (8.0, 1.0 + 0.35 * len(known)),
            )
        )
    return found


def _names(samples: Iterable[Sample]) -> list[str]:
    return list(dict.fromkeys(one["variant"] for one in samples))


def _medians(samples: Iterable[Sample]) -> dict[str, float | None]:
    own = list(samples)
    found: dict[str, float | None] = {}
    for field in _FIELDS:
        values = [one[field] for one in own if one.get(field) is not None]
        found[field] = statistics.median(values) if values else None
    return found
