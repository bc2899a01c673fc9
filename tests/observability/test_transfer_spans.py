"""Transfers in SGLang's traces: real trace contexts of SGLang, OpenTelemetry's exporter in memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path as FilePath
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry
from sglang.srt.observability import trace as sglang_trace

from spectrumkv_sglang import plugin, sglang_compat
from spectrumkv_sglang.observability.metrics import TransferMetrics
from spectrumkv_sglang.observability.reasons import FailureCause, Path, Reason, Wait
from spectrumkv_sglang.observability.transfer_log import ChunkRecord, TokensByTier
from spectrumkv_sglang.observability.transfer_spans import (
    MOST_ROOMS,
    Span,
    TransferSpans,
    process_spans,
    trace_transfers,
)

sys.path.insert(0, str(FilePath(__file__).parents[2] / "examples" / "monitoring"))
from show_traces import Receiver, spans_of, tree_of

ROOM = 4711
PROMPT = "what nobody but the client may read"


def ours(exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    """Finished spans of this package, without those of SGLang around them."""
    return [span for span in exporter.get_finished_spans() if span.name.startswith("spectrumkv_")]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traced(exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SGLang's tracing as `process_tracing_init` leaves it, with an exporter in memory."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(sglang_trace, "opentelemetry_initialized", True)
    monkeypatch.setattr(sglang_trace, "tracer", provider.get_tracer("test"))
    monkeypatch.setattr(sglang_trace, "threads_info", {})
    yield
    trace_transfers(None)
    for request in REQUESTS:
        request.time_stats.trace_ctx.trace_req_finish()
    REQUESTS.clear()


REQUESTS: list[Any] = []
"""Kept until the end of a test: a trace that goes away unfinished ends as an error, and imports half of SGLang."""


def request_of(room: int = ROOM) -> Any:
    """As much of SGLang's Req as a trace needs, traced as SGLang does, with a prompt."""
    context = sglang_trace.TraceReqContext("abcdef", bootstrap_room=room, role="prefill", module_name="request")
    context.trace_req_start()
    stats = SimpleNamespace(trace_ctx=context)
    request = SimpleNamespace(time_stats=stats, bootstrap_room=room, origin_input_text=PROMPT, origin_input_ids=[1, 2])
    REQUESTS.append(request)
    return request


def record(**changes: Any) -> ChunkRecord:
    fields: dict[str, Any] = {
        "time": 1000.0,
        "room": ROOM,
        "path": Path.TIERED,
        "reason": Reason.TIERED,
        "profile": "balanced",
        "tokens": 60,
        "native_bytes": 1000,
        "wire_bytes": 300,
        "achieved_b": 0.3,
        "tokens_by_tier": TokensByTier(high=10, mid=50),
        "writes": 1,
        "transfer_seconds": 0.5,
        "last_chunk": True,
    }
    return ChunkRecord(**{**fields, **changes})


def metrics_of(clock: Clock) -> tuple[TransferMetrics, TransferSpans]:
    spans = TransferSpans(sglang_compat.add_spans, clock)
    trace_transfers(spans)
    return TransferMetrics("prefill", 0, registry=CollectorRegistry()), spans


def send_a_chunk(metrics: TransferMetrics, clock: Clock) -> None:
    """What `ChunkSender` and `PrefillRank` report, in their order."""
    for seconds, report in (
        (0.1, lambda: metrics.wait(Wait.OPEN, 0.1)),
        (0.0, lambda: metrics.wait(Wait.SLOT, 1e-6)),
        (0.1, lambda: metrics.pack(0.1)),
        (0.2, lambda: metrics.write(0.2)),
        (0.1, lambda: metrics.wait(Wait.DONE, 0.1)),
    ):
        clock.now += seconds
        report()
    metrics.chunk(record(time=clock.now))


def send_a_traced_chunk() -> None:
    """A request that ends when its one chunk has been sent."""
    clock = Clock()
    metrics, spans = metrics_of(clock)
    request = request_of()
    spans.expect(ROOM, sglang_compat.request_trace(request))
    send_a_chunk(metrics, clock)
    request.time_stats.trace_ctx.trace_req_finish()


def fail_a_traced_chunk() -> None:
    """A request whose one chunk failed after a payload of it had been packed."""
    clock = Clock()
    metrics, spans = metrics_of(clock)
    request = request_of()
    spans.expect(ROOM, sglang_compat.request_trace(request))
    clock.now += 0.1
    metrics.pack(0.1)
    clock.now += 0.2
    metrics.chunk_failed(ROOM, FailureCause.WRITE_FAILED, 0.3)
    request.time_stats.trace_ctx.trace_req_finish()


@pytest.mark.usefixtures("traced")
def test_a_chunk_and_its_phases_stand_in_the_trace_of_the_request(exporter: InMemorySpanExporter) -> None:
    send_a_traced_chunk()

    found = {span.name: span for span in exporter.get_finished_spans()}
    transfer = found["spectrumkv_transfer"]
    assert {span.context.trace_id for span in found.values()} == {found["prefill Req abcdef"].context.trace_id}
    thread = next(span for span in exporter.get_finished_spans() if span.context.span_id == transfer.parent.span_id)
    assert thread.parent.span_id == found["prefill Req abcdef"].context.span_id
    phases = [span for span in found.values() if span.parent and span.parent.span_id == transfer.context.span_id]
    assert [(span.name, round((span.end_time - span.start_time) / 1e9, 3)) for span in phases] == [
        ("spectrumkv_open", 0.1),
        ("spectrumkv_pack", 0.1),
        ("spectrumkv_write", 0.2),
        ("spectrumkv_wait_for_done", 0.1),
    ]
    assert all(transfer.start_time <= span.start_time <= span.end_time <= transfer.end_time for span in phases)
    assert dict(transfer.attributes) == {
        "spectrumkv.path": "tiered",
        "spectrumkv.reason": "tiered",
        "spectrumkv.profile": "balanced",
        "spectrumkv.tokens": 60,
        "spectrumkv.native_bytes": 1000,
        "spectrumkv.wire_bytes": 300,
        "spectrumkv.achieved_b": 0.3,
        "spectrumkv.writes": 1,
        "spectrumkv.last_chunk": True,
        "spectrumkv.tokens_high": 10,
        "spectrumkv.tokens_mid": 50,
        "spectrumkv.tokens_low": 0,
    }
    assert PROMPT not in " ".join(span.to_json() for span in found.values())


@pytest.mark.usefixtures("traced")
def test_phases_of_a_chunk_that_failed_are_not_those_of_the_next(exporter: InMemorySpanExporter) -> None:
    clock = Clock()
    metrics, spans = metrics_of(clock)
    spans.expect(ROOM, sglang_compat.request_trace(request_of()))
    metrics.pack(0.1)  # and no more of it
    clock.now += 10
    metrics.chunk(record(time=clock.now, path=Path.NATIVE, reason=Reason.OPEN_TIMEOUT))
    (transfer,) = ours(exporter)
    assert (transfer.attributes["spectrumkv.reason"], "spectrumkv.tokens_high" in transfer.attributes) == (
        "open_timeout",
        False,
    )


@pytest.mark.usefixtures("traced")
def test_a_chunk_that_failed_says_so(exporter: InMemorySpanExporter) -> None:
    fail_a_traced_chunk()
    found = {span.name: span for span in exporter.get_finished_spans()}
    transfer, pack = found["spectrumkv_transfer"], found["spectrumkv_pack"]
    assert transfer.status.status_code is StatusCode.ERROR
    assert transfer.status.description == f"write_failed: {FailureCause.WRITE_FAILED.meaning}"
    assert dict(transfer.attributes) == {"spectrumkv.cause": "write_failed"}
    assert transfer.end_time - transfer.start_time == 300_000_000
    assert pack.parent.span_id == transfer.context.span_id
    assert [span.name for span in found.values() if span.status.status_code is StatusCode.ERROR] == [transfer.name]


@pytest.mark.usefixtures("traced")
def test_a_failure_is_no_error_of_what_comes_next(exporter: InMemorySpanExporter) -> None:
    clock = Clock()
    metrics, spans = metrics_of(clock)
    spans.expect(ROOM, sglang_compat.request_trace(request_of()))
    metrics.native_failed(ROOM, 0.1)
    send_a_chunk(metrics, clock)
    first, *_, last = ours(exporter)
    assert (first.attributes["spectrumkv.cause"], first.status.status_code) == ("native_transfer", StatusCode.ERROR)
    assert (last.name, last.status.status_code) == ("spectrumkv_transfer", StatusCode.UNSET)


@pytest.mark.usefixtures("traced")
def test_a_failure_below_the_level_that_is_traced_is_left_out(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sglang_trace, "get_global_trace_level", lambda: 1)
    fail_a_traced_chunk()
    assert ours(exporter) == []
    assert "was lost" not in caplog.text
    assert all(span.status.status_code is StatusCode.UNSET for span in exporter.get_finished_spans())


@pytest.mark.usefixtures("traced")
def test_decode_shows_what_it_unpacked(exporter: InMemorySpanExporter) -> None:
    metrics, spans = metrics_of(Clock())
    spans.expect(ROOM, sglang_compat.request_trace(request_of()))
    metrics.unpack(0.25, ROOM)
    (unpack,) = ours(exporter)
    assert (unpack.name, unpack.end_time - unpack.start_time) == ("spectrumkv_unpack", 250_000_000)


@pytest.mark.usefixtures("traced")
def test_the_plugin_hands_traces_over_only_where_sglang_traces(exporter: InMemorySpanExporter) -> None:
    plugin._trace_transfers()
    spans = process_spans()
    assert spans is not None
    plugin._trace_request(request_of())
    plugin._trace_request(SimpleNamespace(bootstrap_room=5, time_stats=SimpleNamespace(trace_ctx=None)))
    spans.unpacked(5, 0.1)
    assert ours(exporter) == []
    spans.unpacked(ROOM, 0.1)
    assert [span.name for span in ours(exporter)] == ["spectrumkv_unpack"]


def test_nothing_is_kept_without_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_trace, "opentelemetry_initialized", False)
    plugin._trace_transfers()
    assert process_spans() is None
    plugin._trace_request(request_of())  # must not raise
    assert sglang_compat.request_trace(request_of()) is None


def test_an_exporter_that_fails_fails_no_transfer(caplog: pytest.LogCaptureFixture) -> None:
    def broken(trace: Any, thread: str, span: Span) -> None:
        raise OSError("no collector")

    spans = TransferSpans(broken)
    spans.expect(1, object())
    spans.unpacked(1, 0.1)
    assert "no collector" in caplog.text


def test_rooms_are_forgotten_in_the_end() -> None:
    emitted: list[Any] = []
    spans = TransferSpans(lambda trace, thread, span: emitted.append(trace))
    for room in range(MOST_ROOMS + 1):
        spans.expect(room, f"trace {room}")
    spans.unpacked(0, 0.1)
    spans.unpacked(1, 0.1)
    assert emitted == ["trace 1"]


@pytest.mark.usefixtures("traced")
def test_the_example_shows_what_came_over_otlp(exporter: InMemorySpanExporter) -> None:
    send_a_traced_chunk()
    receiver = Receiver()
    try:
        sent: tuple[ReadableSpan, ...] = exporter.get_finished_spans()
        OTLPSpanExporter(receiver.endpoint).export(sent)
        (received,) = receiver.take_out(0.0)
    finally:
        receiver.close()
    lines = list(tree_of(received))
    assert len(lines) == len(sent)
    transfer = next(line for line in lines if "spectrumkv_transfer" in line)
    assert "reason=tiered" in transfer
    assert "wire_bytes=300" in transfer
    assert lines.index(transfer) < next(index for index, line in enumerate(lines) if "spectrumkv_pack" in line)


class Collector(TraceServiceServicer):
    """OTLP over gRPC, as a collector's port 4317: keeps each request as its bytes."""

    def __init__(self) -> None:
        self.received: list[bytes] = []

    def Export(  # noqa: N802 (the service's name for it)
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        self.received.append(request.SerializeToString())
        return ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    """A collector and its HOST:PORT."""
    server, service = grpc.server(ThreadPoolExecutor(1)), Collector()
    add_TraceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield service, f"127.0.0.1:{port}"
    server.stop(None).wait(10)


@pytest.mark.usefixtures("traced")
def test_a_collector_over_grpc_reads_what_was_sent_and_what_failed(
    exporter: InMemorySpanExporter, collector: tuple[Collector, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", raising=False)
    service, endpoint = collector
    over_grpc = sglang_trace.get_otlp_span_exporter(endpoint)  # as SGLang makes it: gRPC is its default
    sglang_trace.tracer.span_processor.add_span_processor(SimpleSpanProcessor(over_grpc))
    send_a_traced_chunk()
    fail_a_traced_chunk()
    received = [span for body in service.received for span in spans_of(body)]
    sent = exporter.get_finished_spans()
    assert [(one.name, int(one.identity, 16)) for one in received] == [(one.name, one.context.span_id) for one in sent]
    well, failed = [one for one in received if one.name == "spectrumkv_transfer"]
    assert (well.error, well.attributes["spectrumkv.wire_bytes"]) == ("", 300)
    assert failed.attributes == {"spectrumkv.cause": "write_failed"}
    assert f"cause=write_failed ERROR write_failed: {FailureCause.WRITE_FAILED.meaning}" in "\n".join(tree_of(received))
    assert not any(PROMPT.encode() in body for body in service.received)
