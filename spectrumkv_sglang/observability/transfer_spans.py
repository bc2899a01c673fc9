"""OpenTelemetry spans of transfers, inside the traces that SGLang keeps of requests when `--enable-trace` is on.

Everything needed is counted already: `TransferMetrics` is told of each phase of a chunk when it ends, by the thread
that sends the chunk, and of the chunk when it has been sent. Here the phases are kept until then and become children of
the chunk's span. SGLang makes and exports the spans (`sglang_compat.add_spans`); nothing here imports OpenTelemetry.
A span holds sizes, times, tiers and reasons, never anything of a prompt.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spectrumkv_sglang.observability.once import log_once
from spectrumkv_sglang.observability.reasons import Path
from spectrumkv_sglang.observability.transfer_log import ChunkRecord

logger = logging.getLogger(__name__)

MOST_ROOMS = 4096
MOST_PHASES = 256
SHORTEST_WAIT_SECONDS = 1e-4
"""Most waits for a slot find one at once: no span for those."""
# As SGLang's own spans of a Mooncake session and of details; SGLANG_TRACE_LEVEL hides those above it.
_CHUNK_LEVEL = 2
_PHASE_LEVEL = 3

AttributeValue = str | int | float | bool


@dataclass(frozen=True)
class Span:
    """A piece of time with a name.

    Attributes:
        start, end: seconds since 1970.
        level: how much detail it is, as SGLang counts: 1 is least.
        attributes: OpenTelemetry's.
        children: spans inside it, in the order in which they ended.
        error: what went wrong, for the span's status; empty: nothing did.
    """

    name: str
    start: float
    end: float
    level: int
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    children: tuple[Span, ...] = ()
    error: str = ""


class TransferSpans:
    """Turns what one rank counts into spans in the traces of its requests. Any thread may call; nothing raises.

    Args:
        emit: takes a request's trace, the name of the thread and a span (`sglang_compat.add_spans`).
        clock: seconds since 1970.
    """

    def __init__(self, emit: Callable[[Any, str, Span], None], clock: Callable[[], float] = time.time) -> None:
        self._emit, self._clock = emit, clock
        self._traces: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._thread = threading.local()

    def expect(self, room: int, trace: Any) -> None:
        """``trace`` is that of the request whose KV goes by ``room``; the last one of a room counts."""
        with self._lock:
            self._traces[room] = trace
            self._traces.move_to_end(room)
            while len(self._traces) > MOST_ROOMS:
                self._traces.popitem(last=False)

    def phase(self, name: str, seconds: float) -> None:
        """A phase of the chunk that this thread sends has just ended."""
        now = self._clock()
        self._phases().append(Span(f"spectrumkv_{name.replace(' ', '_')}", now - seconds, now, _PHASE_LEVEL))

    def wait(self, name: str, seconds: float) -> None:
        """As `phase`; left out where there was nothing to wait for."""
        if seconds >= SHORTEST_WAIT_SECONDS:
            self.phase(name, seconds)

    def chunk(self, record: ChunkRecord) -> None:
        """The chunk that this thread sends has been sent."""
        self._transfer(record.room, record.time - record.transfer_seconds, record.time, _attributes(record))

    def failed(self, room: int, cause: str, meaning: str, seconds: float) -> None:
        """The chunk that this thread sends has failed ``seconds`` after its start, by ``cause``."""
        now = self._clock()
        self._transfer(room, now - seconds, now, {"spectrumkv.cause": cause}, f"{cause}: {meaning}")

    def unpacked(self, room: int, seconds: float) -> None:
        """Decode has just unpacked one payload of ``room``."""
        now = self._clock()
        self._add(room, Span("spectrumkv_unpack", now - seconds, now, _CHUNK_LEVEL))

    def _transfer(
        self, room: int, start: float, end: float, attributes: Mapping[str, AttributeValue], error: str = ""
    ) -> None:
        # Those before its start are of something that nobody spoke of again.
        phases = tuple(_within(one, start, end) for one in self._phases() if one.end >= start)
        self._phases().clear()
        self._add(room, Span("spectrumkv_transfer", start, end, _CHUNK_LEVEL, attributes, phases, error))

    def _phases(self) -> deque[Span]:
        phases: deque[Span] | None = getattr(self._thread, "phases", None)
        if phases is None:
            phases = self._thread.phases = deque(maxlen=MOST_PHASES)
        return phases

    def _add(self, room: int, span: Span) -> None:
        with self._lock:
            trace = self._traces.get(room)
        if trace is None:
            return  # a request that SGLang does not trace
        try:
            self._emit(trace, "SpectrumKV", span)
        except Exception as error:  # noqa: BLE001 (a trace must not fail the transfer that it shows)
            log_once(logger, logging.ERROR, "spans", f"a span of room {room} was lost: {error!r}; transfers go on")


def _within(span: Span, start: float, end: float) -> Span:
    """``span`` cut to its parent's time: clocks that are read apart differ by microseconds."""
    return Span(span.name, min(max(span.start, start), end), min(span.end, end), span.level, span.attributes)


def _attributes(record: ChunkRecord) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {
        "path": record.path.value,
        "reason": record.reason.value,
        "profile": record.profile,
        "tokens": record.tokens,
        "native_bytes": record.native_bytes,
        "wire_bytes": record.wire_bytes,
        "achieved_b": record.achieved_b,
        "writes": record.writes,
        "last_chunk": record.last_chunk,
    }
    if record.path is Path.TIERED:
        tiers = record.tokens_by_tier
        found |= {"tokens_high": tiers.high, "tokens_mid": tiers.mid, "tokens_low": tiers.low}
    if record.candidate and record.decision is not None:
        found |= {"candidate": record.candidate, "decision": record.decision.value}
    return {f"spectrumkv.{name}": value for name, value in found.items()}


_process_spans: TransferSpans | None = None


def trace_transfers(spans: TransferSpans | None) -> None:
    """Let this process' ranks record spans; None: no more. Once, before anything is transferred."""
    global _process_spans
    _process_spans = spans


def process_spans() -> TransferSpans | None:
    """Where this process' ranks record spans; None where SGLang does not trace."""
    return _process_spans
