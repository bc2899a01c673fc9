"""Metrics reach a scrape of SGLang's multi-process /metrics as recorded, and never break a transfer."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path as FilePath

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from spectrumkv_sglang.observability.metric_specs import METRICS, PROCESS_LABELS, Kind
from spectrumkv_sglang.observability.metrics import TransferMetrics
from spectrumkv_sglang.observability.reasons import (
    CodecOutcome,
    DecisionReason,
    FailureCause,
    Path,
    ProbeState,
    Reason,
    Rejection,
    Wait,
)
from spectrumkv_sglang.observability.transfer_log import ChunkRecord, TokensByTier

DOCS = FilePath(__file__).parents[2] / "docs" / "metrics.md"
PREFILL_0 = {"model_name": "m", "engine_type": "prefill", "tp_rank": "0", "pp_rank": "0", "dp_rank": ""}


def tiered_chunk(**changes: object) -> ChunkRecord:
    fields: dict[str, object] = {
        "time": 0.0,
        "room": 1,
        "path": Path.TIERED,
        "reason": Reason.TIERED,
        "profile": "spectrum",
        "tokens": 60,
        "native_bytes": 1000,
        "wire_bytes": 540,
        "achieved_b": 0.54,
        "tokens_by_tier": TokensByTier(high=10, mid=20, low=30),
        "writes": 2,
        "subchunks": 2,
        "transfer_seconds": 0.3,
    }
    return ChunkRecord(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> TransferMetrics:
    return TransferMetrics("prefill", 0, model_name="m", registry=registry)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"spectrumkv:{name}", {**PREFILL_0, **labels})


def test_a_tiered_chunk(registry: CollectorRegistry, metrics: TransferMetrics) -> None:
    metrics.chunk(tiered_chunk())
    metrics.chunk(tiered_chunk(reason=Reason.BELOW_MIN_TOKENS, achieved_b=1.02))
    assert value(registry, "chunks_total", path="tiered", reason="tiered") == 1
    assert value(registry, "chunks_total", path="tiered", reason="below_min_tokens") == 1
    assert value(registry, "native_bytes_total", path="tiered") == 2000
    assert value(registry, "wire_bytes_total", path="tiered") == 1080
    assert [value(registry, "tokens_total", tier=tier) for tier in ("high", "mid", "low", "none")] == [20, 40, 60, None]
    assert value(registry, "mooncake_writes_total") == 4
    assert value(registry, "subchunks_total") == 4
    assert value(registry, "transfer_seconds_sum", path="tiered") == pytest.approx(0.6)
    assert value(registry, "achieved_budget_ratio_bucket", le="0.55") == 1
    assert value(registry, "achieved_budget_ratio_count") == 2


def test_a_native_chunk_counts_no_tier(registry: CollectorRegistry, metrics: TransferMetrics) -> None:
    metrics.chunk(
        tiered_chunk(path=Path.NATIVE, reason=Reason.MLA, wire_bytes=1000, tokens_by_tier=TokensByTier(), writes=0)
    )
    assert value(registry, "chunks_total", path="native", reason="mla") == 1
    assert value(registry, "tokens_total", tier="none") == 60
    assert value(registry, "wire_bytes_total", path="native") == 1000
    assert value(registry, "achieved_budget_ratio_count") is None


def test_stages_slots_and_config(registry: CollectorRegistry, metrics: TransferMetrics) -> None:
    metrics.pack(0.002)
    metrics.write(0.02)
    metrics.unpack(0.2)
    metrics.wait(Wait.OPEN, 2.0)
    metrics.landing_slots(free=5, in_use=2, quarantined=1)
    metrics.landing_slots(free=8, in_use=0, quarantined=0)
    metrics.staging_slots(free=4, in_use=0, quarantined=0)
    metrics.config(version="0.1.0", profile="int8", budget=0.55, allowed_tiers=["high", "mid"], scorer="window")
    assert value(registry, "pack_seconds_bucket", le="0.0025") == 1
    assert value(registry, "pack_seconds_bucket", le="0.001") == 0
    assert value(registry, "write_seconds_sum") == 0.02
    assert value(registry, "unpack_seconds_count") == 1
    assert value(registry, "wait_seconds_sum", wait="open") == 2
    assert [value(registry, "landing_slots", state=state) for state in ("in_use", "free", "quarantined")] == [0, 8, 0]
    assert value(registry, "staging_slots", state="free") == 4
    assert (
        value(
            registry,
            "config_info",
            version="0.1.0",
            profile="int8",
            budget="0.55",
            allowed_tiers="high,mid",
            scorer="window",
            control_secret="off",
            enabled="on",
        )
        == 1
    )


def test_counters_that_alerts_watch_exist_before_the_first_failure(
    registry: CollectorRegistry, metrics: TransferMetrics
) -> None:
    assert [value(registry, "failures_total", cause=cause.value) for cause in FailureCause] == [0] * len(FailureCause)
    assert value(registry, "budget_unreachable_total") == 0
    assert value(registry, "transfer_log_errors_total") == 0
    metrics.failure(FailureCause.WRITE_TIMEOUT)
    metrics.budget_unreachable()
    metrics.transfer_log_error()
    metrics.control_message_rejected(Rejection.GARBAGE)
    metrics.control_message_rejected(Rejection.STALE)
    assert value(registry, "failures_total", cause="write_timeout") == 1
    assert value(registry, "budget_unreachable_total") == 1
    assert value(registry, "transfer_log_errors_total") == 1
    assert value(registry, "control_messages_rejected_total", kind="garbage") == 1
    assert value(registry, "control_messages_rejected_total", kind="stale") == 1


def test_ranks_of_one_process_share_the_metrics(registry: CollectorRegistry, metrics: TransferMetrics) -> None:
    other = TransferMetrics("decode", 3, dp_rank=1, model_name="m", registry=registry)
    other.unpack(1.0)
    metrics.pack(1.0)
    labels = {**PREFILL_0, "engine_type": "decode", "tp_rank": "3", "dp_rank": "1"}
    assert registry.get_sample_value("spectrumkv:unpack_seconds_count", labels) == 1
    assert value(registry, "pack_seconds_count") == 1


def test_extra_labels_are_carried_and_must_agree(registry: CollectorRegistry) -> None:
    metrics = TransferMetrics("prefill", 0, model_name="m", extra_labels={"cluster": "a"}, registry=registry)
    metrics.pack(1.0)
    assert value(registry, "pack_seconds_count", cluster="a") == 1
    with pytest.raises(ValueError, match="extra_labels"):
        TransferMetrics("prefill", 1, model_name="m", registry=registry)


def test_recording_never_raises(metrics: TransferMetrics, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        metrics.chunk(tiered_chunk(native_bytes=-1))
    (message,) = caplog.messages
    assert "recorded by chunk" in message
    assert "transfers go on" in message


def test_one_probe_state_holds_at_a_time(registry: CollectorRegistry, metrics: TransferMetrics) -> None:
    metrics.probe_state(ProbeState.MISSING)
    metrics.probe_state(ProbeState.VERIFIED)
    assert {state: value(registry, "probe_state", state=state.value) for state in ProbeState} == {
        state: float(state is ProbeState.VERIFIED) for state in ProbeState
    }


def test_threads_lose_no_count(registry: CollectorRegistry, metrics: TransferMetrics) -> None:
    threads = [threading.Thread(target=lambda: [metrics.chunk(tiered_chunk()) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert value(registry, "wire_bytes_total", path="tiered") == 800 * 540


SCHEDULER = """
import sys
import spectrumkv_sglang.observability.metrics as ours
assert "prometheus_client" not in sys.modules, "imported before SGLang has chosen the directory"
from spectrumkv_sglang.observability.reasons import FailureCause, Path, Reason
from spectrumkv_sglang.observability.transfer_log import ChunkRecord, TokensByTier
metrics = ours.TransferMetrics("prefill", int(sys.argv[1]), model_name="m")
for _ in range(3):
    metrics.chunk(ChunkRecord(
        time=0.0, room=1, path=Path.TIERED, reason=Reason.TIERED, profile="spectrum", tokens=3, native_bytes=100,
        wire_bytes=50, achieved_b=0.5, tokens_by_tier=TokensByTier(high=1, mid=1, low=1)))
metrics.failure(FailureCause.WRITE_FAILED)
metrics.staging_slots(free=4, in_use=0, quarantined=0)
metrics.staging_slots(free=3, in_use=1, quarantined=0)
"""


def test_a_scrape_of_sglangs_multi_process_mode_sees_every_scheduler(tmp_path: FilePath) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for tp_rank in ("0", "0", "1"):  # the second one is rank 0 after a restart
        subprocess.run([sys.executable, "-c", SCHEDULER, tp_rank], env=environment, check=True, timeout=60)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))
    assert value(registry, "wire_bytes_total", path="tiered") == 300
    assert value(registry, "wire_bytes_total", path="tiered", tp_rank="1") == 150
    assert value(registry, "failures_total", cause="write_failed") == 2
    assert value(registry, "failures_total", cause="write_timeout") == 0
    assert value(registry, "staging_slots", state="in_use") == 1
    assert value(registry, "achieved_budget_ratio_bucket", le="0.5") == 6
    names = {family.name for family in text_string_to_metric_families(generate_latest(registry).decode())}
    assert "spectrumkv:chunks" in names
    assert all(name.startswith("spectrumkv:") for name in names)


def documented_rows(heading: str) -> list[list[str]]:
    """Body rows of the first table after `heading`, cells stripped of spaces and backquotes."""
    section = DOCS.read_text().split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return [[re.sub(r"`", "", cell) for cell in row] for row in rows[2:]]


def test_docs_list_the_metrics_of_the_code() -> None:
    documented = {tuple(row[:3]) for row in documented_rows("Metrics")}
    assert documented == {(spec.full_name, spec.kind.value, ", ".join(spec.labels)) for spec in METRICS}


def test_docs_explain_every_reason_and_failure() -> None:
    assert documented_rows("Reasons") == [
        [reason.path.value, reason.value, reason.meaning.replace("`", "")] for reason in Reason
    ]
    assert documented_rows("Failures") == [[cause.value, cause.meaning] for cause in FailureCause]
    assert documented_rows("Probe states") == [[state.value, state.meaning.replace("`", "")] for state in ProbeState]
    assert documented_rows("Decisions") == [
        [reason.value, reason.meaning.replace("`", "")] for reason in DecisionReason
    ]
    assert documented_rows("Codec") == [[outcome.value, outcome.meaning] for outcome in CodecOutcome]


def test_names_follow_prometheus_and_sglang() -> None:
    for spec in METRICS:
        assert re.fullmatch(r"spectrumkv:[a-z][a-z0-9_]*", spec.full_name)
        assert spec.full_name.endswith("_total") == (spec.kind is Kind.COUNTER)
        assert bool(spec.buckets) == (spec.kind is Kind.HISTOGRAM)
        assert list(spec.buckets) == sorted(set(spec.buckets))
        assert not set(spec.labels) & set(PROCESS_LABELS)
