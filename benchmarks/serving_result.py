"""What one run of ``sglang.bench_serving`` says, and what the servers used meanwhile."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectrumkv_sglang.errors import SpectrumKVError


class ResultError(SpectrumKVError):
    """A result of ``sglang.bench_serving`` that does not have the expected content."""


@dataclass(frozen=True)
class Percentiles:
    """Median, 90th and 99th percentile, in milliseconds."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class ClientResult:
    """What the client saw.

    Attributes:
        requests: requests sent.
        failures: requests without a complete answer, see `failed_requests`.
        first_failure: the first one in words; empty without any.
        duration_seconds: from the first request to the last answer.
        requests_per_second: complete answers.
        output_tokens_per_second: generated tokens.
        ttft_ms: time to first token.
        itl_ms: time between tokens of one answer.
    """

    requests: int
    failures: int
    first_failure: str
    duration_seconds: float
    requests_per_second: float
    output_tokens_per_second: float
    ttft_ms: Percentiles
    itl_ms: Percentiles


@dataclass(frozen=True)
class ServingSample:
    """One variant under one load. Bytes and CPU time are those of the load alone.

    Attributes:
        variant: name.
        link_gbps: rate of the link, 0 for no limit.
        request_rate: mean number of requests a second.
        repeat: number of the repetition, from 0.
        client: what the client saw.
        link_bytes: bytes that left prefill's interface, headers included.
        cpu_seconds: of both servers' process trees.
        rss_peak_bytes: sum of the largest resident sizes of their processes, shared pages counted once each process.
        gpu_peak_bytes: largest GPU memory in use; None without a GPU.
        gpu_peak_of: "pair", or "machine" where the driver hides which process uses what: then idle variants count too.
    """

    variant: str
    link_gbps: float
    request_rate: float
    repeat: int
    client: ClientResult
    link_bytes: int
    cpu_seconds: float
    rss_peak_bytes: int
    gpu_peak_bytes: int | None = None
    gpu_peak_of: str = "pair"


def read_result(path: Path, *, requests: int, output_tokens: int) -> ClientResult:
    """Read the line of JSON that ``--output-details`` writes.

    Args:
        path: of the file.
        requests: number of requests that were sent.
        output_tokens: tokens that each answer has to have.

    Raises:
        ResultError: no JSON, or not that of SGLang 0.5.16 to 0.5.23.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
        failed = failed_requests(content, requests=requests, output_tokens=output_tokens)
        return ClientResult(
            requests=requests,
            failures=len(failed),
            first_failure=failed[0] if failed else "",
            duration_seconds=float(content["duration"]),
            requests_per_second=(requests - len(failed)) / float(content["duration"]),
            output_tokens_per_second=float(content["output_throughput"]),
            ttft_ms=_percentiles(content, "ttft"),
            itl_ms=_percentiles(content, "itl"),
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ResultError(
            f"{path}: expected what `sglang.bench_serving --output-details` of SGLang 0.5.16 to 0.5.23 writes, "
            f"got {error!r}"
        ) from error


def failed_requests(content: dict[str, Any], *, requests: int, output_tokens: int) -> list[str]:
    """What went wrong, one text a failed request.

    The tool counts a request as complete when its stream ends, even if a server answered with an error inside the
    stream, gave up half way, or no token had any text. Those are found here by their times and lengths.
    """
    errors, ttfts, lengths = content["errors"], content["ttfts"], content["output_lens"]
    failed = []
    for i, (error, ttft, length) in enumerate(zip(errors, ttfts, lengths, strict=True)):
        if error:
            failed.append(f"request {i}: {error.strip().splitlines()[-1]}")
        elif ttft <= 0:
            failed.append(f"request {i}: no token with text in its answer")
        elif length != output_tokens:
            failed.append(f"request {i}: {length} tokens in its answer, expected {output_tokens}")
    return failed + [f"request {i}: not in the result" for i in range(len(errors), requests)]


def _percentiles(content: dict[str, Any], name: str) -> Percentiles:
    return Percentiles(*(float(content[f"{which}_{name}_ms"]) for which in ("median", "p90", "p99")))


def sample_from(record: dict[str, Any]) -> ServingSample:
    """A sample from a benchmark's JSON.

    Raises:
        ResultError: it is none.
    """
    try:
        client = dict(record["client"])
        for name in ("ttft_ms", "itl_ms"):
            client[name] = Percentiles(**client[name])
        return ServingSample(**{**record, "client": ClientResult(**client)})
    except (KeyError, TypeError) as error:
        raise ResultError(f"not a sample of benchmarks/serving.py ({error!r})") from error


@dataclass(frozen=True)
class ServingRow:
    """One variant under one load: medians over the repetitions, sums of requests and failures, the largest memory."""

    variant: str
    link_gbps: float
    request_rate: float
    requests: int
    failures: int
    ttft_ms: Percentiles
    itl_ms: Percentiles
    requests_per_second: float
    output_tokens_per_second: float
    link_bytes: float
    cpu_seconds: float
    rss_peak_bytes: int
    gpu_peak_bytes: int | None


def rows_of(samples: Sequence[ServingSample]) -> list[ServingRow]:
    """Rows by link, request rate and, in their order of appearance, variant."""
    names = list(dict.fromkeys(sample.variant for sample in samples))
    cases = sorted({(s.link_gbps or float("inf"), s.request_rate, names.index(s.variant)) for s in samples})
    rows = []
    for link_gbps, request_rate, index in cases:
        own = [
            sample
            for sample in samples
            if (sample.link_gbps or float("inf"), sample.request_rate, sample.variant)
            == (link_gbps, request_rate, names[index])
        ]
        gpu = [sample.gpu_peak_bytes for sample in own if sample.gpu_peak_bytes is not None]
        rows.append(
            ServingRow(
                variant=names[index],
                link_gbps=own[0].link_gbps,
                request_rate=request_rate,
                requests=sum(sample.client.requests for sample in own),
                failures=sum(sample.client.failures for sample in own),
                ttft_ms=_medians([sample.client.ttft_ms for sample in own]),
                itl_ms=_medians([sample.client.itl_ms for sample in own]),
                requests_per_second=statistics.median(sample.client.requests_per_second for sample in own),
                output_tokens_per_second=statistics.median(sample.client.output_tokens_per_second for sample in own),
                link_bytes=statistics.median(sample.link_bytes for sample in own),
                cpu_seconds=statistics.median(sample.cpu_seconds for sample in own),
                rss_peak_bytes=max(sample.rss_peak_bytes for sample in own),
                gpu_peak_bytes=max(gpu) if gpu else None,
            )
        )
    return rows


def _medians(several: Sequence[Percentiles]) -> Percentiles:
    return Percentiles(
        *(statistics.median(getattr(percentiles, name) for percentiles in several) for name in ("p50", "p90", "p99"))
    )
