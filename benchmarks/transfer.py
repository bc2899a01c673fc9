"""Time to first token of real prefill/decode pairs over links of known rate: tables, JSON, plot. Needs root, pyroute2.

    python benchmarks/transfer.py --model-path DIR --out DIR [--rates 1,10,0] [--prompts 2048,8192] [-- SGLang flags]

Prefill and decode run in two network namespaces that a veth pair joins; a token bucket limits each direction while the
servers stay up (0: no limit). Every variant answers the same prompts of random token ids, with empty prefix caches, one
request at a time; the time is that of one request for one token, sent to both servers as a router sends it.

Packing and quantisation are shown apart: ``native-packed`` gains only from few large writes, what the others gain on
top comes from fewer bytes. Token importance is meaningless with dummy weights, its cost is real; ``require_probe`` is
off. With ``--fragmented`` decode hands out its pages in random order, as a pool does that has served for long.

A request that fails or takes too long is a result: it is recorded, and the variant's servers, whose path may be wedged,
are given up. transfer.json is written as the run goes on, so that whatever ends the run loses nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import fragmented_pool
import plain_transfer_log
import psutil
from command_line import made, numbers
from link_goodput import goodput_gbps
from pairs import (
    VARIANTS,
    Pair,
    PairBench,
    PairGroup,
    PairOptions,
    cpu_seconds,
    gpu_bytes,
    groups_of,
    variants_named,
)
from plain_transfer_log import read_plain_transfer
from server_memory import peak_rss_bytes, reset_peak_rss
from sglang_plugin import plugin_folder
from transfer_prompts import prompt_of
from transfer_samples import UNLIMITED, Sample, ServerCost, Status, shortest_link_seconds
from transfer_table import console, print_results, shortened

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.launch.client import flush_caches, generate_on_pair
from spectrumkv_sglang.launch.netns import Link, linked_hosts
from spectrumkv_sglang.launch.sglang_versions import installed_version
from spectrumkv_sglang.launch.transfer_log_reader import request_transfer

GIGABIT = 1_000_000_000
WARM_UP = -1


class TransferRun:
    """One run over all variants, links and prompts.

    Attributes:
        document: everything measured so far, as it goes to transfer.json.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._console = console()
        self._ends = time.monotonic() + options.time_limit
        self._samples: list[Sample] = []
        self._unsaved = 0
        plugins = options.out / "plugins"
        self._pairs = PairOptions(
            model=options.model_path,
            log_dir=options.out / "logs",
            flags=tuple(options.flags),
            prefill_python_paths=(plugin_folder(plugins, Path(plain_transfer_log.__file__)),),
            decode_python_paths=(
                (plugin_folder(plugins, Path(fragmented_pool.__file__)),) if options.fragmented else ()
            ),
        )
        self._variants = variants_named(options.variants)
        self.document: dict[str, Any] = {
            "sglang": installed_version(),
            "device": self._pairs.device.value,
            "model": str(options.model_path),
            "flags": options.flags,
            "fragmented": options.fragmented,
            "request_timeout": options.request_timeout,
            "variants": [
                {name: value for name, value in asdict(variant).items() if name != "python_paths"}
                for variant in self._variants
            ],
            "peak_rss_since": "warm-up",
            "goodput_gbps": {},
            "servers": [],
            "samples": [],
        }

    def measure_all(self) -> None:
        """Group by group of variants over all links and prompts."""
        options = self._options
        with linked_hosts() as link:
            for rate in options.rates:
                _limit(link, rate)
                self.document["goodput_gbps"][f"{rate:g}"] = goodput_gbps(link)
            bench = PairBench(self._pairs, link)
            for group_variants in groups_of(self._variants, options.servers_at_once):
                if self._time_is_up:
                    self._skip_rest([variant.name for variant in group_variants], "time limit of the run")
                    continue
                _limit(link, UNLIMITED)
                with bench.running(group_variants) as group:
                    names = ", ".join(pair.variant.name for pair in group.pairs)
                    self._console.print(f"{names}: ready after {group.ready_seconds:.0f} s")
                    for name, error in group.failed.items():
                        self._console.print(f"{name}: not started", markup=False)
                        self._skip_rest([name], f"servers did not start: {error}", Status.FAILED)
                    self._measure_group(link, group)
        self.save()

    def save(self) -> None:
        """Write transfer.json; a reader never sees half of it."""
        self.document["samples"] = [asdict(sample) for sample in self._samples]
        path = self._options.out / "transfer.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
        self._unsaved = 0

    @property
    def _time_is_up(self) -> bool:
        return time.monotonic() > self._ends

    def _measure_group(self, link: Link, group: PairGroup) -> None:
        started = [pair.variant.name for pair in group.pairs]
        for prompt_tokens in self._options.prompts:  # the first requests warm a server up
            for pair in tuple(group.pairs):
                self._case(link, group, pair, UNLIMITED, prompt_tokens, WARM_UP)
        for pair in group.pairs:
            if not reset_peak_rss(pair.servers):
                self.document["peak_rss_since"] = "start"
        for rate in self._options.rates if group.pairs else ():
            _limit(link, rate)
            for prompt_tokens in self._options.prompts:
                for repeat in range(self._options.repeats):
                    for pair in tuple(group.pairs):
                        self._case(link, group, pair, rate, prompt_tokens, repeat)
                self._unsaved += 1
                if self._unsaved >= self._options.save_every:
                    self.save()
            self._console.print(f"  {f'{rate:g} Gb/s' if rate else 'no limit'}: measured")
        for pair in group.pairs:
            self._account(pair)
        given_up = set(started) - {pair.variant.name for pair in group.pairs}
        self._skip_rest(sorted(given_up), "servers given up after a failure")
        self.save()

    def _case(self, link: Link, group: PairGroup, pair: Pair, rate: float, prompt_tokens: int, repeat: int) -> None:
        """One request, unless it cannot end in time; a failure costs the pair."""
        blank = Sample(pair.variant.name, rate, prompt_tokens, repeat=repeat)
        least = shortest_link_seconds(self._samples, pair.variant.name, prompt_tokens, rate)
        skipped = None
        if self._time_is_up:
            skipped = "time limit of the run"
        elif least > self._options.request_timeout:
            skipped = f"the link alone needs {least:.0f} s, --request-timeout is {self._options.request_timeout:g} s"
        if skipped is not None:
            self._samples.append(replace(blank, status=Status.SKIPPED, error=skipped))
            return
        started = time.monotonic()
        try:
            self._samples.append(self._request(link, pair, blank))
        except (SpectrumKVError, psutil.NoSuchProcess) as error:
            timed_out = time.monotonic() - started >= self._options.request_timeout
            status = Status.TIMEOUT if timed_out else Status.FAILED
            self._samples.append(replace(blank, status=status, error=str(error)))
            self._console.print(f"  {pair.variant.name}: {status.value}: {shortened(str(error))}", markup=False)
            self._account(pair)
            group.give_up(pair)
            self.save()

    def _request(self, link: Link, pair: Pair, blank: Sample) -> Sample:
        flush_caches(pair.servers)
        if pair.log is not None:
            pair.log.skip()
        logged = pair.log_path.stat().st_size if pair.log_path.exists() else 0
        token_ids = prompt_of(blank.prompt_tokens, blank.repeat, self._options.vocabulary)
        cpu, sent = cpu_seconds(pair.servers), link.bytes_left_to_right()
        answer = generate_on_pair(
            pair.prefill, pair.decode, token_ids, max_new_tokens=1, timeout_seconds=self._options.request_timeout
        )
        sample = replace(
            blank,
            ttft_seconds=answer.seconds,
            link_bytes=link.bytes_left_to_right() - sent,
            cpu_seconds=cpu_seconds(pair.servers) - cpu,
        )
        if pair.log is None:
            plain = read_plain_transfer(pair.log_path, logged)
            if plain is None:
                return sample
            return replace(
                sample,
                transfer_seconds=plain.seconds,
                wire_bytes=plain.wire_bytes,
                writes=plain.blocks,
                chunks=plain.chunks,
            )
        records = pair.log.next_request()
        moved = request_transfer(records)
        return replace(
            sample,
            transfer_seconds=moved.transfer_seconds,
            wire_bytes=moved.wire_bytes,
            native_bytes=moved.native_bytes,
            writes=moved.writes,
            chunks=len(records),
            pack_seconds=sum(record.pack_seconds for record in records),
            write_seconds=sum(record.write_seconds for record in records),
            wait_seconds=sum(record.wait_seconds for record in records),
        )

    def _account(self, pair: Pair) -> None:
        """Remember the memory of a pair's servers, unless one of them is gone."""
        if not all(server.alive for server in pair.servers):
            return
        prefill, decode = ((server,) for server in pair.servers)
        cost = ServerCost(
            variant=pair.variant.name,
            prefill_peak_rss_bytes=peak_rss_bytes(prefill),
            decode_peak_rss_bytes=peak_rss_bytes(decode),
            prefill_gpu_bytes=gpu_bytes(prefill),
            decode_gpu_bytes=gpu_bytes(decode),
        )
        self.document["servers"].append(asdict(cost))

    def _skip_rest(self, names: Sequence[str], why: str, status: Status = Status.SKIPPED) -> None:
        """Record every case of these variants that has no sample."""
        for name in names:
            tried = {(s.rate_gbps, s.prompt_tokens) for s in self._samples if s.variant == name and s.repeat >= 0}
            self._samples += [
                Sample(name, rate, prompt_tokens, status=status, error=why)
                for rate in self._options.rates
                for prompt_tokens in self._options.prompts
                if (rate, prompt_tokens) not in tried
            ]


def _limit(link: Link, rate_gbps: float) -> None:
    link.set_rate(None if rate_gbps == UNLIMITED else round(rate_gbps * GIGABIT))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python benchmarks/transfer.py", description="Pairs over slow links.")
    parser.add_argument("--model-path", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="for transfer.json and the servers' logs"
    )
    parser.add_argument("--rates", type=numbers, default=[1.0, 10.0, UNLIMITED], help="Gb/s, 0: no limit")
    parser.add_argument("--prompts", type=numbers, default=[2048.0, 8192.0], help="tokens")
    parser.add_argument("--repeats", type=int, default=3)
    names = ", ".join(variant.name for variant in VARIANTS)
    parser.add_argument(
        "--variants",
        type=lambda text: text.split(","),
        default=[v.name for v in VARIANTS],
        help=f"of {names}; all by default",
    )
    parser.add_argument("--servers-at-once", type=int, default=6, help="servers that run at the same time")
    parser.add_argument("--fragmented", action="store_true", help="decode hands out its pages in random order")
    parser.add_argument("--request-timeout", type=float, default=180.0, help="seconds; then a variant is given up")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds; no request starts after them")
    parser.add_argument("--save-every", type=int, default=1, metavar="CASES", help="cases between writes of the JSON")
    parser.add_argument("--vocabulary", type=int, default=30000, help="token ids are drawn from 100 to this")
    parser.add_argument("--plot", action="store_true", help="also write transfer.png (needs matplotlib)")
    parser.add_argument("flags", nargs="*", help="further SGLang flags, after --")
    options = parser.parse_args()
    options.prompts = [int(tokens) for tokens in options.prompts]
    options.out = made(options.out)
    return options


def main() -> int:
    """Command line."""
    options = _options()
    run = TransferRun(options)
    try:
        run.measure_all()
    finally:
        run.save()
    cases = print_results(console(), [run.document])
    if options.plot:
        from transfer_plot import plot_ratios

        plot_ratios(cases, options.out / "transfer.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
