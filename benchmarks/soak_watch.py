"""What the servers of a soak hold: looked at all along (memory, chunks by reason) and in quiet moments (leaks)."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import psutil
from fault_pair import Books, FaultPair, failures, family, metrics_of, reasons
from soak_load import Load
from soak_windows import Growth, growth_of

from spectrumkv_sglang.launch.client import HttpError, flush_cache
from spectrumkv_sglang.launch.servers import Role
from spectrumkv_sglang.observability.live_metrics import LiveServerError

SETTLE_SECONDS = 60.0
# Younger servers still fill their caches; what grows more than this in a longer life is called growing.
SHORTEST_LIFE_SECONDS = 120.0
MOST_GROWTH_PERCENT = 10.0


@dataclass
class Check:
    """A look at both servers without load.

    Attributes:
        at: seconds since the start of the load.
        held: what they hold beyond what they held at their first check; empty: nothing.
        settled_seconds: until they had let go of it.
        repeated: of answers that had been wrong, asked again alone: prompt and verdict.
    """

    at: float
    held: dict[str, float] = field(default_factory=dict)
    settled_seconds: float = 0.0
    repeated: list[tuple[int, str]] = field(default_factory=list)


class Quiet:
    """Checks between stretches of load; what a server held at the first one it lived through is its measure."""

    def __init__(self, pair: FaultPair, load: Load) -> None:
        self.pair, self.load = pair, load
        self.checks: list[Check] = []
        self._first: dict[str, tuple[Books, int]] = {}
        self._peers = 0

    def peer_restarted(self) -> None:
        """A server has a new peer, for which it may keep threads and connections."""
        self._peers += 1

    def check(self, timeout_seconds: float) -> Check:
        """Stop the load, wait until the servers have let go, repeat wrong answers alone, let the load go on."""
        found = Check(self.load.now)
        self.checks.append(found)
        if not self.load.pause(timeout_seconds):
            found.held["requests that do not end"] = self.load.in_flight
        began = time.monotonic()
        while True:
            found.held = {name: n for name, n in found.held.items() if name.startswith("requests")} | self._held()
            found.settled_seconds = time.monotonic() - began
            if not found.held or found.settled_seconds > SETTLE_SECONDS:
                break
            time.sleep(0.5)
        account = self.load.account
        for prompt in account.to_repeat:
            found.repeated.append((prompt, self.load.ask(prompt, own=True).value))
        account.to_repeat.clear()
        self.load.resume()
        return found

    def _held(self) -> dict[str, float]:
        held: dict[str, float] = {}
        for role, server in self.pair.servers.items():
            try:
                now = Books.of(server)
                flush_cache(server, timeout_seconds=5.0)  # refused while a request or a page is held
            except (HttpError, LiveServerError, psutil.NoSuchProcess) as error:
                held[f"pages or requests of {role.value}: {str(error)[-100:]}"] = 1
                continue
            slots = {name: n for name, n in now.counts.items() if name.startswith("slots") and n}
            before, peers = self._first.get(server.name, (now, self._peers))
            more = before.counts and now.more_than(before, new_peers=1 + self._peers - peers)
            held |= {f"{name} of {role.value}": n for name, n in {**(more or {}), **slots}.items()}
            if not slots:
                self._first.setdefault(server.name, (now, self._peers))
        return held


class Watch:
    """A thread that samples the servers every few seconds.

    Attributes:
        memory: by server, seconds since the start and resident bytes of all its processes.
        chunks: by prefill server, chunks by reason.
        failed: by prefill server, failed chunks by cause.
    """

    def __init__(self, pair: FaultPair, every_seconds: float = 5.0) -> None:
        self.pair = pair
        self.memory: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.chunks: dict[str, dict[str, int]] = {}
        self.failed: dict[str, dict[str, int]] = {}
        self._began = time.monotonic()
        self._every = every_seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """One last look, then no more."""
        self._over.set()
        self._thread.join(30)
        self._look()

    def totals(self, by_server: dict[str, dict[str, int]]) -> dict[str, int]:
        """Counts of all prefill servers together; of one that was killed, as of the last look at it."""
        total: Counter[str] = Counter()
        for counts in list(by_server.values()):
            total.update(counts)
        return dict(sorted(total.items()))

    def growth(self) -> list[Growth]:
        """Of each life that was long enough."""
        found = [growth_of(name, samples) for name, samples in list(self.memory.items())]
        return [one for one in found if one is not None]

    def _run(self) -> None:
        while not self._over.wait(self._every):
            self._look()

    def _look(self) -> None:
        for role, server in list(self.pair.servers.items()):
            try:
                # A server that does not answer yet still grows into its memory, which is no leak.
                live = metrics_of(server)
                size = sum(process.memory_info().rss for process in family(server))
            except (psutil.Error, HttpError, LiveServerError):
                continue  # it is being stopped, or starts
            self.memory[server.name].append((time.monotonic() - self._began, float(size)))
            if role is Role.PREFILL:
                self.chunks[server.name] = reasons(live)
                self.failed[server.name] = failures(live)
