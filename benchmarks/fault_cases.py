"""The cases of `faults.py`: each breaks one thing on a running pair and says what became of whom."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fault_pair import Books, FaultPair, PairSettings, appears, family, metrics_of, reasons
from fault_report import NOT_REACHED, Row

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.launch.client import HttpError, flush_caches, generate, generate_on_pair
from spectrumkv_sglang.launch.prompts import LONG_PROMPTS
from spectrumkv_sglang.launch.servers import Fleet, Role

TOKENS = 16
STOPPED_SECONDS = 8.0
VICTIM_TIMEOUT_SECONDS = 90.0
SETTLE_SECONDS = 60.0
MOST_RECOVERY_SECONDS = 120.0
LINK_DOWN_SECONDS = 5.0
AT_ONCE = 6


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
        counted = reasons(metrics_of(self.servers[Role.PREFILL]))
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
        after = reasons(metrics_of(self.servers[Role.PREFILL]))
        fresh = lost is Role.PREFILL
        gained = {name: n - (0 if fresh else counted.get(name, 0)) for name, n in after.items()}
        row = Row(
            fault, stage, victim, others.count("right"), len(others), recovery, restart, leaked,
            {name: n for name, n in gained.items() if n},
        )  # fmt: skip
        print(f"{'ok  ' if row.passed else 'BAD '} {row}", flush=True)
        return row

    def at_stage(
        self, role: Role, stage: str, action: str, then: Callable[[], tuple[float, float]]
    ) -> tuple[str, float, float]:
        """Ask with ``action`` armed at ``stage``; ``then``, once it happened: seconds of recovery and of a restart."""
        with self.pair.armed(role, stage, action) as fired, ThreadPoolExecutor(1) as pool:
            asked = pool.submit(self.ask, 3)
            if not appears(fired, VICTIM_TIMEOUT_SECONDS):
                return f"{NOT_REACHED} ({asked.result()})", 0.0, 0.0
            recovery, restart = then()
            return asked.result(), recovery, restart

    def _go_on(self, role: Role) -> None:
        for process in family(self.servers[role]):
            process.send_signal(signal.SIGCONT)

    def stop(self, role: Role, stage: str) -> Row:
        """SIGSTOP at ``stage``, SIGCONT after a while."""

        def then() -> tuple[float, float]:
            time.sleep(STOPPED_SECONDS)
            self._go_on(role)
            return self.until_right(0), 0.0

        def act() -> tuple[str, float, float]:
            return self.at_stage(role, stage, "stop", then)

        return self.case(f"{role.value} stopped {STOPPED_SECONDS:g} s", stage, act)

    def kill(self, role: Role, stage: str) -> Row:
        """SIGKILL of the scheduler at ``stage``; the server is started again."""

        def then() -> tuple[float, float]:
            started = time.monotonic()
            self.fleet.stop([self.servers[role]])
            self.pair.start(role)
            self.fleet.wait_ready([self.servers[role]], timeout_seconds=self.ready_seconds)
            restart = time.monotonic() - started
            return restart + self.until_right(0), restart

        def act() -> tuple[str, float, float]:
            return self.at_stage(role, stage, "kill", then)

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

        def then() -> tuple[float, float]:
            with link.cut():
                self._go_on(role)
                time.sleep(LINK_DOWN_SECONDS)
            return self.until_right(0), 0.0

        def act() -> tuple[str, float, float]:
            return self.at_stage(role, stage, "stop", then)

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
