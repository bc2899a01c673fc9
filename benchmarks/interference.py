"""Decode throughput while KV of other requests arrives, on real pairs over a link. Needs root and pyroute2.

    python benchmarks/interference.py --model-path DIR --out DIR [--streams 8] [--arriving 8192] [-- SGLang flags]
    python benchmarks/interference.py --show DIR/interference.json [--plot FILE]

A round: long answers start together on decode, and their tokens are counted from the last one's first token to the
first one's last, so every round generates the same tokens at the same lengths. Nothing else happens in a *quiet* round;
in the others prompts for one token arrive meanwhile, one after the other:

* *paced*: at a pace that every variant keeps, so all variants move the same KV in the same time;
* *back to back*: each as soon as the one before is answered; a faster transfer then means more prompts;
* *prefill alone* (``--prefill-alone``): paced, but to a plain server on prefill's GPU, so that no KV arrives.

Rounds of all variants alternate and repeat; each is compared with the quiet one of the same repetition. On one GPU
prefill's own work slows decode down; two GPUs keep it apart (``--prefill-gpu 0 --decode-gpu 1``).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from command_line import made
from interference_pairs import PlacedPairs, Placement
from interference_report import draw_interference, interference_table
from interference_result import QUIET, Round, Window, rows_of, window_of
from interference_streams import Arrivals, DecodeStreams
from pairs import Pair, PairGroup, PairOptions, cpu_seconds, variants_named
from rich.console import Console

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.launch.client import flush_caches, generate, generate_on_pair
from spectrumkv_sglang.launch.netns import Link, linked_hosts
from spectrumkv_sglang.launch.processes import stopping_on_signals
from spectrumkv_sglang.launch.servers import Device, Fleet, Role, ServerSpec, SGLangServer, detect_device
from spectrumkv_sglang.launch.sglang_versions import installed_version

GIGABIT = 1_000_000_000
PACED, BACK_TO_BACK, PREFILL_ALONE = "paced", "back to back", "prefill alone"
DEFAULT_VARIANTS = ["plain-tuned", "native-packed", "int8", "balanced-0.3"]
# A pace that the slowest variant keeps although its times vary.
_PACE_MARGIN = 1.25


@dataclass(frozen=True)
class Arriving:
    """How prompts arrive in a round: from one to the next ``every_seconds``, sent by ``send``."""

    every_seconds: float
    send: Callable[[int], None]


class InterferenceBench:
    """The run: its options, what was measured, and the file that holds it."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self._options, self._console = options, console
        self._logs = options.out / "logs"
        self._started = time.monotonic()
        self._placement = Placement(options.prefill_gpu, options.decode_gpu, options.decode_graphs)
        self._prompts = random.Random(options.seed)
        self._pace = options.every
        self.rounds: list[Round] = []
        self.failures: list[str] = []

    def run(self) -> None:
        """Start all servers, warm up, and measure until the repetitions or the time are used up."""
        options = self._options
        self._logs.mkdir(parents=True, exist_ok=True)
        pair_options = PairOptions(model=options.model_path, log_dir=self._logs, flags=tuple(options.flags))
        with linked_hosts() as link, Fleet() as further:
            # Started first, so that it gets ready beside the pairs.
            alone = further.start(self._plain_server(link)) if options.prefill_alone else None
            bench = PlacedPairs(pair_options, link, self._placement)
            with bench.running(variants_named(options.variants)) as group:
                further.wait_ready()
                self._console.print(
                    f"{', '.join(p.variant.name for p in group.pairs)}: ready after {group.ready_seconds:.0f} s"
                )
                self.failures += [f"{name} did not start: {reason}" for name, reason in group.failed.items()]
                link.set_rate(round(options.link * GIGABIT) if options.link else None)
                self._measure_all(group, link, alone)

    def _measure_all(self, group: PairGroup, link: Link, alone: SGLangServer | None) -> None:
        self._warm_up(group, link, alone)
        kinds = [QUIET, PACED, BACK_TO_BACK, *([PREFILL_ALONE] if alone is not None else [])]
        for repeat in range(self._options.repeats):
            turn = repeat % max(len(group.pairs), 1)
            for pair in group.pairs[turn:] + group.pairs[:turn]:
                start = repeat % len(kinds)
                for kind in kinds[start:] + kinds[:start]:
                    if self._out_of_time():
                        self._console.print(f"[bold red]--time-limit: stopped in repetition {repeat}[/]")
                        return
                    self._round(pair, link, kind, repeat, self._arriving(pair, kind, alone))

    def _warm_up(self, group: PairGroup, link: Link, alone: SGLangServer | None) -> None:
        """A round of each pair that is not kept; the slowest arrival sets the pace, unless one was given."""
        slowest = 0.0
        for pair in group.pairs:
            self._send_to_pair(pair)(0)
            warm = self._round(pair, link, BACK_TO_BACK, -1, self._arriving(pair, BACK_TO_BACK, alone))
            slowest = max(slowest, warm.arrival_seconds or 0.0) if warm is not None else slowest
        if alone is not None:
            self._send_to_plain(alone)(0)
        if self._pace is None:
            self._pace = slowest * _PACE_MARGIN
        self._console.print(f"paced: a prompt of {self._options.arriving} tokens every {self._pace:.2f} s")

    def _round(self, pair: Pair, link: Link, kind: str, repeat: int, arriving: Arriving | None) -> Round | None:
        try:
            one = self._measure(pair, link, kind, repeat, arriving)
        except SpectrumKVError as error:
            self.failures.append(f"{pair.variant.name}, {kind}, repetition {repeat}: {error}")
            self._console.print(f"FAILED: {self.failures[-1]}", style="bold red", markup=False, soft_wrap=True)
            return None
        self._console.print(
            f"  {repeat} {pair.variant.name}, {kind}: {one.tokens_per_second:.1f} tok/s in {one.window.seconds:.1f} s, "
            f"{one.arrivals} prompts",
            highlight=False,
        )
        if repeat >= 0:
            self.rounds.append(one)
            self.write()
        return one

    def _measure(self, pair: Pair, link: Link, kind: str, repeat: int, arriving: Arriving | None) -> Round:
        options = self._options
        flush_caches(pair.servers)
        prompts = random.Random(options.seed)  # the same in every round
        starts = [self._token_ids(prompts, options.stream_prompt) for _ in range(options.streams)]
        streams = DecodeStreams(pair, starts, options.stream_tokens)
        streams.start()
        cpu, sent = cpu_seconds(pair.servers), link.bytes_left_to_right()
        arrivals = Arrivals(arriving.send, arriving.every_seconds) if arriving is not None else None
        if arrivals is not None:
            arrivals.start()
        streams.wait_until_one_ends()
        cpu, sent = cpu_seconds(pair.servers) - cpu, link.bytes_left_to_right() - sent
        try:
            streams.join()
        finally:
            if arrivals is not None:
                arrivals.stop()
        took = arrivals.seconds if arrivals is not None else []
        return Round(
            variant=pair.variant.name,
            kind=kind,
            repeat=repeat,
            window=window_of(streams.times),
            arrivals=len(took),
            late=arrivals.late if arrivals is not None else 0,
            arrival_seconds=statistics.median(took) if took else None,
            link_bytes=sent,
            cpu_seconds=cpu,
        )

    def _arriving(self, pair: Pair, kind: str, alone: SGLangServer | None) -> Arriving | None:
        if kind == QUIET:
            return None
        if kind == BACK_TO_BACK:
            return Arriving(0.0, self._send_to_pair(pair))
        if kind == PREFILL_ALONE and alone is not None:
            return Arriving(self._pace, self._send_to_plain(alone))
        return Arriving(self._pace, self._send_to_pair(pair))

    def _send_to_pair(self, pair: Pair) -> Callable[[int], None]:
        def send(_number: int) -> None:
            prompt = self._token_ids(self._prompts, self._options.arriving)
            generate_on_pair(pair.prefill, pair.decode, prompt, max_new_tokens=1)

        return send

    def _send_to_plain(self, server: SGLangServer) -> Callable[[int], None]:
        def send(_number: int) -> None:
            generate(server, self._token_ids(self._prompts, self._options.arriving), max_new_tokens=1)

        return send

    def _token_ids(self, drawn: random.Random, tokens: int) -> list[int]:
        return drawn.choices(range(100, self._options.vocabulary), k=tokens)

    def _plain_server(self, link: Link) -> SGLangServer:
        """A server that only computes, on prefill's GPU and in its namespace."""
        spec = ServerSpec(
            role=Role.PLAIN,
            model=self._options.model_path,
            host=link.left_address,
            namespace=link.left,
            extra_args=tuple(self._options.flags),
        )
        return SGLangServer(self._placement.applied(spec), "plain", log_dir=self._logs)

    def _out_of_time(self) -> bool:
        limit = self._options.time_limit
        return limit is not None and time.monotonic() - self._started > limit

    def write(self) -> None:
        """Write what has been measured so far."""
        options = self._options
        names = ("link", "streams", "stream_prompt", "stream_tokens", "arriving", "seed", "flags")
        document = {
            "sglang": installed_version(),
            "device": detect_device().value,
            "model": str(options.model_path),
            "options": {name: getattr(options, name) for name in names},
            "placement": asdict(self._placement),
            "pace_seconds": self._pace,
            "failures": self.failures,
            "rounds": [asdict(one) for one in self.rounds],
        }
        (options.out / "interference.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def rounds_from(document: dict[str, Any]) -> list[Round]:
    """The rounds of an earlier run's JSON."""
    return [Round(**{**record, "window": Window(**record["window"])}) for record in document["rounds"]]


def show(rounds: list[Round], failures: list[str], plot: Path | None, console: Console) -> int:
    """Print the table and what failed, draw the plot if asked for, and return the exit status."""
    rows = rows_of(rounds)
    console.print(interference_table(rows))
    for failure in failures:
        console.print(f"FAILED: {failure}", style="bold red", markup=False, highlight=False, soft_wrap=True)
    if plot is not None:
        draw_interference(rows, plot)
    return 1 if failures or not rounds else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python benchmarks/interference.py", description="Decode while KV arrives.")
    parser.add_argument("--model-path", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for interference.json and logs")
    parser.add_argument("--show", type=Path, metavar="FILE", help="only show an earlier run's interference.json")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="picture to draw; needs matplotlib")
    parser.add_argument("--variants", type=lambda text: text.split(","), default=DEFAULT_VARIANTS)
    parser.add_argument("--link", type=float, default=0.0, help="rate of the link in Gb/s, 0: no limit")
    parser.add_argument("--streams", type=int, default=8, help="long answers under way")
    parser.add_argument("--stream-prompt", type=int, default=128, help="tokens of their prompts")
    parser.add_argument("--stream-tokens", type=int, default=512, help="tokens that each generates")
    parser.add_argument("--arriving", type=int, default=8192, help="tokens of a prompt that arrives meanwhile")
    parser.add_argument("--every", type=float, default=None, help="seconds between paced prompts; default: found out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--prefill-alone", action="store_true", help="also measure prefill's own work (one more server)"
    )
    parser.add_argument("--prefill-gpu", type=int, default=None, metavar="N")
    parser.add_argument("--decode-gpu", type=int, default=None, metavar="N")
    parser.add_argument("--decode-graphs", action="store_true", help="decode with CUDA graphs, as SGLang's default")
    parser.add_argument("--vocabulary", type=int, default=30000, help="token ids are drawn from 100 to this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--time-limit", type=float, default=None, help="seconds after which no further round starts")
    parser.add_argument("flags", nargs="*", help="further SGLang flags, after --")
    return parser


def main() -> int:
    """Command line."""
    parser = _parser()
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 170)
    if options.show is not None:
        document = json.loads(options.show.read_text(encoding="utf-8"))
        return show(rounds_from(document), document["failures"], options.plot, console)
    if options.model_path is None or options.out is None:
        parser.error("--model-path and --out are needed, or --show")
    wants_gpu = options.decode_graphs or options.prefill_gpu is not None or options.decode_gpu is not None
    if wants_gpu and detect_device() is Device.CPU:
        parser.error("--decode-graphs, --prefill-gpu and --decode-gpu need a GPU; nvidia-smi lists none")
    options.out = made(options.out)
    bench = InterferenceBench(options, console)
    try:
        with stopping_on_signals():
            bench.run()
    except SpectrumKVError as error:
        bench.failures.append(str(error))
    bench.write()
    return show(bench.rounds, bench.failures, options.plot, console)


if __name__ == "__main__":
    sys.exit(main())
