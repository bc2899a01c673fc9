"""What `benchmarks/serving.py` makes of a result of `sglang.bench_serving`: figures, failures, medians, table."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from serving_load import Load
from serving_report import failure_lines, serving_table
from serving_result import (
    ClientResult,
    Percentiles,
    ResultError,
    ServingSample,
    failed_requests,
    read_result,
    rows_of,
    sample_from,
)

OUTPUT_TOKENS = 4


def tool_result(**changes: Any) -> dict[str, Any]:
    """What the tool writes for two answered requests, with the names that SGLang 0.5.16, 0.5.20 and 0.5.23 use."""
    result = {
        "duration": 2.0,
        "completed": 2,
        "request_throughput": 1.0,
        "output_throughput": 4.0,
        "median_ttft_ms": 150.0,
        "p90_ttft_ms": 190.0,
        "p99_ttft_ms": 199.0,
        "median_itl_ms": 20.0,
        "p90_itl_ms": 28.0,
        "p99_itl_ms": 29.8,
        "output_lens": [OUTPUT_TOKENS, OUTPUT_TOKENS],
        "ttfts": [0.1, 0.2],
        "itls": [[0.02, 0.02, 0.03], [0.01, 0.02, 0.02]],
        "errors": ["", ""],
    }
    return {**result, **changes}


def write(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "result.jsonl"
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")
    return path


def client(ttft: float = 100.0, *, failures: int = 0, requests: int = 10) -> ClientResult:
    return ClientResult(
        requests=requests,
        failures=failures,
        first_failure="request 0: aborted" if failures else "",
        duration_seconds=5.0,
        requests_per_second=2.0,
        output_tokens_per_second=80.0,
        ttft_ms=Percentiles(ttft, ttft * 2, ttft * 3),
        itl_ms=Percentiles(10.0, 12.0, 15.0),
    )


def sample(variant: str, rate: float, repeat: int = 0, *, link: float = 10.0, **client_changes: Any) -> ServingSample:
    return ServingSample(
        variant=variant,
        link_gbps=link,
        request_rate=rate,
        repeat=repeat,
        client=client(**client_changes),
        link_bytes=1_000_000,
        cpu_seconds=3.0,
        rss_peak_bytes=2_000_000_000 + repeat,
        gpu_peak_bytes=None,
    )


def rendered(table: Any) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_the_figures_are_the_tools_own(tmp_path: Path) -> None:
    result = read_result(write(tmp_path, tool_result()), requests=2, output_tokens=OUTPUT_TOKENS)
    assert result == ClientResult(
        requests=2,
        failures=0,
        first_failure="",
        duration_seconds=2.0,
        requests_per_second=1.0,
        output_tokens_per_second=4.0,
        ttft_ms=Percentiles(150.0, 190.0, 199.0),
        itl_ms=Percentiles(20.0, 28.0, 29.8),
    )


def test_the_last_line_counts_where_the_tool_appended(tmp_path: Path) -> None:
    path = write(tmp_path, tool_result(duration=9.0))
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(tool_result(duration=3.0)) + "\n")
    assert read_result(path, requests=2, output_tokens=OUTPUT_TOKENS).duration_seconds == 3.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param(
            {"errors": ["Traceback ...\nConnectionError: refused", ""]}, "ConnectionError: refused", id="error"
        ),
        pytest.param({"ttfts": [0.0, 0.2]}, "no token with text", id="an error inside the stream, or no visible token"),
        pytest.param({"output_lens": [1, OUTPUT_TOKENS]}, "1 tokens in its answer, expected 4", id="given up half way"),
    ],
)
def test_a_request_without_a_complete_answer_is_a_failure(changes: dict[str, Any], said: str) -> None:
    failed = failed_requests(tool_result(**changes), requests=2, output_tokens=OUTPUT_TOKENS)
    assert len(failed) == 1
    assert failed[0].startswith("request 0: ")
    assert said in failed[0]


def test_a_request_that_the_result_does_not_have_is_a_failure() -> None:
    failed = failed_requests(tool_result(), requests=3, output_tokens=OUTPUT_TOKENS)
    assert failed == ["request 2: not in the result"]


def test_failures_are_not_throughput(tmp_path: Path) -> None:
    path = write(tmp_path, tool_result(ttfts=[0.0, 0.2]))
    result = read_result(path, requests=2, output_tokens=OUTPUT_TOKENS)
    assert (result.failures, result.requests_per_second) == (1, 0.5)


@pytest.mark.parametrize("missing", ["ttfts", "p99_itl_ms", "duration"])
def test_another_tools_result_is_refused(tmp_path: Path, missing: str) -> None:
    content = tool_result()
    del content[missing]
    with pytest.raises(ResultError, match=missing):
        read_result(write(tmp_path, content), requests=2, output_tokens=OUTPUT_TOKENS)


def test_no_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "result.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(ResultError, match=r"result\.jsonl"):
        read_result(tmp_path / "result.jsonl", requests=2, output_tokens=OUTPUT_TOKENS)


def test_a_sample_survives_the_way_through_json() -> None:
    before = sample("int8", 2.0, failures=1)
    assert sample_from(json.loads(json.dumps(asdict(before)))) == before


def test_a_row_is_the_median_of_its_repetitions_and_the_sum_of_their_failures() -> None:
    samples = [
        sample("int8", 2.0, repeat, ttft=ttft, failures=failures)
        for repeat, (ttft, failures) in enumerate([(100.0, 0), (300.0, 1), (110.0, 2)])
    ]
    (row,) = rows_of(samples)
    assert row.ttft_ms == Percentiles(110.0, 220.0, 330.0)
    assert (row.requests, row.failures) == (30, 3)
    assert row.rss_peak_bytes == 2_000_000_002


def test_rows_go_by_link_with_no_limit_last_then_rate_then_variant() -> None:
    samples = [
        sample(name, rate, link=link) for link in (0.0, 10.0) for rate in (4.0, 1.0) for name in ("plain", "int8")
    ]
    assert [(row.link_gbps, row.request_rate, row.variant) for row in rows_of(samples)] == [
        (link, rate, name) for link in (10.0, 0.0) for rate in (1.0, 4.0) for name in ("plain", "int8")
    ]


def test_the_table_compares_with_the_tuned_plain_pair_under_the_same_load() -> None:
    samples = [sample("plain-tuned", 1.0, ttft=200.0), sample("int8", 1.0, ttft=100.0), sample("int8", 2.0, ttft=100.0)]
    lines = [line for line in rendered(serving_table(rows_of(samples))).splitlines() if "int8" in line]
    assert "100 / 200 / 300" in lines[0]
    assert "0.50" in lines[0]
    assert "0.50" not in lines[1]  # no plain pair at 2 requests a second


def test_failures_are_said_aloud_in_table_and_lines() -> None:
    rows = rows_of([sample("int8", 1.0, failures=2), sample("plain", 1.0)])
    assert "2 of 10" in rendered(serving_table(rows))
    assert failure_lines(rows, {"int8": "request 0: aborted"}, {"fp8-kv": "no such kernel"}) == [
        "FAILED: 2 of 10 requests of int8; the first: request 0: aborted",
        "NOT MEASURED: fp8-kv: no such kernel",
    ]


def test_nothing_is_said_when_all_went_well() -> None:
    assert failure_lines(rows_of([sample("int8", 1.0)]), {}, {}) == []


def test_the_tool_is_asked_for_exact_lengths_without_a_warm_up_of_its_own() -> None:
    load = Load(request_rate=2.0, prompts=8, input_tokens=300, output_tokens=12, seed=7)
    arguments = load.arguments("http://127.0.0.1:1", Path("/tokenizer"), Path("/result"))
    asked = dict(pairwise(arguments))
    assert asked["--dataset-name"] == "random-ids"  # the only one that downloads nothing
    assert asked["--random-range-ratio"] == "1.0"
    assert asked["--warmup-requests"] == "0"
    assert asked["--seed"] == "7"
    assert "--tokenize-prompt" in arguments
    assert "--max-concurrency" not in arguments
