"""The faults of a soak: each opens a window, does its harm while the load goes on, and closes it once all is well."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import psutil
from fault_pair import FaultPair, appears, schedulers
from soak_judging import Verdict
from soak_load import Load
from soak_windows import Window, Windows

from spectrumkv_sglang.launch.servers import Role

LINK_DOWN_SECONDS = 5.0
MOST_RECOVERY_SECONDS = 120.0
_STAGE_SECONDS = 20.0
_OWN_TIMEOUT_SECONDS = 45.0
_MESSAGES = (
    (Role.PREFILL, "before OPEN", "OPEN"),
    (Role.PREFILL, "before COMMIT", "COMMIT"),
    (Role.DECODE, "before GRANT", "OPEN, at decode"),
    (Role.DECODE, "before DONE", "DONE"),
)
_ACTIONS = {"drop": "lost", "twice": "twice", "late": "late"}


@dataclass(frozen=True)
class Weights:
    """How often each kind of fault is drawn, relative to the others; kills have times of their own."""

    message: float = 4.0
    stop: float = 2.0
    gone: float = 2.0
    reuse: float = 1.0
    burst: float = 1.5
    link: float = 2.0


class SoakFaults:
    """Draws faults under a seed.

    Args:
        pair: the servers.
        load: what goes on meanwhile.
        windows: takes one window a fault.
        seed: of kinds, stages and times.
        weights: of the kinds.
        ready_seconds: for a server's start.
    """

    def __init__(
        self, pair: FaultPair, load: Load, windows: Windows, seed: int, weights: Weights, ready_seconds: float
    ) -> None:
        self.pair, self.load, self.windows, self.ready_seconds = pair, load, windows, ready_seconds
        self.drawn = random.Random(seed)
        self.restarts = 0
        kinds: dict[Callable[[], Window], float] = {
            self.message: weights.message,
            self.stop: weights.stop,
            self.gone: weights.gone,
            self.reuse: weights.reuse,
            self.burst: weights.burst,
            self.cut: weights.link if pair.settings.link is not None else 0.0,
        }
        self._kinds = {kind: weight for kind, weight in kinds.items() if weight > 0}

    def next(self) -> Window:
        """One fault at random, from its beginning to its end."""
        kind = self.drawn.choices(list(self._kinds), list(self._kinds.values()))[0]
        return kind()

    # ---- faults --------------------------------------------------------------------------------------------------

    def message(self) -> Window:
        """A control message is lost, comes twice or late. Only a lost COMMIT or DONE may fail a request, and one."""
        role, stage, name = self.drawn.choice(_MESSAGES)
        action = self.drawn.choice(list(_ACTIONS))
        fails = action == "drop" and stage in ("before COMMIT", "before DONE")
        window = self._open(f"{name} {_ACTIONS[action]}", most_errors=1 if fails else 0)
        with self.pair.armed(role, stage, action) as fired:
            if not appears(fired, _STAGE_SECONDS):
                window.note = "the stage was not reached"
        return self._well_again(window)

    def stop(self) -> Window:
        """SIGSTOP to one scheduler, SIGCONT some seconds later."""
        role, seconds = self._role(), self.drawn.uniform(1.0, 8.0)
        window = self._open(f"{role.value} stopped")
        stopped = schedulers(self.pair.servers[role])
        window.note = f"{len(stopped)} process for {seconds:.1f} s"
        try:
            for process in stopped:
                process.send_signal(signal.SIGSTOP)
            time.sleep(seconds)
        finally:
            for process in stopped:
                process.send_signal(signal.SIGCONT)
        return self._well_again(window)

    def kill(self, role: Role) -> Window:
        """SIGKILL to one scheduler; the server is started again."""
        window = self._open(f"{role.value} killed")
        began = time.monotonic()
        server = self.pair.servers[role]
        for process in schedulers(server):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(self.drawn.uniform(0.0, 2.0))
        self.pair.fleet.stop([server])
        self.restarts += 1
        self.pair.fleet.wait_ready([self.pair.start(role)], timeout_seconds=self.ready_seconds)
        window.restart_seconds = time.monotonic() - began
        return self._well_again(window)

    def cut(self) -> Window:
        """The link between the servers loses every packet for 5 s."""
        link = self.pair.settings.link
        window = self._open("link down")
        if link is not None:
            with link.cut():
                time.sleep(LINK_DOWN_SECONDS)
        return self._well_again(window)

    def gone(self) -> Window:
        """Some clients go away, each after a random time; nobody else may notice."""
        window = self._open("clients gone", most_errors=0)
        times = [self.drawn.uniform(0.01, 1.5) for _ in range(self.drawn.randint(2, 6))]
        with ThreadPoolExecutor(len(times)) as pool:
            list(pool.map(lambda after: self.load.ask(self._prompt(), own=True, leave_after=after), times))
        return self._well_again(window)

    def reuse(self) -> Window:
        """A room id twice, the first request whole or left; the second may fail, be wrong it may not."""
        window = self._open("room used again", most_errors=0)
        room = self.drawn.getrandbits(62)
        after = self.drawn.choice([None, self.drawn.uniform(0.01, 1.0)])
        ends = []
        for leave in (after, None):
            verdict = self.load.ask(
                self._prompt(), own=True, room=room, leave_after=leave, timeout_seconds=_OWN_TIMEOUT_SECONDS
            )
            ends.append(verdict.value)
        window.note = ", ".join(ends)
        return self._well_again(window)

    def burst(self) -> Window:
        """Four times the clients for some seconds."""
        window = self._open("burst", most_errors=0)
        self.load.burst(3 * self.load.clients, self.drawn.uniform(3.0, 8.0))
        return self._well_again(window)

    # ---- what they share -----------------------------------------------------------------------------------------

    def _open(self, fault: str, most_errors: int | None = None) -> Window:
        return self.windows.open(Window(fault, self.load.now, most_errors))

    def _well_again(self, window: Window) -> Window:
        """Ask until an answer is right, then close the window."""
        began = time.monotonic()
        window.recovery_seconds = None
        while time.monotonic() - began < MOST_RECOVERY_SECONDS:
            if self.load.ask(self._prompt(), own=True, timeout_seconds=30.0) in GOOD:
                window.recovery_seconds = time.monotonic() - began
                break
            time.sleep(0.5)
        window.ended = self.load.now
        return window

    def _role(self) -> Role:
        return self.drawn.choice((Role.PREFILL, Role.DECODE))

    def _prompt(self) -> int:
        return self.drawn.randrange(len(self.load.prompts))


GOOD: Sequence[Verdict] = (Verdict.RIGHT, Verdict.TIE, Verdict.DIFFERS)
