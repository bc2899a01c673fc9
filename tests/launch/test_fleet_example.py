"""examples/fleet.py without servers: what it reads of a server's counters, and how it compares answers.

All of it: `python examples/fleet.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path as FilePath
from types import ModuleType

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from spectrumkv_sglang.launch.client import Completion
from spectrumkv_sglang.observability.live_metrics import LiveMetrics, parse_metrics
from spectrumkv_sglang.observability.metrics import TransferMetrics
from spectrumkv_sglang.observability.reasons import FailureCause, Path, Reason
from spectrumkv_sglang.observability.transfer_log import ChunkRecord, TokensByTier


@pytest.fixture(scope="module")
def fleet() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FilePath(__file__).parents[2] / "examples")
        yield importlib.import_module("fleet")


def scraped(registry: CollectorRegistry) -> LiveMetrics:
    return parse_metrics("http://server", generate_latest(registry).decode())


def chunk(path: Path, reason: Reason, wire_bytes: int, tiers: TokensByTier) -> ChunkRecord:
    return ChunkRecord(
        time=1.0, room=1, path=path, reason=reason, profile="spectrum-safe", tokens=100, native_bytes=100_000,
        wire_bytes=wire_bytes, achieved_b=wire_bytes / 100_000, tokens_by_tier=tiers,
    )  # fmt: skip


def test_a_prefill_server_tells_what_it_sent_and_by_which_path(fleet: ModuleType) -> None:
    registry = CollectorRegistry()
    metrics = TransferMetrics("prefill", 0, registry=registry)
    assert fleet.sent(scraped(registry)) == ["0", "0", "0", "0", "-", "0/0"]
    metrics.chunk(chunk(Path.TIERED, Reason.TIERED, 30_000, TokensByTier(high=10, mid=90)))
    metrics.chunk(chunk(Path.NATIVE, Reason.OPEN_TIMEOUT, 100_000, TokensByTier()))
    assert fleet.sent(scraped(registry)) == ["1", "1", "200", "130", "0.650", "10/90"]


def test_a_decode_server_tells_what_it_unpacked_and_what_failed(fleet: ModuleType) -> None:
    registry = CollectorRegistry()
    metrics = TransferMetrics("decode", 0, registry=registry)
    assert fleet.ends(scraped(registry)) == ["0", "none"]
    metrics.unpack(0.01, 1)
    metrics.failure(FailureCause.ROOM_GONE)
    assert fleet.ends(scraped(registry)) == ["1", "1 room_gone"]


def test_answers_are_compared_token_by_token(fleet: ModuleType) -> None:
    def answer(*ids: int) -> Completion:
        return Completion("", ids, 1, 0, 1.0)

    prompt = fleet.DEMO_PROMPTS[0]
    assert fleet.Answered(prompt, answer(1, 2, 4)).same_tokens({prompt.name: answer(1, 2, 3)}) == 2
    assert fleet.Answered(prompt, None, "gone").same_tokens({prompt.name: answer(1)}) == 0
