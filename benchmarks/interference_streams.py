"""Long answers under way on a pair, and prompts that arrive meanwhile."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from pairs import Pair

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.launch.client import MAX_ROOM, REQUEST_TIMEOUT_SECONDS, HttpError, post

TokenTimes = list[tuple[float, int]]
"""When chunks of one answer came (``time.monotonic``), each with the number of tokens so far."""

_COUNT = b'"completion_tokens":'


class StreamError(SpectrumKVError):
    """A long answer broke off."""


class DecodeStreams:
    """Answers of ``new_tokens`` tokens each that start together and are read token by token.

    Attributes:
        times: when the tokens of each answer came; complete after `join`.

    Args:
        pair: who answers.
        prompts: token ids, one prompt an answer.
        new_tokens: length of each answer; the end of text is ignored.
    """

    def __init__(self, pair: Pair, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        self.times: list[TokenTimes] = [[] for _ in prompts]
        self._pair, self._new_tokens = pair, new_tokens
        self._started = [threading.Event() for _ in prompts]
        self._one_ended = threading.Event()
        self._failures: list[str] = []
        self._threads = [
            threading.Thread(target=self._stream, args=(i, list(prompt)), name=f"stream-{i}", daemon=True)
            for i, prompt in enumerate(prompts)
        ]

    def start(self) -> None:
        """Send all requests and wait until each answer has its first token.

        Raises:
            StreamError: one failed.
        """
        for thread in self._threads:
            thread.start()
        for started in self._started:
            started.wait()
        self._check()

    def wait_until_one_ends(self) -> None:
        """Wait for the end of the first answer to end."""
        self._one_ended.wait()

    def join(self) -> None:
        """Wait until all have ended.

        Raises:
            StreamError: one failed.
        """
        for thread in self._threads:
            thread.join()
        self._check()

    def _check(self) -> None:
        if self._failures:
            raise StreamError(f"{len(self._failures)} of {len(self.times)} answers failed: {self._failures[0]}")

    def _stream(self, index: int, prompt: list[int]) -> None:
        try:
            self._read(index, prompt)
        except (OSError, ValueError, http.client.HTTPException, SpectrumKVError) as error:
            self._failures.append(f"{self._pair.variant.name}: {error!r}")
        finally:
            self._started[index].set()
            self._one_ended.set()

    def _read(self, index: int, prompt: list[int]) -> None:
        prefill, decode = self._pair.servers
        content = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": self._new_tokens, "ignore_eos": True},
            "bootstrap_host": prefill.spec.host,
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": random.randint(0, MAX_ROOM),
        }
        prefilling = threading.Thread(target=self._prefill, args=(content,), daemon=True)
        prefilling.start()
        with decode.namespace.entered() if decode.namespace is not None else nullcontext():
            connection = http.client.HTTPConnection(decode.spec.host, decode.port, timeout=REQUEST_TIMEOUT_SECONDS)
            connection.connect()
        try:
            body = json.dumps({**content, "stream": True})
            connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise StreamError(f"HTTP status {response.status} from decode: {response.read()[:500]!r}")
            for line in response:
                tokens = tokens_so_far(line)
                if tokens:
                    self.times[index].append((time.monotonic(), tokens))
                    self._started[index].set()
        finally:
            connection.close()
        prefilling.join()
        seen = self.times[index][-1][1] if self.times[index] else 0
        if seen != self._new_tokens:
            raise StreamError(f"an answer ended after {seen} of {self._new_tokens} tokens")

    def _prefill(self, content: dict[str, object]) -> None:
        prefill = self._pair.prefill
        try:
            post(f"{prefill.url}/generate", content, namespace=prefill.namespace)
        except HttpError as error:
            self._failures.append(f"{self._pair.variant.name}: prefill: {error}")


def tokens_so_far(line: bytes) -> int:
    """Number of tokens that a line of a streamed answer of SGLang gives; 0 for a line without one.

    The text grows with every line, so it is not decoded as JSON: that would cost time next to what is measured.
    """
    at = line.rfind(_COUNT)
    if at < 0:
        return 0
    digits = line[at + len(_COUNT) :].lstrip()
    end = next((i for i, byte in enumerate(digits) if not 0x30 <= byte <= 0x39), len(digits))
    return int(digits[:end] or b"0")


class Arrivals:
    """Sends one prompt after the other in a thread, until told to stop; never two at once.

    Attributes:
        seconds: how long each took.
        late: how many started late, because the one before was not done.

    Args:
        send: sends the i-th prompt and returns when it has been answered.
        every_seconds: time from one start to the next; 0: each starts when the one before is done.
    """

    def __init__(self, send: Callable[[int], None], every_seconds: float) -> None:
        self.seconds: list[float] = []
        self.late = 0
        self._send, self._every = send, every_seconds
        self._failure: SpectrumKVError | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="arrivals", daemon=True)

    def start(self) -> None:
        """Send the first one now."""
        self._thread.start()

    def stop(self) -> None:
        """Send no more, and wait for the last one.

        Raises:
            SpectrumKVError: one failed.
        """
        self._stopped.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stopped.is_set():
            started = time.monotonic()
            try:
                self._send(len(self.seconds))
            except SpectrumKVError as error:
                self._failure = error
                return
            now = time.monotonic()
            self.seconds.append(now - started)
            if self._every <= 0:
                continue
            due += self._every
            if due < now:
                self.late += 1
                due = now
            self._stopped.wait(due - now)
