"""Router + 2 prefill + 2 decode servers on this machine, without a GPU: who sent what, and what a lost decode does.

    python examples/fleet.py

Asks a plain server for the right answers, then the fleet through SGLang's router, several requests at once. Prints for
each server what it counted. Then kills one decode server while requests are on their way, asks again, and ends
everything. Exit status 0: every request was answered, those that were under way at the kill when they were asked again.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.launch.client import Completion, HttpError, generate
from spectrumkv_sglang.launch.model import fetch_model
from spectrumkv_sglang.launch.processes import stopping_on_signals
from spectrumkv_sglang.launch.prompts import DEMO_PROMPTS, Prompt
from spectrumkv_sglang.launch.servers import (
    DEFAULT_LOG_DIR,
    Fleet,
    Role,
    Router,
    Server,
    ServerSpec,
    SGLangServer,
    default_backend,
)
from spectrumkv_sglang.observability import metric_specs as specs
from spectrumkv_sglang.observability.live_metrics import LiveMetrics, fetch_metrics

NEW_TOKENS = 32
LOG_DIR = DEFAULT_LOG_DIR / "fleet"
# Both tiers have at least 8 bits: no probe is needed.
PROFILE = {"SPECTRUMKV_PROFILE": "spectrum-safe", "SPECTRUMKV_BUDGET": "0.55"}
# On few cores SGLang's health check, which generates a token, waits behind requests until the router gives up on it.
NO_TOKEN_FOR_HEALTH = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
# In turn, so that each of few requests meets another pair.
ROUTER_FLAGS = (
    *("--policy", "round_robin", "--health-failure-threshold", "2"),
    *("--health-check-interval-secs", "5", "--health-check-timeout-secs", "60"),
    *("--shutdown-grace-period-secs", "1"),
)
KILL_AFTER_SECONDS = 0.5
# A request whose decode server dies under way waits for prefill, which waits for decode: the client gives up first.
REQUEST_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True)
class Answered:
    """One request: its answer, or why there is none."""

    prompt: Prompt
    completion: Completion | None
    error: str = ""

    def same_tokens(self, expected: dict[str, Completion]) -> int:
        """Positions with the token that the plain server chose."""
        if self.completion is None:
            return 0
        pairs = zip(self.completion.output_ids, expected[self.prompt.name].output_ids, strict=False)
        return sum(ours == plain for ours, plain in pairs)


class FleetDemo:
    """Servers of one run; ``prefills`` and ``decodes`` are how many of each."""

    def __init__(self, console: Console, fleet: Fleet, model: Path, *, prefills: int, decodes: int) -> None:
        self.console, self.fleet, self.model = console, fleet, model
        self.counts = {Role.PREFILL: prefills, Role.DECODE: decodes}

    def run(self, requests: int) -> bool:
        """Everything in order; whether all requests were answered."""
        expected = self._expected()
        prefills, decodes = self._start_servers()
        router = Router(prefills, decodes, log_dir=LOG_DIR, native=True, extra_args=ROUTER_FLAGS)
        self.fleet.start_router(router)
        self._wait([router])
        self.console.print(f"\n{requests} requests through the router, 4 at a time")
        answers = ask_many(router, requests)
        self._show_answers(answers, expected)
        self.console.print(counters_of([*prefills, *decodes]))

        lost = decodes[-1]
        self.console.print(f"{requests} requests again; {lost.name} is killed {KILL_AFTER_SECONDS} s after the first")
        killer = threading.Timer(KILL_AFTER_SECONDS, os.killpg, (lost.pid, signal.SIGKILL))
        killer.start()
        during = ask_many(router, requests)
        killer.join()
        self.fleet.stop([lost])
        self._show_answers(during, expected)
        left = [one.prompt for one in during if one.completion is None]
        if left:
            self.console.print(f"asking again for {len(left)} that were on their way to {lost.name}, as a client would")
            during = [one for one in during if one.completion is not None] + ask_all(router, left)
            self._show_answers(during[-len(left) :], expected)
        self.console.print(f"{requests} requests more, without {lost.name}")
        after = ask_many(router, requests)
        self._show_answers(after, expected)
        self.console.print(counters_of([*prefills, *decodes[:-1]]))
        return all(one.completion is not None for one in (*answers, *during, *after))

    def _expected(self) -> dict[str, Completion]:
        plain = self._start(Role.PLAIN, "plain")
        self._wait([plain])
        expected = {one.name: generate(plain, one.text, max_new_tokens=NEW_TOKENS) for one in DEMO_PROMPTS}
        self.fleet.stop([plain])
        return expected

    def _start_servers(self) -> tuple[list[SGLangServer], list[SGLangServer]]:
        prefills, decodes = (
            [self._start(role, f"{role.value}-{index}") for index in range(self.counts[role])]
            for role in (Role.PREFILL, Role.DECODE)
        )
        self._wait([*prefills, *decodes])
        return prefills, decodes

    def _start(self, role: Role, name: str) -> SGLangServer:
        spec = ServerSpec(
            role=role,
            model=self.model,
            backend=default_backend(),
            extra_args=("--enable-metrics",),
            env={} if role is Role.PLAIN else {**PROFILE, **NO_TOKEN_FOR_HEALTH},
        )
        return self.fleet.start(SGLangServer(spec, name, log_dir=LOG_DIR))

    def _wait(self, servers: Sequence[Server]) -> None:
        names = ", ".join(server.name for server in servers)
        self.console.print(f"starting {names}; logs are in {LOG_DIR}")
        self.fleet.wait_ready(
            servers,
            on_ready=lambda server, seconds: self.console.print(f"  {server.name} ready after {seconds:.0f} s"),
            on_waiting=lambda waiting, seconds: self.console.print(
                f"  waiting for {', '.join(server.name for server in waiting)}, {seconds:.0f} s so far"
            ),
        )

    def _show_answers(self, answers: Sequence[Answered], expected: dict[str, Completion]) -> None:
        answered = [one for one in answers if one.completion is not None]
        same = sum(one.same_tokens(expected) for one in answered)
        of = sum(len(expected[one.prompt.name].output_ids) for one in answered)
        slowest = max((one.completion.seconds for one in answered if one.completion), default=0.0)
        self.console.print(
            f"  answered {len(answered)} of {len(answers)}, {same} of {of} tokens are the plain server's, "
            f"the slowest took {slowest:.1f} s"
        )
        for one in answers:
            if one.completion is None:
                self.console.print(f"  {one.prompt.name}: {one.error}", markup=False)


def ask_many(router: Router, requests: int) -> list[Answered]:
    """Send so many requests with the prompts in turn."""
    return ask_all(router, [DEMO_PROMPTS[index % len(DEMO_PROMPTS)] for index in range(requests)])


def ask_all(router: Router, prompts: Sequence[Prompt]) -> list[Answered]:
    """Send ``prompts``, four at a time."""

    def ask(prompt: Prompt) -> Answered:
        try:
            completion = generate(
                router, prompt.text, max_new_tokens=NEW_TOKENS, timeout_seconds=REQUEST_TIMEOUT_SECONDS
            )
            return Answered(prompt, completion)
        except HttpError as error:
            return Answered(prompt, None, str(error))

    pool = ThreadPoolExecutor(4)
    try:
        return list(pool.map(ask, prompts))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C the servers end at once, and so do requests


def counters_of(servers: Sequence[SGLangServer]) -> Table:
    """What each server has counted since its start, from its /metrics."""
    table = Table(box=SIMPLE_HEAD, title="since the start", title_justify="left", padding=(0, 1), pad_edge=False)
    table.add_column("server")
    for heading in ("chunks\ntiered", "chunks\nnative", "KV sent\nkB", "on the\nwire kB", "b", "tokens\nhigh/mid"):
        table.add_column(heading, justify="right")
    table.add_column("payloads\nunpacked", justify="right")
    table.add_column("failures", justify="right")
    for server in servers:
        metrics = fetch_metrics(server.url)
        table.add_row(server.name, *(sent(metrics) if server.spec.role is Role.PREFILL else ["-"] * 6), *ends(metrics))
    return table


def sent(metrics: LiveMetrics) -> list[str]:
    """A prefill server's cells."""
    native, wire = metrics.total(specs.NATIVE_BYTES), metrics.total(specs.WIRE_BYTES)
    tokens = [metrics.total(specs.TOKENS, tier=tier) for tier in ("high", "mid")]
    return [
        *(f"{metrics.total(specs.CHUNKS, path=path):.0f}" for path in ("tiered", "native")),
        *(f"{native / 1e3:,.0f}", f"{wire / 1e3:,.0f}", f"{wire / native:.3f}" if native else "-"),
        "/".join(f"{count:,.0f}" for count in tokens),
    ]


def ends(metrics: LiveMetrics) -> list[str]:
    """Cells of both roles: payloads unpacked, failures by cause."""
    failures = metrics.by_label(specs.FAILURES, "cause")
    return [
        f"{metrics.total(specs.UNPACK_SECONDS, '_count'):.0f}",
        ", ".join(f"{count:.0f} {cause}" for (cause,), count in islice(failures.items(), 3)) or "none",
    ]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model-path", type=Path, help="a model's directory (default: fetch the demo's)")
    parser.add_argument("--prefills", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--decodes", type=int, default=2, help="at least 2: one is killed (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=12, help="each time (default: %(default)s)")
    options = parser.parse_args()
    if options.decodes < 2 or options.prefills < 1 or options.requests < 1:
        parser.error("expected at least 1 prefill, 2 decodes (one of them is killed) and 1 request")
    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    try:
        with stopping_on_signals(), Fleet() as fleet:
            model = options.model_path or fetch_model(console=console)
            demo = FleetDemo(console, fleet, model, prefills=options.prefills, decodes=options.decodes)
            all_answered = demo.run(options.requests)
    except SpectrumKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped: all servers are down", file=sys.stderr)
        return 130
    console.print("all servers are down")
    return 0 if all_answered else 1


if __name__ == "__main__":
    sys.exit(main())
