"""Serving under load: ``sglang.bench_serving`` through the router on real pairs over a link. Needs root and pyroute2.

    python benchmarks/serving.py --model-path DIR --out DIR [--request-rates 1,2,4] [--link 10] [-- SGLang flags]
    python benchmarks/serving.py --show DIR/serving.json [--plot FILE]

Prefill and decode run in two network namespaces that a link of the given rate joins; router and client run on decode's
side, so that the link carries KV and little else towards decode. Servers of several variants are up at the same time,
but only one is under load. Every variant gets the same prompts at the same times (one seed), from empty prefix caches.

Table and ``serving.json`` hold time to first token (TTFT) and between tokens (ITL), throughput, bytes on the link, CPU
seconds and memory. The exit status is 1 when any request failed or a variant did not start.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from command_line import made, numbers
from pairs import (
    VARIANTS,
    Pair,
    PairBench,
    PairGroup,
    PairOptions,
    cpu_seconds,
    groups_of,
    variants_named,
)
from rich.console import Console
from server_memory import peak_rss_bytes, reset_peak_rss
from serving_gpu import GpuMemoryWatch
from serving_load import Load, LoadError, LoadGenerator
from serving_report import draw_serving, failure_lines, serving_table
from serving_result import ServingSample, read_result, rows_of, sample_from
from serving_tokenizer import serving_tokenizer

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.launch.client import flush_caches, generate
from spectrumkv_sglang.launch.netns import Link, linked_hosts
from spectrumkv_sglang.launch.processes import stopping_on_signals
from spectrumkv_sglang.launch.servers import Router, detect_device
from spectrumkv_sglang.launch.sglang_versions import installed_version

GIGABIT = 1_000_000_000
_WARM_UP_TOKENS = 4


class ServingBench:
    """The run: its options, what was measured, and the file that holds it."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self._options, self._console = options, console
        self._logs = options.out / "logs"
        self._started = time.monotonic()
        self.samples: list[ServingSample] = []
        self.not_measured: dict[str, str] = {}
        self._rss_since = "each load's start"

    def run(self) -> None:
        """All variants, group by group; the results are written after each load."""
        options = self._options
        self._logs.mkdir(parents=True, exist_ok=True)
        tokenizer = serving_tokenizer(options.model_path, options.tokenizer, options.flags, options.out / "tokenizer")
        flags = (*options.flags, "--tokenizer-path", str(tokenizer))
        pair_options = PairOptions(model=options.model_path, log_dir=self._logs, flags=flags)
        wanted = variants_named(options.variants)
        with linked_hosts() as link:
            bench = PairBench(pair_options, link)
            for variants in groups_of(wanted, options.servers_at_once):
                link.set_rate(None)
                with bench.running(variants) as group:
                    ready = ", ".join(pair.variant.name for pair in group.pairs) or "none"
                    self._console.print(f"ready after {group.ready_seconds:.0f} s: {ready}")
                    for name, reason in group.failed.items():
                        self._complain(f"{name} did not start: {reason}")
                    self.not_measured.update(group.failed)
                    if group.pairs:
                        self._measure_group(group, link, tokenizer)

    def _measure_group(self, group: PairGroup, link: Link, tokenizer: Path) -> None:
        options = self._options
        routers = {}
        for pair in group.pairs:
            name = f"router-{pair.variant.name}"
            router = Router(pair.prefill, pair.decode, name, log_dir=self._logs, beside=pair.decode)
            routers[pair.variant.name] = group.fleet.start_router(router)
        group.fleet.wait_ready(routers.values())
        # What the client needs to run is what a server needs.
        spec = group.pairs[0].decode.spec
        with LoadGenerator(spec.environment(), spec.namespace, self._logs) as generator:
            for pair in group.pairs:
                self._warm_up(routers[pair.variant.name])
            for link_gbps in options.link:
                link.set_rate(round(link_gbps * GIGABIT) if link_gbps else None)
                for repeat in range(options.repeats):
                    for request_rate in options.request_rates:
                        for pair in group.pairs:
                            if self._out_of_time():
                                self.not_measured[f"{pair.variant.name} at {request_rate:g}/s"] = "--time-limit"
                                continue
                            load = self._load(request_rate)
                            router = routers[pair.variant.name]
                            case = (link_gbps, request_rate, repeat)
                            self._measure(generator, router, pair, link, load, tokenizer, case)

    def _measure(
        self,
        generator: LoadGenerator,
        router: Router,
        pair: Pair,
        link: Link,
        load: Load,
        tokenizer: Path,
        case: tuple[float, float, int],
    ) -> None:
        link_gbps, request_rate, repeat = case
        name = f"{pair.variant.name}-{link_gbps:g}gbps-{request_rate:g}rps-{repeat}"
        flush_caches(pair.servers)
        if not reset_peak_rss(pair.servers):
            self._rss_since = "start"
        with GpuMemoryWatch(pair.servers) as gpu:
            cpu, sent = cpu_seconds(pair.servers), link.bytes_left_to_right()
            try:
                result = generator.run(load, router.url, tokenizer, name)
            except LoadError as error:
                self._complain(f"{name}: {error}")
                self.not_measured[name] = str(error)
                return
            cpu, sent = cpu_seconds(pair.servers) - cpu, link.bytes_left_to_right() - sent
        client = read_result(result, requests=load.prompts, output_tokens=load.output_tokens)
        sample = ServingSample(
            variant=pair.variant.name,
            link_gbps=link_gbps,
            request_rate=request_rate,
            repeat=repeat,
            client=client,
            link_bytes=sent,
            cpu_seconds=cpu,
            rss_peak_bytes=peak_rss_bytes(pair.servers),
            gpu_peak_bytes=gpu.peak_bytes,
            gpu_peak_of=gpu.peak_of,
        )
        self.samples.append(sample)
        self.write()
        self._console.print(
            f"  {name}: {client.duration_seconds:.0f} s, "
            f"TTFT {client.ttft_ms.p50:.0f} ms, ITL {client.itl_ms.p50:.1f} ms",
            highlight=False,
        )
        if client.failures:
            self._complain(f"  {client.failures} of {client.requests} requests FAILED: {client.first_failure}")

    def _complain(self, text: str) -> None:
        self._console.print(text, style="bold red", markup=False, highlight=False, soft_wrap=True)

    def _warm_up(self, router: Router) -> None:
        """The first request of a length compiles and allocates; two lengths, so that also a short one has been seen."""
        for tokens in (self._options.input_tokens, 16):
            prompt = [100 + i % 1000 for i in range(tokens)]
            generate(router, prompt, max_new_tokens=_WARM_UP_TOKENS, sampling={"ignore_eos": True})

    def _load(self, request_rate: float) -> Load:
        options = self._options
        return Load(
            request_rate=request_rate,
            prompts=options.num_prompts,
            input_tokens=options.input_tokens,
            output_tokens=options.output_tokens,
            seed=options.seed,
            max_concurrency=options.max_concurrency,
        )

    def _out_of_time(self) -> bool:
        limit = self._options.time_limit
        return limit is not None and time.monotonic() - self._started > limit

    def write(self) -> None:
        """Write what has been measured so far."""
        options = self._options
        document = {
            "sglang": installed_version(),
            "device": detect_device().value,
            "model": str(options.model_path),
            "flags": options.flags,
            "load": asdict(self._load(0)),
            "variants": [asdict(variant) for variant in variants_named(options.variants)],
            "not_measured": self.not_measured,
            "peak_rss_since": self._rss_since,
            "samples": [asdict(sample) for sample in self.samples],
        }
        text = json.dumps(document, indent=1, default=str) + "\n"
        (options.out / "serving.json").write_text(text, encoding="utf-8")


def show(samples: list[ServingSample], not_measured: dict[str, str], plot: Path | None, console: Console) -> int:
    """Print the table and what failed, draw the plot if asked for, and return the exit status."""
    rows = rows_of(samples)
    console.print(serving_table(rows))
    first = {sample.variant: sample.client.first_failure for sample in samples if sample.client.failures}
    complaints = failure_lines(rows, first, not_measured)
    for line in complaints:
        console.print(line, style="bold red", markup=False, highlight=False, soft_wrap=True)
    if plot is not None:
        draw_serving(rows, plot)
    return 1 if complaints else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python benchmarks/serving.py", description="Serving under load.")
    parser.add_argument("--model-path", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for serving.json and logs")
    parser.add_argument("--show", type=Path, metavar="FILE", help="only show an earlier run's serving.json")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="picture to draw; needs matplotlib")
    parser.add_argument("--variants", type=lambda text: text.split(","), default=[v.name for v in VARIANTS])
    parser.add_argument("--request-rates", type=numbers, default=[1.0, 2.0, 4.0], help="mean requests a second")
    parser.add_argument("--link", type=numbers, default=[10.0], help="rates of the link in Gb/s, 0: no limit")
    parser.add_argument("--num-prompts", type=int, default=32, help="for each request rate")
    parser.add_argument("--input-tokens", type=int, default=4096)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--max-concurrency", type=int, default=None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--servers-at-once", type=int, default=6, help="servers that run at the same time")
    parser.add_argument("--time-limit", type=float, default=None, help="seconds after which no further load starts")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="default: the model's; with dummy weights one made for them"
    )
    parser.add_argument("flags", nargs="*", help="further SGLang flags, after --")
    return parser


def main() -> int:
    """Command line."""
    parser = _parser()
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 170)
    if options.show is not None:
        document: dict[str, Any] = json.loads(options.show.read_text(encoding="utf-8"))
        samples = [sample_from(record) for record in document["samples"]]
        return show(samples, document["not_measured"], options.plot, console)
    if options.model_path is None or options.out is None:
        parser.error("--model-path and --out are needed, or --show")
    options.out = made(options.out)
    bench = ServingBench(options, console)
    try:
        with stopping_on_signals():
            bench.run()
    except SpectrumKVError as error:
        bench.not_measured["the rest"] = str(error)
    bench.write()
    return show(bench.samples, bench.not_measured, options.plot, console)


if __name__ == "__main__":
    sys.exit(main())
