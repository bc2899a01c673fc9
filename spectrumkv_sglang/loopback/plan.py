"""What the probe tells a loopback server, and what the server reports: a plan file, request tags, result lines.

The plan is a JSON file named by ``SPECTRUMKV_LOOPBACK``. A request is tagged through SGLang's ``custom_params``
sampling parameter. Each tagged request yields one JSON line in the plan's result file.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Annotated, Any

import msgspec

from spectrumkv_sglang.config import SpectrumKVConfig, load_config
from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.sglang_compat import LOOPBACK_VARIABLE

TAG_KEY = "spectrumkv"
NATIVE = "native"
"""Policy of requests whose KV stays as it is."""

SERVER_LINE = "server"
"""Id of the first result line: what the server serves, or why it cannot do loopback."""

_NO_BUDGET = 1e-9
_POLICY_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class LoopbackError(SpectrumKVError):
    """The plan cannot be read, or a request cannot be treated as its tag asks."""


class LoopbackPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Attributes:
    base: SpectrumKV configuration file (YAML) whose scorer observes attention, for all policies.
    policies: folder with one configuration file NAME.yaml a policy; read when a request first names it. The name
        "native" needs none.
    results: file that gets one JSON line a tagged request; it is appended to.
    lowest: policies under whose budget no token gets more than it must: all but the sinks travel in the lowest tier of
        their profile, on every pool. No configuration can state such a budget: what is least depends on the pool.
    probe_pid: the process that made the plan; only servers that it starts itself take part, so that a variable left in
        an environment never puts a serving server into loopback mode.
    """

    base: str
    policies: str
    results: str
    lowest: tuple[str, ...] = ()
    probe_pid: int = msgspec.field(default_factory=os.getpid)


class RequestTag(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Attributes:
    id: repeated in the result line.
    policy: how the prompt's KV travels, once its last chunk has been prefilled.
    judged_after: None, or the number of prompt tokens that must be cached already (with whatever KV they have); the
        logits of all later prompt tokens are then judged.
    reference: judged logits are kept as the reference that later requests are compared with.
    """

    id: str
    policy: str = NATIVE
    judged_after: int | None = None
    reference: bool = False

    def as_custom_params(self) -> dict[str, Any]:
        """Value of SGLang's ``custom_params`` sampling parameter."""
        return {TAG_KEY: msgspec.json.encode(self).decode()}


class InPlaceRecord(msgspec.Struct, frozen=True):
    """What packing and unpacking a prompt in place took: tokens, bytes, tokens by tier (high, mid, low), seconds."""

    tokens: int
    native_bytes: int
    wire_bytes: int
    tokens_by_tier: tuple[int, int, int]
    pack_seconds: float
    unpack_seconds: float


class JudgedRecord(msgspec.Struct, frozen=True):
    """Teacher-forced scores over ``tokens`` predictions: mean negative log-likelihood and mean KL divergence from the
    reference in nats, share of equal most likely tokens. The reference itself has KL 0 and top-1 1."""

    tokens: int
    nll: float
    kl: float
    top1: float


class ServerRecord(msgspec.Struct, frozen=True):
    """The server, as its first rank sees it: the KV pool's geometry and size in tokens, the longest context in tokens,
    and the fields of the served model's fingerprint (or why there is none)."""

    geometry: KVGeometry
    pool_tokens: int
    context_tokens: int
    fingerprint: dict[str, str] | None
    fingerprint_error: str = ""


class ResultLine(msgspec.Struct, frozen=True):
    """Result of one tagged request, or of the server's start (id "server"); ``error`` says why there is none."""

    id: str
    policy: str = ""
    server: ServerRecord | None = None
    in_place: InPlaceRecord | None = None
    judged: JudgedRecord | None = None
    error: Annotated[str, msgspec.Meta(max_length=4096)] | None = None


def write_plan(plan: LoopbackPlan, path: Path) -> None:
    """Write the plan file."""
    path.write_bytes(msgspec.json.encode(plan))


def read_plan(environ: Any = os.environ) -> LoopbackPlan | None:
    """The plan that ``SPECTRUMKV_LOOPBACK`` names, or None when it is not set. Raises LoopbackError."""
    name = environ.get(LOOPBACK_VARIABLE)
    if not name:
        return None
    try:
        return msgspec.json.decode(Path(name).read_bytes(), type=LoopbackPlan)
    except (OSError, msgspec.DecodeError) as error:
        raise LoopbackError(f"loopback plan {name} ({LOOPBACK_VARIABLE}) cannot be read: {error}") from error


def load_policy(plan: LoopbackPlan, name: str) -> SpectrumKVConfig:
    """Configuration of a policy, without the environment. Raises ConfigError or LoopbackError."""
    path = Path(plan.policies) / f"{name}.yaml"
    if _POLICY_NAME.fullmatch(name) is None or not path.is_file():  # a name is no path out of the folder
        raise LoopbackError(f"unknown policy {name!r}: {plan.policies} has no {path.name}")
    config = load_config(path, environ={})
    return config.with_policy(config.profile, _NO_BUDGET) if name in plan.lowest else config


def read_tag(custom_params: Any) -> RequestTag | None:
    """The tag of a request, or None. Raises LoopbackError when it is malformed."""
    text = custom_params.get(TAG_KEY) if isinstance(custom_params, dict) else None
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=RequestTag)
    except (msgspec.DecodeError, TypeError, UnicodeEncodeError) as error:
        raise LoopbackError(f"malformed {TAG_KEY} tag {text!r:.200}: {error}") from error


def refuse_other_servers(environ: Any = os.environ) -> None:
    """In a launching process: raise LoopbackError unless the probe itself has started it, for its own use."""
    plan = read_plan(environ)
    if plan is not None and plan.probe_pid != os.getppid():
        raise LoopbackError(
            f"{LOOPBACK_VARIABLE} is set, but this server was not started by the probe that wrote "
            f"{environ[LOOPBACK_VARIABLE]}: it must not change the KV of requests that it serves; unset the variable"
        )


class ResultWriter:
    """Appends result lines; not thread-safe."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def write(self, line: ResultLine) -> None:
        """Append one line; it is on disk when the call returns."""
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")


def read_results(path: Path, offset: int) -> tuple[list[ResultLine], int]:
    """Complete result lines from byte ``offset`` on, and the offset behind them; a judged score that is no number is
    nan.

    Raises:
        LoopbackError: a line is no result line.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            text = file.read()
    except FileNotFoundError:
        return [], offset
    end = text.rfind(b"\n") + 1
    return [_read_line(line, path) for line in text[:end].splitlines()], offset + end


def _read_line(text: bytes, path: Path) -> ResultLine:
    try:
        document = msgspec.json.decode(text)
        judged = document.get("judged") if isinstance(document, dict) else None
        if isinstance(judged, dict):  # JSON has no nan: msgspec writes null
            document["judged"] = {name: math.nan if value is None else value for name, value in judged.items()}
        return msgspec.convert(document, type=ResultLine)
    except msgspec.DecodeError as error:
        raise LoopbackError(
            f"{path} holds a line that is no result ({error}): does something else write there, or is the disk full?"
        ) from error
