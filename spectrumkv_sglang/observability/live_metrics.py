"""Reads the /metrics of a running server: what a dashboard would see, at this moment."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections import defaultdict
from dataclasses import dataclass

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.observability.metric_specs import CONFIG_INFO, PREFIX, MetricSpec

TIMEOUT_SECONDS = 10.0


class LiveServerError(SpectrumKVError):
    """A server that does not answer, or whose /metrics cannot be read; says what to do."""


@dataclass(frozen=True)
class LiveSample:
    """One line of /metrics."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class LiveMetrics:
    """All samples of one server; ``url`` is its base address."""

    url: str
    samples: tuple[LiveSample, ...]

    @property
    def role(self) -> str:
        """ "prefill" or "decode", by the labels of SpectrumKV's metrics or else SGLang's; "" where none says."""
        for prefix in (PREFIX, "sglang:"):
            for sample in self.samples:
                if sample.name.startswith(prefix) and sample.labels.get("engine_type") in ("prefill", "decode"):
                    return sample.labels["engine_type"]
        return ""

    @property
    def has_spectrumkv(self) -> bool:
        """Whether the server runs a SpectrumKV backend."""
        return any(sample.name == CONFIG_INFO.full_name for sample in self.samples)

    def of(self, name: str, **labels: str) -> list[LiveSample]:
        """Samples of a full name with these labels."""
        wanted = labels.items()
        return [one for one in self.samples if one.name == name and wanted <= one.labels.items()]

    def total(self, spec: MetricSpec, suffix: str = "", **labels: str) -> float:
        """Sum over all ranks."""
        return sum(one.value for one in self.of(spec.full_name + suffix, **labels))

    def by_label(self, spec: MetricSpec, *names: str, suffix: str = "") -> dict[tuple[str, ...], float]:
        """Sums over all ranks by the values of some labels, without those that are 0."""
        found: dict[tuple[str, ...], float] = defaultdict(float)
        for one in self.of(spec.full_name + suffix):
            found[tuple(one.labels.get(name, "") for name in names)] += one.value
        return {key: value for key, value in sorted(found.items()) if value}

    def mean(self, spec: MetricSpec, **labels: str) -> float | None:
        """Mean of a histogram since the start, all ranks together; None before its first value."""
        count = self.total(spec, "_count", **labels)
        return self.total(spec, "_sum", **labels) / count if count else None


def parse_metrics(url: str, text: str) -> LiveMetrics:
    """From the text of /metrics.

    Raises:
        LiveServerError: it is no Prometheus text.
    """
    from prometheus_client.parser import text_string_to_metric_families

    try:
        samples = tuple(
            LiveSample(sample.name, dict(sample.labels), float(sample.value))
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        )
    except ValueError as error:
        raise LiveServerError(f"{url}/metrics is no Prometheus text: {error}") from error
    return LiveMetrics(url, samples)


def fetch_metrics(url: str) -> LiveMetrics:
    """Of the server at ``url``, its base address.

    Raises:
        LiveServerError: no answer within 10 s, an error, or no metrics.
    """
    base = url.rstrip("/").removesuffix("/metrics")
    return parse_metrics(base, fetch_text(f"{base}/metrics", hint="start the server with --enable-metrics"))


def fetch_text(url: str, *, hint: str) -> str:
    """Body of a GET request.

    Raises:
        LiveServerError: with ``hint`` where the server answered and has no such page.
    """
    if not url.startswith(("http://", "https://")):
        raise LiveServerError(f"{url}: expected an address such as http://host:30000")
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
            return str(answer.read().decode("utf-8"))
    except urllib.error.HTTPError as error:
        raise LiveServerError(f"{url}: HTTP {error.code}; {hint}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise LiveServerError(f"{url}: {reason}; is the server running, and is this its address?") from error
