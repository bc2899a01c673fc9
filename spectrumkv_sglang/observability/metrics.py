"""SpectrumKV's metrics on SGLang's /metrics.

SGLang runs prometheus-client in its multi-process mode: the launching process sets PROMETHEUS_MULTIPROC_DIR, each
scheduler writes its values to files there and the HTTP server adds them up. prometheus-client decides between files and
memory when it is first imported, so this module imports it only when a `TransferMetrics` is made, which the scheduler
processes do. Without `--enable-metrics` the values stay in memory and nobody sees them.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Concatenate, Literal, ParamSpec
from weakref import WeakKeyDictionary

from spectrumkv_sglang.observability import metric_specs as specs
from spectrumkv_sglang.observability.once import log_once
from spectrumkv_sglang.observability.reasons import (
    CodecOutcome,
    DecisionReason,
    FailureCause,
    Path,
    ProbeState,
    Rejection,
    SlotState,
    TokenTier,
    Wait,
)
from spectrumkv_sglang.observability.transfer_log import ChunkRecord
from spectrumkv_sglang.observability.transfer_spans import process_spans

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

logger = logging.getLogger(__name__)

Role = Literal["prefill", "decode"]
Arguments = ParamSpec("Arguments")


def _never_raises(
    record: Callable[Concatenate[TransferMetrics, Arguments], None],
) -> Callable[Concatenate[TransferMetrics, Arguments], None]:
    """A full disk under PROMETHEUS_MULTIPROC_DIR, or a mistake in here, must not fail the transfer being counted."""

    @functools.wraps(record)
    def guarded(self: TransferMetrics, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            record(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001
            log_once(
                logger,
                logging.ERROR,
                f"metrics:{record.__name__}",
                f"metric not recorded by {record.__name__}: {error!r}; transfers go on",
            )

    return guarded


class _Families:
    """The registered metrics of one registry, by spec."""

    def __init__(self, registry: CollectorRegistry, process_labels: tuple[str, ...]) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self.process_labels = process_labels
        self.counters: dict[specs.MetricSpec, Counter] = {}
        self.gauges: dict[specs.MetricSpec, Gauge] = {}
        self.histograms: dict[specs.MetricSpec, Histogram] = {}
        for spec in specs.METRICS:
            labels = (*process_labels, *spec.labels)
            if spec.kind is specs.Kind.COUNTER:
                self.counters[spec] = Counter(spec.full_name, spec.help, labels, registry=registry)
            elif spec.kind is specs.Kind.GAUGE:
                # "mostrecent" like SGLang's: the labels name the process, so there is nothing to add up.
                self.gauges[spec] = Gauge(
                    spec.full_name, spec.help, labels, registry=registry, multiprocess_mode="mostrecent"
                )
            else:
                self.histograms[spec] = Histogram(
                    spec.full_name, spec.help, labels, registry=registry, buckets=spec.buckets
                )


_families_lock = threading.Lock()
_families_by_registry: WeakKeyDictionary[CollectorRegistry, _Families] = WeakKeyDictionary()


def _families(registry: CollectorRegistry | None, process_labels: tuple[str, ...]) -> _Families:
    """The metrics of `registry`, registered at the first call: a name can be registered only once."""
    from prometheus_client import REGISTRY

    registry = REGISTRY if registry is None else registry
    with _families_lock:
        families = _families_by_registry.get(registry)
        if families is None:
            families = _families_by_registry[registry] = _Families(registry, process_labels)
    if families.process_labels != process_labels:
        raise ValueError(
            f"SpectrumKV's metrics of this process have the labels {families.process_labels}, not {process_labels}: "
            "give every TransferMetrics of a process the same extra_labels"
        )
    return families


class TransferMetrics:
    """Records what one rank of a prefill or decode server transfers. Any thread may call; recording never raises.

    role: this server's side, SGLang's `engine_type` label. The ranks and model_name: as in SGLang's labels.
    extra_labels: what `--extra-metric-labels` gave. registry: where to register, by default prometheus-client's own.

    Several instances may live in one process (and share the metrics) as long as their extra labels have the same names;
    other names raise ValueError.
    """

    def __init__(
        self,
        role: Role,
        tp_rank: int,
        *,
        pp_rank: int = 0,
        dp_rank: int | None = None,
        model_name: str = "",
        extra_labels: Mapping[str, str] | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._labels: dict[str, str] = {
            "model_name": model_name,
            "engine_type": role,
            "tp_rank": str(tp_rank),
            "pp_rank": str(pp_rank),
            "dp_rank": "" if dp_rank is None else str(dp_rank),
            **(extra_labels or {}),
        }
        self._families = _families(registry, tuple(self._labels))
        # A counter that first appears at its first increment hides that increment from rate() and increase().
        for cause in FailureCause:
            self._counter(specs.FAILURES, cause=cause.value)
        for kind in Rejection:
            self._counter(specs.CONTROL_REJECTED, kind=kind.value)
        for spec in (
            specs.BUDGET_UNREACHABLE,
            specs.TRANSFER_LOG_ERRORS,
            specs.SWITCHES,
            specs.VIOLATIONS,
            specs.REFUSED_SAMPLES,
        ):
            self._counter(spec)

    @_never_raises
    def config(
        self,
        *,
        version: str,
        profile: str,
        budget: float,
        allowed_tiers: Iterable[str],
        scorer: str,
        control_secret: bool = False,
        enabled: bool = True,
    ) -> None:
        """Publishes the settings that the process runs with, of the secret whether there is one. Once per process."""
        self._gauge(
            specs.CONFIG_INFO,
            version=version,
            profile=profile,
            budget=f"{budget:g}",
            allowed_tiers=",".join(allowed_tiers),
            scorer=scorer,
            control_secret="on" if control_secret else "off",
            enabled="on" if enabled else "off",
        ).set(1)

    @_never_raises
    def transport(self, transport: str, variables: Mapping[str, str]) -> None:
        """Publishes how bytes travel, and Mooncake's variables by name. Once per process."""
        for variable, value in variables.items():
            self._gauge(specs.TRANSPORT_INFO, transport=transport, variable=variable, value=value).set(1)

    @_never_raises
    def probe_state(self, state: ProbeState) -> None:
        """Publishes what the probe's record is worth. Once per process."""
        for candidate in ProbeState:
            self._gauge(specs.PROBE_STATE, state=candidate.value).set(candidate is state)

    @_never_raises
    def chunk(self, record: ChunkRecord) -> None:
        """Counts one chunk that prefill sent: bytes, tokens by tier, path and reason, writes, time and achieved b."""
        if (spans := process_spans()) is not None:
            spans.chunk(record)
        path = record.path.value
        self._counter(specs.CHUNKS, path=path, reason=record.reason.value).inc()
        self._counter(specs.NATIVE_BYTES, path=path).inc(record.native_bytes)
        self._counter(specs.WIRE_BYTES, path=path).inc(record.wire_bytes)
        self._histogram(specs.TRANSFER_SECONDS, path=path).observe(record.transfer_seconds)
        if record.path is Path.NATIVE:
            self._counter(specs.TOKENS, tier=TokenTier.NONE.value).inc(record.tokens)
            return
        for tier, tokens in (
            (TokenTier.HIGH, record.tokens_by_tier.high),
            (TokenTier.MID, record.tokens_by_tier.mid),
            (TokenTier.LOW, record.tokens_by_tier.low),
        ):
            self._counter(specs.TOKENS, tier=tier.value).inc(tokens)
        self._counter(specs.SUBCHUNKS).inc(record.subchunks)
        self._counter(specs.MOONCAKE_WRITES).inc(record.writes)
        self._histogram(specs.ACHIEVED_BUDGET).observe(record.achieved_b)

    @_never_raises
    def failure(self, cause: FailureCause) -> None:
        """Counts one tiered chunk that failed."""
        self._counter(specs.FAILURES, cause=cause.value).inc()

    @_never_raises
    def chunk_failed(self, room: int, cause: FailureCause, seconds: float) -> None:
        """Counts one chunk that prefill could not send, ``seconds`` after its start."""
        if (spans := process_spans()) is not None:
            spans.failed(room, cause.value, cause.meaning, seconds)
        self.failure(cause)

    @_never_raises
    def native_failed(self, room: int, seconds: float) -> None:
        """SGLang's own transfer of a chunk failed, ``seconds`` after its start: SGLang counts it."""
        if (spans := process_spans()) is not None:
            spans.failed(room, "native_transfer", "SGLang's own transfer returned an error", seconds)

    @_never_raises
    def budget_unreachable(self) -> None:
        """Counts one room that no allowed tier brought down to the budget."""
        self._counter(specs.BUDGET_UNREACHABLE).inc()

    @_never_raises
    def decision(self, candidate: str, reason: DecisionReason) -> None:
        """Counts one room that the controller decided for; candidates are those of the configuration."""
        self._counter(specs.DECISIONS, candidate=candidate, reason=reason.value).inc()

    @_never_raises
    def controller(
        self, *, switches: int, violations: int, refused_samples: int, bandwidths: tuple[float, float] | None
    ) -> None:
        """Adds what the controller counted since the last call; bandwidths: least and median, bytes a second."""
        self._counter(specs.SWITCHES).inc(switches)
        self._counter(specs.VIOLATIONS).inc(violations)
        self._counter(specs.REFUSED_SAMPLES).inc(refused_samples)
        for stat, rate in zip(("min", "median"), bandwidths or (0.0, 0.0), strict=True):
            self._gauge(specs.BANDWIDTH, stat=stat).set(rate)

    @_never_raises
    def control_message_rejected(self, kind: Rejection) -> None:
        """Counts one control message or connection that was refused."""
        self._counter(specs.CONTROL_REJECTED, kind=kind.value).inc()

    @_never_raises
    def transfer_log_error(self) -> None:
        """Counts one lost line of the transfer log; fits `TransferLog(on_error=...)`."""
        self._counter(specs.TRANSFER_LOG_ERRORS).inc()

    @_never_raises
    def pack(self, seconds: float) -> None:
        """Packing of one sub-chunk, seconds."""
        if (spans := process_spans()) is not None:
            spans.phase("pack", seconds)
        self._histogram(specs.PACK_SECONDS).observe(seconds)

    @_never_raises
    def write(self, seconds: float) -> None:
        """Mooncake write of one sub-chunk, seconds."""
        if (spans := process_spans()) is not None:
            spans.phase("write", seconds)
        self._histogram(specs.WRITE_SECONDS).observe(seconds)

    @_never_raises
    def unpack(self, seconds: float, room: int | None = None) -> None:
        """Checksum and unpacking of one sub-chunk of ``room``, seconds."""
        if room is not None and (spans := process_spans()) is not None:
            spans.unpacked(room, seconds)
        self._histogram(specs.UNPACK_SECONDS).observe(seconds)

    @_never_raises
    def wait(self, wait: Wait, seconds: float) -> None:
        """Time that a chunk spent waiting, seconds."""
        if (spans := process_spans()) is not None:
            spans.wait("open" if wait is Wait.OPEN else f"wait for {wait.value}", seconds)
        self._histogram(specs.WAIT_SECONDS, wait=wait.value).observe(seconds)

    @_never_raises
    def codec(self, outcome: CodecOutcome, before: int, after: int) -> None:
        """Counts one payload that met the lossless codec, and its bytes where it was compressed."""
        self._counter(specs.CODEC_PAYLOADS, outcome=outcome.value).inc()
        if outcome is CodecOutcome.COMPRESSED:
            self._counter(specs.CODEC_BYTES, side="in").inc(before)
            self._counter(specs.CODEC_BYTES, side="out").inc(after)

    @_never_raises
    def codec_seconds(self, seconds: float) -> None:
        """Compressing one payload, seconds."""
        self._histogram(specs.CODEC_SECONDS).observe(seconds)

    @_never_raises
    def landing_slots(self, *, free: int, in_use: int, quarantined: int) -> None:
        """State of decode's landing pool."""
        self._set_slots(specs.LANDING_SLOTS, free, in_use, quarantined)

    @_never_raises
    def staging_slots(self, *, free: int, in_use: int, quarantined: int) -> None:
        """State of prefill's staging pool."""
        self._set_slots(specs.STAGING_SLOTS, free, in_use, quarantined)

    def _set_slots(self, spec: specs.MetricSpec, free: int, in_use: int, quarantined: int) -> None:
        self._gauge(spec, state=SlotState.IN_USE.value).set(in_use)
        self._gauge(spec, state=SlotState.FREE.value).set(free)
        self._gauge(spec, state=SlotState.QUARANTINED.value).set(quarantined)

    def _counter(self, spec: specs.MetricSpec, **labels: str) -> Counter:
        return self._families.counters[spec].labels(**self._labels, **labels)

    def _gauge(self, spec: specs.MetricSpec, **labels: str) -> Gauge:
        return self._families.gauges[spec].labels(**self._labels, **labels)

    def _histogram(self, spec: specs.MetricSpec, **labels: str) -> Histogram:
        return self._families.histograms[spec].labels(**self._labels, **labels)
