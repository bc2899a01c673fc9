"""The probe's result as a file for machines."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from spectrumkv_sglang.probe.errors import ProbeError
from spectrumkv_sglang.probe.needle_runs import NeedleResult

RESULT_FORMAT = 1
_SCORES = ("ppl", "dppl_pct", "kl", "top1")


class Needles(msgspec.Struct, frozen=True):
    """Trials passed by the tiered policies together (a trial counts when all of them found the needle)."""

    passed: int
    trials: int
    passed_by_policy: dict[str, int]
    results: list[NeedleResult]


class Control(msgspec.Struct, frozen=True):
    """The same trials natively."""

    passed: int
    trials: int


class Seconds(msgspec.Struct, frozen=True):
    """Wall time: loading the model (server start), needles, text, all."""

    load: float
    needles: float
    text: float
    total: float


class Memory(msgspec.Struct, frozen=True):
    """Resident memory of the server's processes, bytes: when it was ready, and at most."""

    loaded: int
    peak: int


class ProbeResult(msgspec.Struct, frozen=True):
    """Everything that a probe found. ``ppl``, ``dppl_pct``, ``kl`` and ``top1`` are by policy, ``native`` among them;
    ``launch`` is the launch config that was written; ``thresholds`` are the second gate's limits."""

    format: int
    model: str
    allowed_tiers: list[str]
    verdict: str
    niah: Needles
    control: Control
    ppl: dict[str, float]
    dppl_pct: dict[str, float]
    kl: dict[str, float]
    top1: dict[str, float]
    thresholds: dict[str, float]
    rule: str
    reasons: list[str]
    advice: list[str]
    fingerprint: dict[str, str]
    profile: str
    budget: float
    seconds: Seconds
    memory: Memory
    date: str
    versions: dict[str, str]
    sglang_command: list[str]
    launch: dict[str, Any]


def encode_result(result: ProbeResult) -> bytes:
    """The result as indented JSON; a score that is no number, nan or inf, is null."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"


def read_result(path: Path) -> ProbeResult:
    """Read what ``--json`` wrote.

    Raises:
        ProbeError: no such file, no probe result, or one of another version.
    """
    try:
        content = path.read_bytes()
        found = msgspec.json.decode(content)
        if isinstance(found, dict) and found.get("format") != RESULT_FORMAT:
            raise ProbeError(
                f"{path} has format {found.get('format')!r}, expected {RESULT_FORMAT}: probe again with this version"
            )
        return msgspec.convert(_with_numbers(found), type=ProbeResult)
    except OSError as error:
        raise ProbeError(f"cannot read probe result {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ProbeError(f"{path} is no probe result (what `spectrumkv probe --json FILE` writes): {error}") from error


def _with_numbers(document: Any) -> Any:
    """The document with nan for scores that are null."""
    if not isinstance(document, dict):
        return document
    scores = {name: document[name] for name in _SCORES if isinstance(document.get(name), dict)}
    return document | {
        name: {policy: math.nan if score is None else score for policy, score in by_policy.items()}
        for name, by_policy in scores.items()
    }
