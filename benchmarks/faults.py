"""Faults on a real SGLang pair: what the request that is hit gets, what others get, how long until all is well again.

    python benchmarks/faults.py --out build/faults                       # every case, on this machine's CPU or GPU
    python benchmarks/faults.py --out build/faults --only stop,drop,reuse,abort
    python benchmarks/faults.py --out build/faults --model DIR -- --disable-cuda-graph

Prefill and decode are real servers with SmolLM2 (or --model) and `fault_points` as a plugin; answers are compared with
those of a plain server, which is stopped before the pair starts; they are kept for later runs in the same folder.
A killed server is started again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
from command_line import made
from fault_pair import SETTINGS, Books, FaultPair, PairSettings, appears, family, reasons
from fault_points import DECODE_STAGES, PREFILL_STAGES
from fault_report import NOT_REACHED, Row, write

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.launch.client import HttpError, flush_caches, generate, generate_on_pair
from spectrumkv_sglang.launch.model import fetch_model
from spectrumkv_sglang.launch.netns import linked_hosts
from spectrumkv_sglang.launch.processes import stopping_on_signals
from spectrumkv_sglang.launch.prompts import LONG_PROMPTS
from spectrumkv_sglang.launch.servers import READY_TIMEOUT_SECONDS, Fleet, Role, detect_device

TOKENS = 16
STOPPED_SECONDS = 8.0
VICTIM_TIMEOUT_SECONDS = 90.0
SETTLE_SECONDS = 60.0
MOST_RECOVERY_SECONDS = 120.0
LINK_DOWN_SECONDS = 5.0
AT_ONCE = 6
KINDS = "drop,twice,reuse,abort,stop,pool,pages,kill"


class FaultBench:
    """A pair whose servers can be made to fail, and the right answers to its prompts."""

    def __init__(self, settings: PairSettings, fleet: Fleet, ready_seconds: float) -> None:
        self.out, self.fleet, self.ready_seconds = settings.out, fleet, ready_seconds
        self.prompts = [prompt.text for prompt in LONG_PROMPTS] * 2
        self.prompts = [f"{number}. {text}" for number, text in enumerate(self.prompts)]
        self.pair = FaultPair(settings, fleet)
        self.servers = self.pair.servers
        self.right = self._right_answers(self.out / "plain_answers.json")
        for role in (Role.PREFILL, Role.DECODE):
            self.pair.start(role)
        fleet.wait_ready(list(self.servers.values()), timeout_seconds=ready_seconds)
        for number in range(2):  # connections are made before anything is counted
            self.ask(number)

    def _right_answers(self, kept: Path) -> list[tuple[int, ...]]:
        """What a plain server answers; asked once and kept in ``kept`` for later runs in this folder."""
        if kept.exists():
            answers = json.loads(kept.read_text(encoding="utf-8"))
            if len(answers) == len(self.prompts):
                return [tuple(answer) for answer in answers]
        plain = self.pair.start(Role.PLAIN)
        self.fleet.wait_ready([plain], timeout_seconds=self.ready_seconds)
        right = [generate(plain, text, max_new_tokens=TOKENS).output_ids for text in self.prompts]
        self.fleet.stop([plain])
        kept.write_text(json.dumps(right), encoding="utf-8")
        return right

    # ---- requests ------------------------------------------------------------------------------------------------

    def ask(self, number: int, *, room: int | None = None, timeout: float = VICTIM_TIMEOUT_SECONDS) -> str:
        """ "right", "wrong", or the error, of one request."""
        try:
            answer = generate_on_pair(
                self.servers[Role.PREFILL],
                self.servers[Role.DECODE],
                self.prompts[number],
                max_new_tokens=TOKENS,
                bootstrap_room=room,
                timeout_seconds=timeout,
            )
        except HttpError as error:
            return f"error {error.status}" if error.status else "no answer"
        return "right" if answer.output_ids == self.right[number] else "wrong"

    def until_right(self, number: int) -> float:
        """Seconds until the pair gives a right answer."""
        started = time.monotonic()
        while time.monotonic() - started < MOST_RECOVERY_SECONDS:
            if self.ask(number, timeout=30) == "right":
                return time.monotonic() - started
            time.sleep(0.5)
        return float("inf")

    # ---- cases ---------------------------------------------------------------------------------------------------

    def case(
        self, fault: str, stage: str, act: Callable[[], tuple[str, float, float]], lost: Role | None = None
    ) -> Row:
        """Run ``act``, which returns the victim's result, seconds of recovery and of a restart. ``lost``: who dies."""
        flush_caches(self.servers.values())
        survivors = [server for role, server in self.servers.items() if role is not lost]
        before = {server.name: Books.of(server) for server in survivors}
        counted = reasons(self.servers[Role.PREFILL])
        victim, recovery, restart = act()
        others = [self.ask(number) for number in range(3)]
        leaked: dict[str, float] = {}
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            leaked = {
                f"{name} of {server.spec.role.value}": n
                for server in survivors
                for name, n in Books.of(server).more_than(before[server.name]).items()
            }
            if not leaked:
                break
            time.sleep(1)
        try:
            flush_caches(self.servers.values())  # refused while a request or a page is held
        except HttpError as error:
            leaked["pages or requests: " + str(error)[-80:]] = 1
        after = reasons(self.servers[Role.PREFILL])
        fresh = lost is Role.PREFILL
        gained = {name: n - (0 if fresh else counted.get(name, 0)) for name, n in after.items()}
        row = Row(
            fault, stage, victim, others.count("right"), len(others), recovery, restart, leaked,
            {name: n for name, n in gained.items() if n},
        )  # fmt: skip
        print(f"{'ok  ' if row.passed else 'BAD '} {row}", flush=True)
        return row

    def stop(self, role: Role, stage: str) -> Row:
        """SIGSTOP at ``stage``, SIGCONT after a while."""

        def act() -> tuple[str, float, float]:
            with self.pair.armed(role, stage, "stop") as fired, ThreadPoolExecutor(1) as pool:
                asked = pool.submit(self.ask, 3)
                if not appears(fired, VICTIM_TIMEOUT_SECONDS):
                    return f"{NOT_REACHED} ({asked.result()})", 0.0, 0.0
                time.sleep(STOPPED_SECONDS)
                for process in family(self.servers[role]):
                    process.send_signal(signal.SIGCONT)
                recovery = self.until_right(0)
                return asked.result(), recovery, 0.0

        return self.case(f"{role.value} stopped {STOPPED_SECONDS:g} s", stage, act)

    def kill(self, role: Role, stage: str) -> Row:
        """SIGKILL of the scheduler at ``stage``; the server is started again."""

        def act() -> tuple[str, float, float]:
            with self.pair.armed(role, stage, "kill") as fired, ThreadPoolExecutor(1) as pool:
                asked = pool.submit(self.ask, 3)
                if not appears(fired, VICTIM_TIMEOUT_SECONDS):
                    return f"{NOT_REACHED} ({asked.result()})", 0.0, 0.0
                started = time.monotonic()
                self.fleet.stop([self.servers[role]])
                self.pair.start(role)
                self.fleet.wait_ready([self.servers[role]], timeout_seconds=self.ready_seconds)
                restart = time.monotonic() - started
                recovery = restart + self.until_right(0)
                return asked.result(), recovery, restart

        return self.case(f"{role.value} killed", stage, act, lost=role)

    def message(self, role: Role, stage: str, action: str) -> Row:
        """One control message is lost ("drop") or comes twice."""

        def act() -> tuple[str, float, float]:
            with self.pair.armed(role, stage, action) as fired:
                started = time.monotonic()
                victim = self.ask(3)
                if not fired.exists():
                    victim = f"{NOT_REACHED} ({victim})"
                return victim, time.monotonic() - started, 0.0

        return self.case("control message " + {"drop": "lost", "twice": "twice"}[action], stage, act)

    def cut(self, role: Role, stage: str) -> Row:
        """The link loses everything from ``stage`` on, for 5 s: the scheduler stops there until it is cut."""
        link = self.pair.settings.link
        if link is None:
            raise SpectrumKVError("the case link needs --link-faults, which needs root")

        def act() -> tuple[str, float, float]:
            with self.pair.armed(role, stage, "stop") as fired, ThreadPoolExecutor(1) as pool:
                asked = pool.submit(self.ask, 3)
                if not appears(fired, VICTIM_TIMEOUT_SECONDS):
                    return f"{NOT_REACHED} ({asked.result()})", 0.0, 0.0
                with link.cut():
                    for process in family(self.servers[role]):
                        process.send_signal(signal.SIGCONT)
                    time.sleep(LINK_DOWN_SECONDS)
                recovery = self.until_right(0)
                return asked.result(), recovery, 0.0

        return self.case(f"link down {LINK_DOWN_SECONDS:g} s", f"{role.value} {stage}", act)

    def other_decode(self, fault: str, stage: str, env: dict[str, str], flags: tuple[str, ...]) -> Row:
        """Some requests at once to a decode server with other settings; then the usual one takes its place."""

        def restarted(env: dict[str, str], flags: tuple[str, ...]) -> None:
            self.fleet.stop([self.servers[Role.DECODE]])
            decode = self.pair.start(Role.DECODE, env=env, flags=flags)
            self.fleet.wait_ready([decode], timeout_seconds=self.ready_seconds)

        def act() -> tuple[str, float, float]:
            restarted(env, flags)
            with ThreadPoolExecutor(AT_ONCE) as pool:
                results = list(pool.map(lambda number: self.ask(number % len(self.prompts)), range(AT_ONCE)))
            started = time.monotonic()
            restarted({}, ())
            restart = time.monotonic() - started
            recovery = restart + self.until_right(0)
            told = ", ".join(f"{count} {name}" for name, count in sorted(Counter(results).items()))
            return told, recovery, restart

        return self.case(fault, stage, act, lost=Role.DECODE)

    def reuse(self) -> Row:
        """The same room id for two requests, one after the other."""

        def act() -> tuple[str, float, float]:
            started = time.monotonic()
            results = [self.ask(number, room=4711) for number in (3, 2)]
            return ", ".join(results), time.monotonic() - started, 0.0

        return self.case("room id used again", "after the first request", act)

    def abort(self) -> Row:
        """Clients that go away while their requests are transferred."""

        def act() -> tuple[str, float, float]:
            with ThreadPoolExecutor(3) as pool:
                results = list(pool.map(lambda number: self.ask(number, timeout=0.05 + 0.2 * number), (1, 2, 3)))
            return ", ".join(results), self.until_right(0), 0.0

        return self.case("client gone", "during the transfer", act)


def logs_hold_a_prompt(out: Path, prompts: list[str]) -> list[str]:
    """Lines of our modules in the servers' logs that hold a piece of a prompt."""
    pieces = {text[start : start + 24] for text in prompts for start in range(0, len(text) - 24, 24)}
    return [
        line[:120]
        for log in out.glob("*.log")
        for line in log.read_text(errors="replace").splitlines()
        if any(piece in line for piece in pieces)
    ]


def main() -> int:
    """Run the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of the model; SmolLM2 by default")
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and results")
    parser.add_argument("--only", help=f"kinds of faults, with commas; {KINDS} by default, and link")
    parser.add_argument("--link-faults", action="store_true", help="two network namespaces whose link fails; as root")
    parser.add_argument("--minutes", type=float, default=600, help="no new case begins after this many")
    parser.add_argument("--ready-seconds", type=float, default=READY_TIMEOUT_SECONDS, help="for a server's start")
    parser.add_argument("flags", nargs="*", help="further SGLang flags for all servers, after --")
    options = parser.parse_args()
    out, started = made(options.out), time.monotonic()
    kinds = (options.only or KINDS + (",link" if options.link_faults else "")).split(",")
    model = options.model or fetch_model(Path("build/models"))
    rows: list[Row] = []
    table = "no case ran"
    machine = {"cpu cores": str(os.cpu_count()), "memory GB": f"{psutil.virtual_memory().total / 1e9:.0f}"}
    machine |= {"system": platform.platform(), "load at start": f"{os.getloadavg()[0]:.1f}"}
    with stopping_on_signals(), ExitStack() as stack:
        link = stack.enter_context(linked_hosts()) if options.link_faults else None
        fleet = stack.enter_context(Fleet())
        flags = ("--log-level", "debug", *options.flags)
        settings = PairSettings(model, out, out, detect_device(), SETTINGS, flags, link)
        bench = FaultBench(settings, fleet, options.ready_seconds)
        cases: dict[str, list[Callable[[], Row]]] = {
            "drop": [
                *(lambda at=at: bench.message(Role.PREFILL, at, "drop") for at in ("before OPEN", "before COMMIT")),
                *(lambda at=at: bench.message(Role.DECODE, at, "drop") for at in ("before GRANT", "before DONE")),
            ],
            "twice": [
                *(lambda at=at: bench.message(Role.PREFILL, at, "twice") for at in ("before OPEN", "before COMMIT")),
                lambda: bench.message(Role.DECODE, "before DONE", "twice"),
            ],
            "link": [
                *(lambda at=at: bench.cut(Role.PREFILL, at) for at in ("before OPEN", "mid write", "before COMMIT")),
                lambda: bench.cut(Role.DECODE, "mid unpack"),
            ],
            "pool": [
                lambda: bench.other_decode(
                    "landing pool exhausted",
                    f"1 slot, {AT_ONCE} requests at once",
                    {"SPECTRUMKV_LANDING_SLOTS": "1", "SPECTRUMKV_SLOT_WAIT_S": "0"},
                    (),
                )
            ],
            "pages": [lambda: bench.other_decode("decode with pages of 16 tokens", "", {}, ("--page-size", "16"))],
            "reuse": [bench.reuse],
            "abort": [bench.abort],
            "stop": [
                *(lambda stage=stage: bench.stop(Role.PREFILL, stage) for stage in PREFILL_STAGES),
                *(lambda stage=stage: bench.stop(Role.DECODE, stage) for stage in DECODE_STAGES),
            ],
            "kill": [
                *(lambda stage=stage: bench.kill(Role.DECODE, stage) for stage in DECODE_STAGES),
                *(lambda stage=stage: bench.kill(Role.PREFILL, stage) for stage in PREFILL_STAGES),
            ],
        }
        for kind in kinds:
            for run in cases[kind]:
                if time.monotonic() - started > options.minutes * 60:
                    break
                rows.append(run())
                table = write(rows, out, machine)
    found = logs_hold_a_prompt(out, bench.prompts)
    print(table)
    print(f"{sum(row.passed for row in rows)} of {len(rows)} cases passed; log lines with prompt text: {len(found)}")
    print(f"threads left here: {[t.name for t in threading.enumerate() if t is not threading.main_thread()]}")
    return 0 if all(row.passed for row in rows) and not found else 1


if __name__ == "__main__":
    sys.exit(main())
