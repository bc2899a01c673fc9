"""The metrics by name: what each counts, in which unit, by which labels.

Every metric also carries the labels that SGLang puts on its own scheduler metrics (`PROCESS_LABELS`), so that one
dashboard variable filters both. docs/metrics.md describes the same list for operators; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

PREFIX = "spectrumkv:"
PROCESS_LABELS = ("model_name", "engine_type", "tp_rank", "pp_rank", "dp_rank")

# From a kernel launch to SGLang's longest transfer timeout.
STAGE_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
# Past 1: framing that outweighs a short chunk's saving.
BUDGET_RATIO = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8, 0.9, 1.0, 1.05, 1.25)


class Kind(str, Enum):
    """Prometheus type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class MetricSpec:
    """One metric: `name` without the prefix, help text, own labels and, for a histogram, its upper bucket bounds."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = field(default=(), repr=False)

    @property
    def full_name(self) -> str:
        """Name as SGLang's /metrics shows it."""
        return PREFIX + self.name


NATIVE_BYTES = MetricSpec(
    "native_bytes_total", Kind.COUNTER, "Bytes that the KV of the sent chunks takes in the pool.", ("path",)
)
WIRE_BYTES = MetricSpec(
    "wire_bytes_total",
    Kind.COUNTER,
    "Bytes sent for the KV of the chunks: codes, scales, tier maps, headers and padding.",
    ("path",),
)
TOKENS = MetricSpec("tokens_total", Kind.COUNTER, "Tokens sent, by the tier they travelled in.", ("tier",))
CHUNKS = MetricSpec("chunks_total", Kind.COUNTER, "Chunks sent, by path and reason.", ("path", "reason"))
SUBCHUNKS = MetricSpec("subchunks_total", Kind.COUNTER, "Sub-chunks sent, one landing slot each.")
MOONCAKE_WRITES = MetricSpec("mooncake_writes_total", Kind.COUNTER, "Mooncake writes made for tiered chunks.")
FAILURES = MetricSpec("failures_total", Kind.COUNTER, "Tiered chunks that failed, by cause.", ("cause",))
BUDGET_UNREACHABLE = MetricSpec(
    "budget_unreachable_total", Kind.COUNTER, "Rooms sent above the budget because no allowed tier is small enough."
)
CONTROL_REJECTED = MetricSpec(
    "control_messages_rejected_total", Kind.COUNTER, "Control messages thrown away, by kind.", ("kind",)
)
TRANSFER_LOG_ERRORS = MetricSpec("transfer_log_errors_total", Kind.COUNTER, "Lines lost by the transfer log.")

PACK_SECONDS = MetricSpec(
    "pack_seconds", Kind.HISTOGRAM, "Seconds that the device packs one sub-chunk on prefill.", buckets=STAGE_SECONDS
)
WRITE_SECONDS = MetricSpec(
    "write_seconds", Kind.HISTOGRAM, "Seconds of the Mooncake write of one sub-chunk.", buckets=STAGE_SECONDS
)
UNPACK_SECONDS = MetricSpec(
    "unpack_seconds", Kind.HISTOGRAM, "Seconds to check and unpack one sub-chunk on decode.", buckets=STAGE_SECONDS
)
WAIT_SECONDS = MetricSpec(
    "wait_seconds", Kind.HISTOGRAM, "Seconds that a chunk waited, by what for.", ("wait",), STAGE_SECONDS
)
TRANSFER_SECONDS = MetricSpec(
    "transfer_seconds", Kind.HISTOGRAM, "Seconds from a chunk's start to its end, by path.", ("path",), STAGE_SECONDS
)
ACHIEVED_BUDGET = MetricSpec(
    "achieved_budget_ratio", Kind.HISTOGRAM, "Wire bytes over native bytes of each tiered chunk.", buckets=BUDGET_RATIO
)

LANDING_SLOTS = MetricSpec("landing_slots", Kind.GAUGE, "Landing slots on decode, by state.", ("state",))
STAGING_SLOTS = MetricSpec("staging_slots", Kind.GAUGE, "Staging slots on prefill, by state.", ("state",))
PROBE_STATE = MetricSpec(
    "probe_state", Kind.GAUGE, "1 for what the probe's record is worth for the served model, else 0.", ("state",)
)
CONFIG_INFO = MetricSpec(
    "config_info",
    Kind.GAUGE,
    "Always 1; the labels say which version and settings the process runs with.",
    ("version", "profile", "budget", "allowed_tiers", "scorer", "control_secret", "enabled"),
)
TRANSPORT_INFO = MetricSpec(
    "transport_info",
    Kind.GAUGE,
    "Always 1; the labels say how Mooncake moves bytes, and what each of its tuning variables is set to.",
    ("transport", "variable", "value"),
)

CODEC_PAYLOADS = MetricSpec(
    "codec_payloads_total", Kind.COUNTER, "Payloads that met the lossless codec, by what it did.", ("outcome",)
)
CODEC_BYTES = MetricSpec(
    "codec_bytes_total", Kind.COUNTER, "Bytes of compressed payloads, before and after.", ("side",)
)
CODEC_SECONDS = MetricSpec(
    "codec_seconds", Kind.HISTOGRAM, "Seconds to compress one payload on prefill.", buckets=STAGE_SECONDS
)

DECISIONS = MetricSpec(
    "controller_decisions_total",
    Kind.COUNTER,
    "Rooms that the controller decided for, by what it chose and why.",
    ("candidate", "reason"),
)
SWITCHES = MetricSpec(
    "controller_switches_total", Kind.COUNTER, "Decisions that left the candidate in use for a faster one."
)
VIOLATIONS = MetricSpec(
    "controller_violations_total", Kind.COUNTER, "Rooms whose transfer took longer than their TTFT target left for it."
)
REFUSED_SAMPLES = MetricSpec(
    "controller_refused_samples_total", Kind.COUNTER, "Measurements that the controller refused as absurd."
)
BANDWIDTH = MetricSpec(
    "controller_bandwidth_bytes_per_second",
    Kind.GAUGE,
    "Estimated goodput to the decode ranks whose link is known: the least and the median.",
    ("stat",),
)

METRICS: tuple[MetricSpec, ...] = (
    NATIVE_BYTES,
    WIRE_BYTES,
    TOKENS,
    CHUNKS,
    SUBCHUNKS,
    MOONCAKE_WRITES,
    FAILURES,
    BUDGET_UNREACHABLE,
    CONTROL_REJECTED,
    TRANSFER_LOG_ERRORS,
    PACK_SECONDS,
    WRITE_SECONDS,
    UNPACK_SECONDS,
    WAIT_SECONDS,
    TRANSFER_SECONDS,
    ACHIEVED_BUDGET,
    LANDING_SLOTS,
    STAGING_SLOTS,
    PROBE_STATE,
    CONFIG_INFO,
    TRANSPORT_INFO,
    CODEC_PAYLOADS,
    CODEC_BYTES,
    CODEC_SECONDS,
    DECISIONS,
    SWITCHES,
    VIOLATIONS,
    REFUSED_SAMPLES,
    BANDWIDTH,
)
