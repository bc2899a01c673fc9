"""Time to first token of real prefill/decode pairs over links of known rate: table and JSON. Needs root and pyroute2.

    python benchmarks/transfer.py --model-path DIR --out DIR [--rates 1,10,0] [--prompts 2048,8192] [-- SGLang flags]

Prefill and decode run in two network namespaces that a veth pair joins; a token bucket limits each direction while the
servers stay up (0: no limit). Every variant answers the same prompts of random token ids, with empty prefix caches, one
request at a time; the time is that of one request for one token, sent to both servers as a router sends it.

Packing and quantisation are shown apart: ``native-packed`` gains only from few large writes, what the others gain on
top comes from fewer bytes. Token importance is meaningless with dummy weights, its cost is real; ``require_probe`` is
off.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from spectrumkv_sglang.launch.client import flush_caches, generate_on_pair
from spectrumkv_sglang.launch.netns import Link, linked_hosts
from spectrumkv_sglang.launch.servers import Fleet, Role, ServerSpec, SGLangServer, detect_device
from spectrumkv_sglang.launch.sglang_versions import installed_version
from spectrumkv_sglang.launch.transfer_log_reader import TransferLogReader, request_transfer

GIGABIT = 1_000_000_000
# What makes plain Mooncake over TCP several times faster than its defaults (large copies from the GPU, more threads)
# and keeps fragmented pools from overrunning its queue.
TUNED = {
    "MC_TCP_SLICE_SIZE": "1048576",
    "MC_NUM_TCP_IO_THREADS": "8",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
}


@dataclass(frozen=True)
class Variant:
    """One way to move the KV. ``budget`` and ``profile`` are None for SGLang's own."""

    name: str
    profile: str | None = None
    budget: float | None = None
    env: dict[str, str] = field(default_factory=lambda: dict(TUNED))

    @property
    def backend(self) -> str:
        """Value of ``--disaggregation-transfer-backend``."""
        return "mooncake_tcp" if self.profile is None else "spectrumkv_tcp"


VARIANTS = (
    Variant("plain", env={}),
    Variant("plain-tuned"),
    Variant("native-packed", "native-packed", 1.0),
    Variant("int8", "int8"),
    Variant("spectrum-0.5", "spectrum", 0.53),
    Variant("spectrum-0.35", "spectrum", 0.35),
    Variant("spectrum-0.28", "spectrum", 0.28),
)


@dataclass(frozen=True)
class Sample:
    """One request. Bytes are those that left prefill's interface, headers included; CPU time is that of both servers'
    process trees; ``transfer_seconds``, ``wire_bytes`` and ``writes`` are the transfer log's, None for SGLang's own."""

    variant: str
    rate_gbps: float
    prompt_tokens: int
    ttft_seconds: float
    link_bytes: int
    cpu_seconds: float
    transfer_seconds: float | None = None
    wire_bytes: int | None = None
    native_bytes: int | None = None
    writes: int | None = None


@dataclass(frozen=True)
class Pair:
    """A running pair of one variant."""

    variant: Variant
    prefill: SGLangServer
    decode: SGLangServer
    log: TransferLogReader | None


class Bench:
    """The servers of one run on the two ends of ``link``."""

    def __init__(self, link: Link, options: argparse.Namespace, console: Console) -> None:
        self._link, self._options, self._console = link, options, console
        self._device = detect_device()
        self._logs = options.out / "logs"

    @contextmanager
    def pairs(self, variants: Sequence[Variant]) -> Iterator[list[Pair]]:
        """Start all servers of ``variants`` side by side; variants of one backend and environment share a decode."""
        with Fleet() as fleet:
            decodes: dict[tuple[str, str], SGLangServer] = {}
            pairs = []
            for variant in variants:
                key = (variant.backend, str(variant.env))
                if key not in decodes:
                    decodes[key] = fleet.start(self._server(Role.DECODE, variant, f"decode-{variant.name}"))
                prefill = fleet.start(self._server(Role.PREFILL, variant, f"prefill-{variant.name}"))
                log = TransferLogReader(self._transfer_log(variant)) if variant.profile else None
                pairs.append(Pair(variant, prefill, decodes[key], log))
            started = time.monotonic()
            fleet.wait_ready()
            self._console.print(
                f"{', '.join(v.name for v in variants)}: ready after {time.monotonic() - started:.0f} s"
            )
            yield pairs

    def measure(self, pair: Pair, rate_gbps: float, prompt_tokens: int, repeat: int) -> Sample:
        """One request; the link's rate is set already."""
        flush_caches([pair.prefill, pair.decode])
        if pair.log is not None:
            pair.log.skip()
        drawn = random.Random(prompt_tokens * 1000 + repeat)
        token_ids = [drawn.randrange(100, self._options.vocabulary) for _ in range(prompt_tokens)]
        cpu, sent = self._cpu_seconds(pair), self._link.bytes_left_to_right()
        answer = generate_on_pair(pair.prefill, pair.decode, token_ids, max_new_tokens=1)
        sample = Sample(
            variant=pair.variant.name,
            rate_gbps=rate_gbps,
            prompt_tokens=prompt_tokens,
            ttft_seconds=answer.seconds,
            link_bytes=self._link.bytes_left_to_right() - sent,
            cpu_seconds=self._cpu_seconds(pair) - cpu,
        )
        if pair.log is None:
            return sample
        moved = request_transfer(pair.log.next_request())
        return Sample(
            **{
                **asdict(sample),
                "transfer_seconds": moved.transfer_seconds,
                "wire_bytes": moved.wire_bytes,
                "native_bytes": moved.native_bytes,
                "writes": moved.writes,
            }
        )

    def _server(self, role: Role, variant: Variant, name: str) -> SGLangServer:
        on_left = role is Role.PREFILL
        env = {**variant.env, "SGLANG_HOST_IP": self._link.left_address if on_left else self._link.right_address}
        if variant.profile is not None:
            env["SPECTRUMKV_REQUIRE_PROBE"] = "false"  # decode's own profile has a low tier, so it takes one
            if on_left:
                env["SPECTRUMKV_PROFILE"] = variant.profile
                if variant.budget is not None:
                    env["SPECTRUMKV_BUDGET"] = str(variant.budget)
                path = self._transfer_log(variant)
                path.unlink(missing_ok=True)
                env["SPECTRUMKV_TRANSFER_LOG"] = str(path)
        spec = ServerSpec(
            role=role,
            model=self._options.model_path,
            backend=variant.backend,
            device=self._device,
            host=self._link.left_address if on_left else self._link.right_address,
            namespace=self._link.left if on_left else self._link.right,
            env=env,
            extra_args=tuple(self._options.flags),
        )
        return SGLangServer(spec, name, log_dir=self._logs)

    def _transfer_log(self, variant: Variant) -> Path:
        return (self._logs / f"{variant.name}.jsonl").resolve()

    @staticmethod
    def _cpu_seconds(pair: Pair) -> float:
        total = 0.0
        for server in (pair.prefill, pair.decode):
            leader = psutil.Process(server.pid)
            for process in (leader, *leader.children(recursive=True)):
                times = process.cpu_times()
                total += times.user + times.system
        return total


def run(options: argparse.Namespace, console: Console) -> list[Sample]:
    """All variants, group by group, over all rates and prompts."""
    wanted = [variant for variant in VARIANTS if variant.name in options.variants]
    samples: list[Sample] = []
    with linked_hosts() as link:
        bench = Bench(link, options, console)
        for start in range(0, len(wanted), options.at_once):
            link.set_rate(None)
            with bench.pairs(wanted[start : start + options.at_once]) as pairs:
                for pair in pairs:  # the first request of a server warms it up
                    for prompt_tokens in options.prompts:
                        bench.measure(pair, 0, prompt_tokens, -1)
                for rate in options.rates:
                    link.set_rate(round(rate * GIGABIT) if rate else None)
                    for prompt_tokens in options.prompts:
                        samples += [
                            bench.measure(pair, rate, prompt_tokens, repeat)
                            for repeat in range(options.repeats)
                            for pair in pairs
                        ]
                    console.print(f"  {rate or 'no limit'} Gb/s measured")
    return samples


def table_of(samples: Sequence[Sample]) -> Table:
    """Medians, and the ratio of each time to the faster of the two plain ones."""
    table = Table(title="Time to first token")
    for column in (
        "Gb/s",
        "prompt",
        "variant",
        "TTFT ms",
        "of plain",
        "of tuned",
        "link MB",
        "b",
        "transfer ms",
        "CPU s",
    ):
        table.add_column(column, justify="left" if column == "variant" else "right")
    cases = sorted({(sample.rate_gbps or float("inf"), sample.prompt_tokens) for sample in samples})
    for rate, prompt in cases:
        here = [s for s in samples if (s.rate_gbps or float("inf")) == rate and s.prompt_tokens == prompt]
        names = list(dict.fromkeys(sample.variant for sample in here))
        ttft = {name: statistics.median(s.ttft_seconds for s in here if s.variant == name) for name in names}
        for name in names:
            own = [sample for sample in here if sample.variant == name]
            first = own[0]
            b = f"{first.wire_bytes / first.native_bytes:.3f}" if first.wire_bytes and first.native_bytes else ""
            moved = [s.transfer_seconds for s in own if s.transfer_seconds is not None]
            table.add_row(
                "no limit" if rate == float("inf") else f"{rate:g}",
                str(prompt),
                name,
                f"{ttft[name] * 1e3:.0f}",
                *(f"{ttft[name] / ttft[base]:.2f}" if base in ttft else "" for base in ("plain", "plain-tuned")),
                f"{statistics.median(s.link_bytes for s in own) / 1e6:.1f}",
                b,
                f"{statistics.median(moved) * 1e3:.0f}" if moved else "",
                f"{statistics.median(s.cpu_seconds for s in own):.2f}",
            )
    return table


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python benchmarks/transfer.py", description="Pairs over slow links.")
    parser.add_argument("--model-path", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="for transfer.json and the servers' logs"
    )
    parser.add_argument("--rates", type=_numbers, default=[1.0, 10.0, 0.0], help="Gb/s, 0: no limit")
    parser.add_argument("--prompts", type=_numbers, default=[2048.0, 8192.0], help="tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--variants", type=lambda text: text.split(","), default=[v.name for v in VARIANTS])
    parser.add_argument("--at-once", type=int, default=3, help="variants whose servers run at the same time")
    parser.add_argument("--vocabulary", type=int, default=30000, help="token ids are drawn from 100 to this")
    parser.add_argument("flags", nargs="*", help="further SGLang flags, after --")
    options = parser.parse_args()
    options.prompts = [int(tokens) for tokens in options.prompts]
    options.out.mkdir(parents=True, exist_ok=True)
    options.out = options.out.resolve()
    console = Console(width=None if sys.stdout.isatty() else 130)
    samples = run(options, console)
    document = {
        "sglang": installed_version(),
        "device": detect_device().value,
        "model": str(options.model_path),
        "flags": options.flags,
        "variants": [asdict(variant) for variant in VARIANTS if variant.name in options.variants],
        "samples": [asdict(sample) for sample in samples],
    }
    (options.out / "transfer.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    console.print(table_of(samples))
    return 0


if __name__ == "__main__":
    sys.exit(main())
