"""HTTP requests to plain servers, prefill/decode pairs and routers, from inside their network namespace if need be."""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.launch.netns import NetworkNamespace

if TYPE_CHECKING:
    from spectrumkv_sglang.launch.servers import Router, SGLangServer

REQUEST_TIMEOUT_SECONDS = 180.0
MAX_ROOM = 2**63 - 1
# Proxy variables of the environment are for other hosts.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class HttpError(SpectrumKVError):
    """A request failed: no connection, no answer in time, or a status other than 200.

    Attributes:
        status: HTTP status, or None when there was no answer.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Completion:
    """One greedy answer.

    Attributes:
        text: generated text.
        output_ids: generated token ids.
        prompt_tokens: length of the prompt in tokens.
        cached_tokens: prompt tokens that the answering server found in its prefix cache.
        seconds: wall time of the request.
        logprobs: natural logarithm of each generated token's probability, if they were asked for.
    """

    text: str
    output_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    seconds: float
    logprobs: tuple[float, ...] = ()


def get(url: str, *, namespace: NetworkNamespace | None = None, timeout_seconds: float = 10.0) -> bytes:
    """Return the body of a GET request.

    Raises:
        HttpError: see there.
    """
    return _send(urllib.request.Request(url), namespace, timeout_seconds)


def post(
    url: str,
    content: Mapping[str, Any],
    *,
    namespace: NetworkNamespace | None = None,
    timeout_seconds: float = REQUEST_TIMEOUT_SECONDS,
) -> bytes:
    """Return the body of a POST request with a JSON object.

    Raises:
        HttpError: see there.
    """
    body = json.dumps(dict(content)).encode()
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    return _send(request, namespace, timeout_seconds)


def generate(
    server: SGLangServer | Router,
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int,
    timeout_seconds: float = REQUEST_TIMEOUT_SECONDS,
    sampling: Mapping[str, Any] | None = None,
) -> Completion:
    """Generate greedily through a plain server or a router.

    Args:
        server: whom to ask.
        prompt: text, or token ids.
        max_new_tokens: upper bound of generated tokens.
        timeout_seconds: for the whole request.
        sampling: further SGLang sampling parameters, such as ``{"ignore_eos": True}``.

    Raises:
        HttpError: see there.
    """
    content = _generate_request(prompt, max_new_tokens, sampling)
    started = time.monotonic()
    answer = post(f"{server.url}/generate", content, namespace=server.namespace, timeout_seconds=timeout_seconds)
    return _completion(answer, time.monotonic() - started)


def generate_on_pair(
    prefill: SGLangServer,
    decode: SGLangServer,
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int,
    bootstrap_room: int | None = None,
    timeout_seconds: float = REQUEST_TIMEOUT_SECONDS,
    sampling: Mapping[str, Any] | None = None,
    logprobs: bool = False,
) -> Completion:
    """Generate greedily on a prefill and a decode server directly, as a router would.

    Args:
        prefill: prefill server.
        decode: decode server.
        prompt: text, or token ids.
        max_new_tokens: upper bound of generated tokens.
        bootstrap_room: SGLang's room of the request; a random one by default.
        timeout_seconds: for each of the two requests.
        sampling: further SGLang sampling parameters.
        logprobs: ask for the generated tokens' log-probabilities, too.

    Raises:
        HttpError: of the decode server's request if that failed, else of the prefill server's.
    """
    content = {
        **_generate_request(prompt, max_new_tokens, sampling),
        "return_logprob": logprobs,
        "bootstrap_host": prefill.spec.host,
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": random.randint(0, MAX_ROOM) if bootstrap_room is None else bootstrap_room,
    }
    started = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        prefilled, decoded = (
            pool.submit(
                post, f"{side.url}/generate", content, namespace=side.namespace, timeout_seconds=timeout_seconds
            )
            for side in (prefill, decode)
        )
    answer = decoded.result()
    prefilled.result()
    return _completion(answer, time.monotonic() - started)


def flush_cache(server: SGLangServer, *, timeout_seconds: float = 30.0) -> None:
    """Empty a server's prefix cache, waiting until its last request has let go of its pages.

    A cached prefix alone changes later tokens, so comparisons between servers start from flushed caches.

    Raises:
        HttpError: still refused after ``timeout_seconds``.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            post(f"{server.url}/flush_cache", {}, namespace=server.namespace, timeout_seconds=timeout_seconds)
            return
        except HttpError as error:
            if error.status is None or time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def flush_caches(servers: Iterable[SGLangServer]) -> None:
    """Empty the prefix caches of several servers."""
    for server in servers:
        flush_cache(server)


def _generate_request(
    prompt: str | Sequence[int], max_new_tokens: int, sampling: Mapping[str, Any] | None
) -> dict[str, Any]:
    source = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    parameters = {"temperature": 0.0, "max_new_tokens": max_new_tokens, **(sampling or {})}
    return {**source, "sampling_params": parameters}


def _completion(answer: bytes, seconds: float) -> Completion:
    try:
        content = json.loads(answer)
        meta = content["meta_info"]
        return Completion(
            text=content["text"],
            output_ids=tuple(content["output_ids"]),
            prompt_tokens=int(meta["prompt_tokens"]),
            cached_tokens=int(meta.get("cached_tokens") or 0),
            seconds=seconds,
            logprobs=tuple(float(entry[0]) for entry in meta.get("output_token_logprobs") or ()),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise HttpError(f"unexpected answer to /generate ({error!r}): {answer[:500]!r}") from error


def _send(request: urllib.request.Request, namespace: NetworkNamespace | None, timeout_seconds: float) -> bytes:
    inside = namespace.entered() if namespace is not None else nullcontext()
    try:
        with inside, _opener.open(request, timeout=timeout_seconds) as response:
            body: bytes = response.read()
    except urllib.error.HTTPError as error:
        detail = error.read().decode(errors="replace")[:500]
        raise HttpError(f"{request.full_url}: HTTP status {error.code}: {detail}", status=error.code) from error
    except (OSError, http.client.HTTPException) as error:
        raise HttpError(f"{request.full_url}: {error}") from error
    if response.status != 200:
        raise HttpError(f"{request.full_url}: HTTP status {response.status}, expected 200", status=response.status)
    return body
