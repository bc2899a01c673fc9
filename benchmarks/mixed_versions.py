"""Plain SGLang, this package, another protocol version of it and this package switched off, in one cluster.

    python benchmarks/mixed_versions.py --out build/mixed_versions

Two prefill and two decode servers with SmolLM2 (or --model) on this machine. Servers are replaced one step after the
other, at their addresses, as in a rolling upgrade and its rollback by one variable, while the other servers stay up
and requests run on them. Every answer is compared with a plain server's. On 2 cores about 15 minutes; writes
``mixed_versions.json`` and ``mixed_versions.md`` under --out and exits with 1 if an answer is wrong or missing, a chunk
went another way than it should, or a slot or page is still held.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from command_line import made, this_machine
from fault_pair import SETTINGS, metrics_of
from mixed_report import Change, Row, write
from mixed_traffic import TOKENS, Exam, Traffic
from sglang_plugin import plugin_folder

from spectrumkv_sglang.launch.client import HttpError, flush_caches, generate
from spectrumkv_sglang.launch.model import fetch_model
from spectrumkv_sglang.launch.processes import stopping_on_signals
from spectrumkv_sglang.launch.prompts import LONG_PROMPTS
from spectrumkv_sglang.launch.servers import READY_TIMEOUT_SECONDS, Fleet, Role, ServerSpec, SGLangServer
from spectrumkv_sglang.observability.metric_specs import LANDING_SLOTS, STAGING_SLOTS

SETTLE_SECONDS = 30.0


@dataclass(frozen=True)
class Kind:
    """What is installed on a server, and how it is switched."""

    name: str
    backend: str = "spectrumkv_tcp"
    env: Mapping[str, str] = field(default_factory=dict)
    plugin: str = ""


OURS = Kind("ours")
PLAIN = Kind("plain SGLang", backend="mooncake_tcp")
OFF = Kind("ours, `SPECTRUMKV_ENABLED=false`", env={"SPECTRUMKV_ENABLED": "false"})
OTHER = Kind("ours, next protocol version", plugin="other_protocol")

Pair = tuple[str, str]


@dataclass(frozen=True)
class Step:
    """Servers that are replaced, and pairs that get requests: while that happens, and when it has."""

    name: str
    replaced: Mapping[str, Kind]
    during: Sequence[Pair]
    after: Sequence[Pair]


P1, P2, D1, D2 = PLACES = ("prefill-1", "prefill-2", "decode-1", "decode-2")
STEPS = (
    Step(
        "ours beside plain SGLang",
        {P1: OURS, P2: PLAIN, D1: OURS, D2: PLAIN},
        (),
        ((P1, D1), (P1, D2), (P2, D1), (P2, D2)),
    ),
    Step("prefill switched off", {P1: OFF}, ((P2, D1), (P2, D2)), ((P1, D1), (P1, D2), (P2, D1))),
    Step("prefill switched on again", {P1: OURS}, ((P2, D1), (P2, D2)), ((P1, D1), (P2, D1))),
    Step("decode switched off", {D1: OFF}, ((P1, D2), (P2, D2)), ((P1, D1), (P2, D1), (P1, D2))),
    Step(
        "prefill of another version; decode switched on",
        {P2: OTHER, D1: OURS},
        ((P1, D2),),
        ((P2, D1), (P1, D1), (P2, D2)),
    ),
    Step("decode of another version", {D2: OTHER}, ((P1, D1), (P2, D1)), ((P1, D2), (P2, D2), (P1, D1))),
)


def wanted(prefill: Kind, decode: Kind) -> str:
    """Path and reason of every chunk from ``prefill`` to ``decode``; "" where SGLang's own backend sends."""
    if prefill is PLAIN:
        return ""
    if prefill is OFF:
        return "native, disabled"
    if decode in (PLAIN, OFF):
        return "native, peer_without_spectrumkv"
    return "tiered" if prefill is decode else "native, protocol_version"


class MixedCluster:
    """Four servers by place, each of a kind."""

    def __init__(self, model: Path, out: Path, fleet: Fleet, ready_seconds: float) -> None:
        self._model, self._out, self._fleet, self._ready_seconds = model, out, fleet, ready_seconds
        self.kinds: dict[str, Kind] = {}
        self.servers: dict[str, SGLangServer] = {}
        self._started = 0
        prompts = [prompt.text for prompt in LONG_PROMPTS]
        self.exam = Exam(prompts, self._right_answers(prompts))

    def _right_answers(self, prompts: Sequence[str]) -> list[tuple[int, ...]]:
        spec = ServerSpec(role=Role.PLAIN, model=self._model)
        plain = self._fleet.start(SGLangServer(spec, "plain", log_dir=self._out))
        self._fleet.wait_ready([plain], timeout_seconds=self._ready_seconds)
        right = [generate(plain, text, max_new_tokens=TOKENS).output_ids for text in prompts]
        self._fleet.stop([plain])
        return right

    def replace(self, kinds: Mapping[str, Kind]) -> float:
        """Put servers of these kinds in their places, at the same addresses; returns the seconds that it took."""
        started = time.monotonic()
        former = {place: self.servers.pop(place) for place in kinds if place in self.servers}
        self._fleet.stop(former.values())
        for place, kind in kinds.items():
            self.kinds[place] = kind
            self.servers[place] = self._start(place, kind, former.get(place))
        self._fleet.wait_ready([self.servers[place] for place in kinds], timeout_seconds=self._ready_seconds)
        return time.monotonic() - started

    def _start(self, place: str, kind: Kind, former: SGLangServer | None) -> SGLangServer:
        self._started += 1
        role = Role.PREFILL if place in (P1, P2) else Role.DECODE
        address: tuple[str, ...] = ()
        if former is not None:
            address = ("--port", str(former.port))
            if role is Role.PREFILL:
                address += ("--disaggregation-bootstrap-port", str(former.bootstrap_port))
        plugins = self._out / "plugins"
        file = Path(__file__).parent / f"{kind.plugin}.py"
        ours = kind is not PLAIN
        spec = ServerSpec(
            role=role,
            model=self._model,
            backend=kind.backend,
            env={**SETTINGS, **kind.env, "SPECTRUMKV_TRANSFER_LOG": str(self._log(place))} if ours else {},
            extra_args=("--enable-metrics", *address),
            python_paths=(plugin_folder(plugins, file),) if kind.plugin else (),
        )
        server = SGLangServer(spec, f"{place}-{self._started}", log_dir=self._out)
        if former is not None:
            server.port, server.bootstrap_port = former.port, former.bootstrap_port
        return self._fleet.start(server)

    def _log(self, place: str) -> Path:
        return self._out / f"{place}.jsonl"

    def traffic(self, pair: Pair) -> Traffic:
        prefill, decode = pair
        return Traffic(self.servers[prefill], self.servers[decode], self.exam)

    def row(self, step: str, when: str, pair: Pair, traffic: Traffic) -> Row:
        prefill, decode = (self.kinds[place] for place in pair)
        chunks = traffic.chunks(self._log(pair[0])) if prefill is not PLAIN else {}
        return Row(step, when, prefill.name, decode.name, dict(traffic.results), dict(chunks), wanted(prefill, decode))

    def held(self) -> list[str]:
        """What the servers still hold, a while after the last request."""
        found: list[str] = []
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            found = [
                f"{place}: {int(slots)} slots"
                for place, server in self.servers.items()
                for kind in (LANDING_SLOTS, STAGING_SLOTS)
                if (slots := metrics_of(server).total(kind, state="in_use"))
            ]
            if not found:
                break
            time.sleep(1)
        for place, server in self.servers.items():
            try:
                flush_caches([server])  # refused while a request or a page is held
            except HttpError as error:
                found.append(f"{place}: {error}"[:120])
        return found


def run_step(cluster: MixedCluster, step: Step, requests: int) -> tuple[list[Row], Change]:
    """Replace the step's servers under traffic, then ask the pairs that are there."""
    rows: list[Row] = []
    replaced, at_once = threading.Event(), threading.Event()
    at_once.set()
    with ThreadPoolExecutor(len(PLACES)) as pool:
        running = {pair: cluster.traffic(pair) for pair in step.during}
        asked = [pool.submit(traffic.run, 1, replaced) for traffic in running.values()]
        try:
            seconds = cluster.replace(step.replaced)
        finally:
            replaced.set()
        for task in asked:
            task.result()
        rows += [cluster.row(step.name, "while", pair, traffic) for pair, traffic in running.items()]
        then = {pair: cluster.traffic(pair) for pair in step.after}
        for task in [pool.submit(traffic.run, requests, at_once) for traffic in then.values()]:
            task.result()
        rows += [cluster.row(step.name, "after", pair, traffic) for pair, traffic in then.items()]
    return rows, Change(step.name, seconds, cluster.held())


def main() -> int:
    """Run the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of the model; SmolLM2 by default")
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and results")
    parser.add_argument("--requests", type=int, default=6, help="of each pair after a change")
    parser.add_argument("--steps", type=int, default=len(STEPS), help="only the first so many")
    parser.add_argument("--ready-seconds", type=float, default=READY_TIMEOUT_SECONDS, help="for a step's servers")
    options = parser.parse_args()
    out, machine = made(options.out), this_machine()
    for log in out.glob("*.jsonl"):
        log.unlink()
    rows: list[Row] = []
    changes: list[Change] = []
    with stopping_on_signals(), ExitStack() as stack:
        fleet = stack.enter_context(Fleet())
        model = options.model or fetch_model(Path("build/models"))
        cluster = MixedCluster(model, out, fleet, options.ready_seconds)
        for step in STEPS[: options.steps]:
            found, change = run_step(cluster, step, options.requests)
            rows += found
            changes.append(change)
            table = write(rows, changes, out, machine)
            print(*(f"{'ok ' if row.passed else 'BAD'} {row}" for row in found), change, sep="\n", flush=True)
    held = [what for change in changes for what in change.held]
    print(table)
    print(f"{sum(row.passed for row in rows)} of {len(rows)} rows passed; held: {held or 'nothing'}")
    print("replaced in " + ", ".join(f"{change.seconds:.0f} s ({change.step})" for change in changes))
    return 0 if all(row.passed for row in rows) and not held else 1


if __name__ == "__main__":
    sys.exit(main())
