"""The simulator on GPU clusters: held against measured GPU pairs, then JCT and TTFT over native at 5, 25 and 100 Gb/s.

    python benchmarks/controller_clusters.py --gpu docs/results/gpu.json [--out FILE.md]

Speeds of the codecs are those of the measured kernels, the cost of a chunk and prefill's speed those of the measured
pairs. Their two servers share one GPU: how much of its speed a transfer keeps while prefill computes is fitted to one
of their cases (`FITTED`), and is 1 for the clusters, where each server has GPUs of its own. Half of a cluster's GPUs
prefill. Requests come as a Poisson process at half of what prefill or, if that is less, the link could carry natively:
more would make native's queue, and any ratio, as long as one likes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from controller_report import table
from link_model_points import codecs_of, pool_bytes_per_token
from transfer_samples import UNLIMITED, Sample, Status, samples_of

from spectrumkv_sglang.simulation.replay import Cluster, CodecSpeed, ReplayResult, outcomes_of, replay
from spectrumkv_sglang.simulation.traces import BandwidthTrace, Request, poisson_requests
from spectrumkv_sglang.tuning.frontier import NATIVE, Candidate
from spectrumkv_sglang.tuning.link_model import FixedCost, bytes_per_second
from spectrumkv_sglang.tuning.settings import ControllerSettings

CHUNK_TOKENS = 8192
CHUNK_SECONDS = 0.017
"""Of a packed chunk over TCP, fitted to the single-chunk requests of the GPU pairs (docs/results/gpu.md)."""
GOODPUT = 0.957
RATES = (5, 25, 100)
FITTED = ("plain-tuned", 10.0, 32768)
MEASURED = {
    "plain-tuned": "native",
    "native-packed": "native-packed@1",
    "int8": "int8@0.52",
    "near-lossless-0.5": "near-lossless@0.5",
    "balanced-0.3": "balanced@0.3",
    "aggressive-0.2": "aggressive@0.2",
}
CELLS = {
    "near-lossless 8/0/92": ("near-lossless@0.5", 0.0001),
    "balanced 1/11/88": ("balanced@0.3", 0.005),
    "aggressive 1/17/82": ("aggressive@0.2", 0.05),
}
OUTPUT_TOKENS, DECODE_SECONDS = 200, 0.02


@dataclass(frozen=True)
class Shape:
    """A model: GPUs of one instance, and how much slower than Llama-3.1-8B on one GPU that instance prefills."""

    name: str
    gpus: int
    slower: float


# Prefill's work grows with the parameters, 32.8 and 8.0 billion, and is shared by the GPUs of the instance.
SHAPES = (Shape("Llama-3.1-8B", 1, 1.0), Shape("Qwen2.5-32B", 4, 32.8 / 8.0 / 4))


@dataclass(frozen=True)
class Speeds:
    """Candidates with their true b, and codecs by name."""

    candidates: tuple[Candidate, ...]
    codecs: dict[str, CodecSpeed]


def speeds_of(document: Mapping[str, Any], shape: str) -> Speeds:
    """Of the measured kernels; the three profiles by channel from their share of the floor."""
    measured, kernels = codecs_of(document, shape), document["kernels"]
    pool = pool_bytes_per_token(document, shape) * kernels["tokens"]
    candidates, codecs = [], {}
    for variant, name, kl in (("native-packed", "native-packed@1", 0.0), ("int8", "int8@0.52", 0.002)):
        codec = measured[variant]
        candidates.append(Candidate(name, codec.b, kl))
        codecs[name] = CodecSpeed(codec.pack_bytes_per_second, codec.unpack_bytes_per_second)
    for entry in document["kernels_by_precision"]["now"]:
        if entry["cell"] in CELLS:
            name, kl = CELLS[entry["cell"]]
            floor = pool * (1 + entry["b"]) / kernels["copy_bytes_per_second"]
            candidates.append(Candidate(name, entry["b"], kl))
            codecs[name] = CodecSpeed(pool * entry["pack"] / floor, pool * entry["unpack"] / floor)
    return Speeds(tuple(candidates), codecs)


@dataclass(frozen=True)
class Pairs:
    """The measured GPU pairs: samples of the runs with contiguous pools, and what a plain socket got of each link."""

    samples: list[Sample]
    goodput: dict[float, float]

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Pairs:
        """Of gpu.json."""
        runs = [run for run in document["transfer"] if run.get("goodput_gbps") and not run.get("fragmented")]
        goodput = [{(float(rate), gbps) for rate, gbps in run["goodput_gbps"].items()} for run in runs]
        rates = {rate for of_run in goodput for rate, _ in of_run}
        return cls(
            [s for run in runs for s in samples_of(run) if s.status is Status.OK and s.repeat >= 0 and s.ttft_seconds],
            {
                rate: statistics.mean(gbps for of_run in goodput for known, gbps in of_run if known == rate)
                for rate in rates
            },
        )

    def case(self, variant: str, rate: float, tokens: int) -> list[Sample]:
        """Requests of one case."""
        return [s for s in self.samples if (s.variant, s.rate_gbps, s.prompt_tokens) == (variant, rate, tokens)]

    def prefill_rate(self, tokens: int) -> float:
        """Tokens a second: TTFT of tuned Mooncake without a limit, its last chunk's transfer left out."""
        free = self.case("plain-tuned", UNLIMITED, tokens)
        return tokens / statistics.median(
            (s.ttft_seconds or 0) - (s.transfer_seconds or 0) / (s.chunks or 1) for s in free
        )


class HeldAgainstPairs:
    """Predictions of the cases that were measured."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._pairs, self._shape = Pairs.of(document), SHAPES[0].name
        self._speeds = speeds_of(document, self._shape)
        self._kv_bytes = pool_bytes_per_token(document, self._shape)
        self._by_name = {candidate.name: candidate for candidate in self._speeds.candidates} | {"native": NATIVE}
        self.overlap = self._fitted_overlap()

    def rows(self) -> tuple[list[tuple[str, ...]], list[float]]:
        """Measured beside predicted TTFT, and the relative errors of what was not fitted."""
        rows, errors = [], []
        cases = {(s.rate_gbps, s.prompt_tokens, s.variant) for s in self._pairs.samples if s.rate_gbps != UNLIMITED}
        for rate, tokens, variant in sorted(cases, key=lambda case: (case[1], case[0], case[2])):
            if variant not in MEASURED:
                continue
            measured = statistics.median(s.ttft_seconds or 0 for s in self._pairs.case(variant, rate, tokens))
            predicted = self._ttft(variant, rate, tokens, self.overlap)
            error = predicted / measured - 1
            fitted = (variant, rate, tokens) == FITTED
            if not fitted:
                errors.append(error)
            cells = f"{predicted * 1e3:,.0f} / {measured * 1e3:,.0f} ({'fitted' if fitted else f'{error:+.1%}'})"
            rows.append((f"{rate:g} Gb/s", f"{tokens:,}", MEASURED[variant], cells))
        return rows, errors

    def _fitted_overlap(self) -> float:
        wanted = statistics.median(s.ttft_seconds or 0 for s in self._pairs.case(*FITTED))
        low, high = 0.01, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self._ttft(*FITTED, middle) > wanted else (low, middle)
        return (low + high) / 2

    def _ttft(self, variant: str, rate: float, tokens: int, overlap: float) -> float:
        cluster = _cluster(self._speeds, self._pairs.prefill_rate(tokens), self._kv_bytes, 1)
        candidate = self._by_name[MEASURED[variant]]
        (outcome,) = outcomes_of(
            [Request(0.0, tokens, 1)],
            BandwidthTrace([(0.0, bytes_per_second(self._pairs.goodput[rate]))]),
            replace(cluster, overlap=overlap),
            self._speeds.candidates,
            candidate,
            ControllerSettings(),
            fixed=candidate,
        )
        return outcome.ttft_s


def cluster_rows(document: Mapping[str, Any], max_kl: float) -> list[tuple[str, ...]]:
    """JCT and TTFT of the controller over native, for every shape, prompt, size of cluster and link."""
    pairs, rows = Pairs.of(document), []
    for shape in SHAPES:
        speeds, kv_bytes = speeds_of(document, shape.name), pool_bytes_per_token(document, shape.name)
        for tokens in (8192, 32768):
            rate = pairs.prefill_rate(tokens) / shape.slower
            for gpus in (8, 64, 1024):
                ranks = max(1, gpus // 2 // shape.gpus)
                cells = []
                for gbps in RATES:
                    controlled, native = _both(speeds, _cluster(speeds, rate, kv_bytes, ranks), gbps, tokens, max_kl)
                    cells += [_ratios(controlled, native)]
                rows.append((shape.name, f"{tokens:,}", f"{gpus:,}", *cells))
            alone = []
            for gbps in RATES:
                cluster = _cluster(speeds, rate, kv_bytes, 1)
                controlled, native = _both(speeds, cluster, gbps, tokens, max_kl, load=0.1)
                alone.append(_ratios(controlled, native))
            rows.append((shape.name, f"{tokens:,}", "one instance, a tenth of the load", *alone))
    return rows


def _both(
    speeds: Speeds, cluster: Cluster, gbps: float, tokens: int, max_kl: float, load: float = 0.5
) -> tuple[ReplayResult, ReplayResult]:
    goodput = bytes_per_second(gbps) * GOODPUT
    most = min(cluster.prefill_tokens_per_second / tokens, goodput / (tokens * cluster.kv_bytes_per_token))
    requests = poisson_requests(
        max(400, 30 * cluster.prefill_ranks),
        per_second=load * most * cluster.prefill_ranks,
        prompt_tokens=tokens,
        output_tokens=OUTPUT_TOKENS,
        spread=0.0,
        seed=1,
    )
    link = BandwidthTrace([(0.0, goodput)])
    safe = next(c for c in speeds.candidates if c.name == "near-lossless@0.5")
    settings = ControllerSettings(max_kl=max_kl)
    controlled, native = (
        replay(requests, link, cluster, speeds.candidates, safe, settings, fixed=fixed) for fixed in (None, NATIVE)
    )
    return controlled, native


def _cluster(speeds: Speeds, rate: float, kv_bytes: float, ranks: int) -> Cluster:
    return Cluster(
        prefill_ranks=ranks,
        prefill_tokens_per_second=rate,
        decode_seconds_per_token=DECODE_SECONDS,
        kv_bytes_per_token=kv_bytes,
        codecs=speeds.codecs,
        fixed=FixedCost(chunk_seconds=CHUNK_SECONDS),
        chunk_tokens=CHUNK_TOKENS,
    )


def _ratios(controlled: ReplayResult, native: ReplayResult) -> str:
    jct, ttft = ((of(controlled), of(native)) for of in (lambda r: r.jct_s["mean"], lambda r: r.ttft_s["mean"]))
    return f"{jct[0] / jct[1]:.2f}, {ttft[0] / ttft[1]:.2f} ({jct[1]:.1f} -> {jct[0]:.1f} s)"


def report_of(document: Mapping[str, Any], max_kl: float) -> str:
    """Both parts as Markdown."""
    held = HeldAgainstPairs(document)
    rows, errors = held.rows()
    absolute = [abs(error) for error in errors]
    links = [f"{gbps} Gb/s" for gbps in RATES]
    return "\n\n".join(
        (
            "Predicted / measured TTFT of GPU pairs, ms (error); fitted: a transfer keeps "
            f"{held.overlap:.2f} of its speed during prefill.",
            table(("link", "prompt", "choice", "TTFT"), rows),
            f"Error {statistics.mean(absolute):.1%} on average, {max(absolute):.1%} at most, {len(errors)} cases.",
            f"Controller (max_kl {max_kl:g}) over native: JCT, TTFT (mean JCT native -> controller); "
            f"{OUTPUT_TOKENS} tokens of {DECODE_SECONDS * 1e3:g} ms.",
            table(("shape", "prompt", "GPUs", *links), cluster_rows(document, max_kl)),
        )
    )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python benchmarks/controller_clusters.py", description="GPU clusters.")
    parser.add_argument("--gpu", type=Path, required=True, metavar="gpu.json")
    parser.add_argument("--max-kl", type=float, default=0.005, help="nats a token")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE.md")
    options = parser.parse_args()
    text = report_of(json.loads(options.gpu.read_text(encoding="utf-8")), options.max_kl) + "\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
