"""One streamed request to a pair, or to one server, with its time to the first token; it can be left in the middle."""

from __future__ import annotations

import http.client
import json
import random
import socket
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from spectrumkv_sglang.launch.client import MAX_ROOM
from spectrumkv_sglang.launch.servers import SGLangServer


@dataclass(frozen=True)
class Reply:
    """How a request ended.

    Attributes:
        tokens: generated token ids.
        logprobs: their log-probabilities.
        seconds_best: at each position the second most likely token, if it was asked for.
        gaps: how much lower that one's log-probability is.
        ttft: seconds to the first token.
        error: what went wrong, in few words without ids; "" for a whole answer.
        left: we went away before its end.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    seconds_best: tuple[int, ...] = ()
    gaps: tuple[float, ...] = ()
    ttft: float = 0.0
    error: str = ""
    left: bool = False


class _FailedError(Exception):
    """The request failed; the text says how."""


class _LeftError(Exception):
    """It was time to go away."""


def ask_pair(
    prefill: SGLangServer,
    decode: SGLangServer,
    text: str,
    new_tokens: int,
    *,
    room: int | None = None,
    timeout_seconds: float = 90.0,
    leave_after: float | None = None,
) -> Reply:
    """Ask a pair as a router would: both servers at once, the answer streamed from decode.

    Args:
        room: SGLang's room; a random one by default.
        timeout_seconds: for the whole request; what is not there then is an error.
        leave_after: close both connections after so many seconds.
    """
    body = _body(text, new_tokens) | {
        "bootstrap_host": prefill.spec.host,
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": random.randint(0, MAX_ROOM) if room is None else room,
    }
    return _ask([prefill, decode], body, timeout_seconds, leave_after)


def ask_plain(server: SGLangServer, text: str, new_tokens: int, *, timeout_seconds: float = 180.0) -> Reply:
    """Ask a plain server, with the two best tokens of each position."""
    return _ask([server], _body(text, new_tokens) | {"top_logprobs_num": 2}, timeout_seconds, None)


def _body(text: str, new_tokens: int) -> dict[str, Any]:
    parameters = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return {"text": text, "sampling_params": parameters, "stream": True, "return_logprob": True}


def _ask(servers: list[SGLangServer], body: dict[str, Any], timeout: float, leave_after: float | None) -> Reply:
    started = time.monotonic()
    clock = _Clock(started + timeout, None if leave_after is None else started + leave_after)
    connections: list[http.client.HTTPConnection] = []
    try:
        for server in servers:
            connections.append(_sent(server, body, clock))  # noqa: PERF401 - the first is closed if the second fails
        reply = _read(connections[-1], body["sampling_params"]["max_new_tokens"], clock, started)
        if len(connections) > 1:
            for _ in _events(connections[0], clock):
                pass
        return reply
    except _LeftError:
        return Reply(left=True)
    except _FailedError as failure:
        return Reply(error=str(failure))
    except TimeoutError:
        return Reply(left=True) if clock.left else Reply(error="no answer in time")
    except ConnectionRefusedError:
        return Reply(error="connection refused")
    except (ConnectionError, http.client.HTTPException):
        return Reply(error="connection lost")
    except OSError as error:
        return Reply(error=f"no connection ({type(error).__name__})")
    finally:
        for connection in connections:
            connection.close()


@dataclass
class _Clock:
    """Until when one request is waited for."""

    deadline: float
    leave_at: float | None

    @property
    def left(self) -> bool:
        return self.leave_at is not None and time.monotonic() >= self.leave_at

    def limit(self, connection: http.client.HTTPConnection) -> None:
        """Let the next read of ``connection`` wait no longer than there is time."""
        if self.left:
            raise _LeftError
        until = self.deadline if self.leave_at is None else min(self.deadline, self.leave_at)
        if connection.sock is not None:
            connection.sock.settimeout(max(0.01, until - time.monotonic()))


def _sent(server: SGLangServer, body: dict[str, Any], clock: _Clock) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(server.spec.host, server.port, timeout=10)
    with server.namespace.entered() if server.namespace is not None else nullcontext():
        connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    clock.limit(connection)
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    return connection


def _events(connection: http.client.HTTPConnection, clock: _Clock) -> Iterator[dict[str, Any]]:
    """Each streamed message; raises `_FailedError` for one that says that the request failed."""
    clock.limit(connection)
    sock = connection.sock
    response = connection.getresponse()
    if response.status != 200:
        raise _FailedError(f"HTTP {response.status}")
    whole = False
    while True:
        if clock.left:
            raise _LeftError
        until = clock.deadline if clock.leave_at is None else min(clock.deadline, clock.leave_at)
        sock.settimeout(max(0.01, until - time.monotonic()))
        raw = response.readline()
        line = raw.strip()
        if not raw:
            break
        if line == b"data: [DONE]":
            whole = True
        elif line.startswith(b"data: "):
            content = json.loads(line[6:])
            reason = (content.get("meta_info") or {}).get("finish_reason") or {}
            if "error" in content:
                raise _FailedError(f"stream error: {_words(content['error'])}")
            if reason.get("type") == "abort":
                status = reason.get("status_code")
                raise _FailedError(f"HTTP {status} in the stream" if status else "ended by the server")
            yield content
    if not whole:
        raise _FailedError("the stream ended early")


def _words(error: Any) -> str:
    text = error.get("message", "") if isinstance(error, dict) else str(error)
    return "".join(letter for letter in text[:60] if not letter.isdigit())


def _read(connection: http.client.HTTPConnection, new_tokens: int, clock: _Clock, started: float) -> Reply:
    parts: list[dict[str, Any]] = []
    ttft = 0.0
    for content in _events(connection, clock):
        ttft = ttft or time.monotonic() - started
        parts.append(content)
    last = parts[-1] if parts else {}
    # SGLang streams all tokens so far each time; with --incremental-streaming-output only new ones.
    chosen = [last] if len(last.get("output_ids") or ()) == new_tokens else parts
    tokens = [token for part in chosen for token in part.get("output_ids") or ()]
    if len(tokens) != new_tokens:
        raise _FailedError(f"not the number of tokens that was asked for ({len(tokens)} of {new_tokens})")
    meta = [part.get("meta_info") or {} for part in chosen]
    logprobs = [float(entry[0]) for one in meta for entry in one.get("output_token_logprobs") or ()]
    seconds, gaps = [], []
    bests = [pair for one in meta for pair in one.get("output_top_logprobs") or ()]
    for token, best in zip(tokens, bests, strict=False):
        # Two tokens of equal log-probability come in any order, whichever was chosen.
        other = next(entry for entry in best if int(entry[1]) != token)
        seconds.append(int(other[1]))
        gaps.append(float(best[0][0]) - float(other[0]))
    return Reply(tuple(tokens), tuple(logprobs), tuple(seconds), tuple(gaps), ttft)
