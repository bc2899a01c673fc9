"""The clients of a soak: threads that ask a pair one prompt after another and count how each request ended."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

from fault_pair import FaultPair
from soak_account import Account, Ended
from soak_client import ask_pair
from soak_judging import Verdict
from soak_prompts import SoakPrompt

_SECONDS_AFTER_AN_ERROR = 1.0


class Load:
    """``clients`` threads; they rest while the gate is closed.

    Args:
        pair: whom to ask.
        prompts: drawn at random by each client, under a seed of its own.
        account: takes every request.
        clients: threads between bursts.
        requests: the load ends after so many whole answers.
        seed: of the draws.
        leave_share: share of the requests whose client goes away before the answer is there.
        timeout_seconds: for a request.
    """

    def __init__(
        self,
        pair: FaultPair,
        prompts: Sequence[SoakPrompt],
        account: Account,
        *,
        clients: int,
        requests: int,
        seed: int,
        leave_share: float,
        timeout_seconds: float,
    ) -> None:
        self.pair, self.prompts, self.account = pair, prompts, account
        self.clients, self.requests, self.leave_share = clients, requests, leave_share
        self.timeout_seconds = timeout_seconds
        self.began = time.monotonic()
        self._seed = seed
        self._gate = threading.Event()
        self._stop = threading.Event()
        self._in_flight = 0
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._made = 0

    @property
    def now(self) -> float:
        """Seconds since the start of the load."""
        return time.monotonic() - self.began

    @property
    def in_flight(self) -> int:
        """Requests under way."""
        return self._in_flight

    @property
    def finished(self) -> bool:
        """Whether there have been as many whole answers as were asked for."""
        return self.account.answered >= self.requests

    def start(self) -> None:
        """Start the clients; time counts from here."""
        self.began = time.monotonic()
        self._gate.set()
        self._threads = [self._client(self._stop) for _ in range(self.clients)]

    def burst(self, clients: int, seconds: float) -> None:
        """Further clients for a while; returns when their last requests have ended."""
        over = threading.Event()
        threads = [self._client(over) for _ in range(clients)]
        self._stop.wait(seconds)
        over.set()
        for thread in threads:
            thread.join(self.timeout_seconds + 30)

    def pause(self, timeout_seconds: float) -> bool:
        """Close the gate and wait until no request is under way; False: some still are after ``timeout_seconds``."""
        self._gate.clear()
        with self._changed:
            return self._changed.wait_for(lambda: self._in_flight == 0, timeout_seconds)

    def resume(self) -> None:
        """Open the gate."""
        self._gate.set()

    def stop(self) -> bool:
        """Let every client end with its request; False: one did not."""
        self._stop.set()
        self._gate.set()
        deadline = time.monotonic() + self.timeout_seconds + 30
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def ask(
        self, prompt: int, *, own: bool = False, room: int | None = None, leave_after: float | None = None,
        timeout_seconds: float | None = None,
    ) -> Verdict:  # fmt: skip
        """One request, counted."""
        with self._changed:
            self._in_flight += 1
        started = self.now
        try:
            reply = ask_pair(
                self.pair.prefill,
                self.pair.decode,
                self.prompts[prompt].text,
                self.prompts[prompt].new_tokens,
                room=room,
                timeout_seconds=timeout_seconds or self.timeout_seconds,
                leave_after=leave_after,
            )
        finally:
            with self._changed:
                self._in_flight -= 1
                self._changed.notify_all()
        return self.account.add(Ended(prompt, started, self.now, reply, own))

    def _client(self, over: threading.Event) -> threading.Thread:
        self._made += 1
        drawn = random.Random(f"{self._seed} {self._made}")
        thread = threading.Thread(target=self._run, args=(drawn, over), name=f"client-{self._made}", daemon=True)
        thread.start()
        return thread

    def _run(self, drawn: random.Random, over: threading.Event) -> None:
        while not over.is_set() and not self._stop.is_set() and not self.finished:
            if not self._gate.wait(1.0):
                continue
            leave_after = drawn.uniform(0.01, 2.0) if drawn.random() < self.leave_share else None
            if self.ask(drawn.randrange(len(self.prompts)), leave_after=leave_after) is Verdict.ERROR:
                over.wait(_SECONDS_AFTER_AN_ERROR)
