"""What the transfer benchmark measures, and how its samples are put together: cases, medians, gains. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

UNLIMITED = 0.0
PLAIN, TUNED, PACKED = "plain", "plain-tuned", "native-packed"


class Status(str, Enum):
    """How a request ended."""

    OK = "ok"
    FAILED = "failed"
    TIMEOUT = "timeout"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Sample:
    """One request of one token; times in seconds, None where nothing was measured.

    Attributes:
        variant: name of the variant.
        rate_gbps: rate of the link in Gb/s, `UNLIMITED` for none.
        prompt_tokens: length of the prompt.
        ttft_seconds: request sent to answer received.
        link_bytes: bytes that left prefill's interface, headers included.
        cpu_seconds: CPU time of both servers' process trees.
        transfer_seconds: sum of the chunks' times, start to end: the transfer log's, or time in SGLang's
            ``send_kvcache``.
        wire_bytes: bytes sent for the KV, SpectrumKV's control messages included.
        native_bytes: size of the KV in the pool; None for SGLang's own backend.
        writes: Mooncake blocks.
        chunks: chunks of the request.
        pack_seconds, write_seconds, wait_seconds: sums over the payloads, which overlap; SpectrumKV's only.
        repeat: number of the repetition; -1 for the request that warms the servers up.
        status: how the request ended.
        error: why it is not `Status.OK`.
    """

    variant: str
    rate_gbps: float
    prompt_tokens: int
    ttft_seconds: float | None = None
    link_bytes: int | None = None
    cpu_seconds: float | None = None
    transfer_seconds: float | None = None
    wire_bytes: int | None = None
    native_bytes: int | None = None
    writes: int | None = None
    chunks: int | None = None
    pack_seconds: float | None = None
    write_seconds: float | None = None
    wait_seconds: float | None = None
    repeat: int = 0
    status: Status = Status.OK
    error: str | None = None


@dataclass(frozen=True)
class ServerCost:
    """Memory of one variant's servers. A decode that several variants share is counted for each of them.

    Attributes:
        variant: name of the variant.
        prefill_peak_rss_bytes, decode_peak_rss_bytes: largest resident sizes after the warm-up.
        prefill_gpu_bytes, decode_gpu_bytes: GPU memory; None without a GPU or where process ids are hidden.
    """

    variant: str
    prefill_peak_rss_bytes: int
    decode_peak_rss_bytes: int
    prefill_gpu_bytes: int | None
    decode_gpu_bytes: int | None


@dataclass(frozen=True)
class Row:
    """Medians of one variant in one case; None where no request succeeded or nothing is known.

    Attributes:
        of_plain, of_tuned: time to first token over that of plain Mooncake at its defaults, and tuned.
        transfer_of_plain, transfer_of_tuned: the same of the transfer time.
        packing_gain: tuned plain over native-packed, the time to first token; in the row of native-packed.
        quantisation_gain: native-packed over this variant, the time to first token; in the rows of fewer bytes.
        transfer_packing_gain, transfer_quantisation_gain: the same of the transfer time.
        b: wire bytes over the bytes of the KV in the model's own precision.
        failures: why requests did not succeed, each text once.
    """

    variant: str
    succeeded: int
    ttft_seconds: float | None = None
    transfer_seconds: float | None = None
    of_plain: float | None = None
    of_tuned: float | None = None
    transfer_of_plain: float | None = None
    transfer_of_tuned: float | None = None
    packing_gain: float | None = None
    quantisation_gain: float | None = None
    transfer_packing_gain: float | None = None
    transfer_quantisation_gain: float | None = None
    link_bytes: float | None = None
    wire_bytes: float | None = None
    b: float | None = None
    writes: float | None = None
    pack_seconds: float | None = None
    write_seconds: float | None = None
    wait_seconds: float | None = None
    cpu_seconds: float | None = None
    failures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """All variants on one link with one prompt length."""

    rate_gbps: float
    prompt_tokens: int
    rows: tuple[Row, ...]

    def row(self, variant: str) -> Row | None:
        """The variant's row, None if it was not tried."""
        return next((row for row in self.rows if row.variant == variant), None)


def samples_of(document: Mapping[str, Any]) -> list[Sample]:
    """Samples of a transfer.json, older ones too.

    Raises:
        ValueError: the document has no samples, or one has an unknown status.
    """
    found = document.get("samples")
    if not isinstance(found, list):
        raise ValueError("no list `samples` in the document: expected the transfer.json of benchmarks/transfer.py")
    known = {field.name for field in fields(Sample)}
    return [
        Sample(
            **{name: value for name, value in sample.items() if name in known and name != "status"},
            status=Status(sample.get("status", Status.OK.value)),
        )
        for sample in found
    ]


def cases_of(samples: Iterable[Sample]) -> list[Case]:
    """Group samples by link and prompt, slow links first, no limit last.

    The warm-up is left out unless it failed: then the variant is listed with what went wrong.
    """
    groups: dict[tuple[float, int], list[Sample]] = {}
    for sample in samples:
        if sample.repeat >= 0 or sample.status is not Status.OK:
            groups.setdefault((sample.rate_gbps, sample.prompt_tokens), []).append(sample)
    order = sorted(groups, key=lambda case: (case[0] or float("inf"), case[1]))
    return [Case(rate, prompt, _rows(groups[rate, prompt])) for rate, prompt in order]


def shortest_link_seconds(samples: Iterable[Sample], variant: str, prompt_tokens: int, rate_gbps: float) -> float:
    """Least time that a prompt's KV needs on the link, from the bytes of the variant's requests so far; 0 if unknown.

    Lets the benchmark leave out what cannot end before its time limit, which would cost the variant's servers.
    """
    if rate_gbps == UNLIMITED:
        return 0.0
    per_token = [
        sample.link_bytes / sample.prompt_tokens
        for sample in samples
        if sample.variant == variant and sample.status is Status.OK and sample.link_bytes
    ]
    return min(per_token, default=0.0) * prompt_tokens * 8 / (rate_gbps * 1e9)


def _rows(samples: Sequence[Sample]) -> tuple[Row, ...]:
    names = list(dict.fromkeys(sample.variant for sample in samples))
    plain, tuned, packed = (_of(samples, name) for name in (PLAIN, TUNED, PACKED))
    sizes = [sample.native_bytes for sample in samples if sample.native_bytes]
    sizes += [sample.wire_bytes for sample in (*plain, *tuned) if sample.wire_bytes]
    native_bytes = max(sizes, default=None)
    rows = []
    for name in names:
        own = _of(samples, name)
        ttft, transfer, wire = (_median(own, field) for field in ("ttft_seconds", "transfer_seconds", "wire_bytes"))
        fewer_bytes = name not in (PLAIN, TUNED, PACKED) and any(sample.native_bytes for sample in own)
        rows.append(
            Row(
                variant=name,
                succeeded=len(own),
                ttft_seconds=ttft,
                transfer_seconds=transfer,
                of_plain=_ratio(ttft, _median(plain, "ttft_seconds")),
                of_tuned=_ratio(ttft, _median(tuned, "ttft_seconds")),
                transfer_of_plain=_ratio(transfer, _median(plain, "transfer_seconds")),
                transfer_of_tuned=_ratio(transfer, _median(tuned, "transfer_seconds")),
                packing_gain=_ratio(_median(tuned, "ttft_seconds"), ttft) if name == PACKED else None,
                quantisation_gain=_ratio(_median(packed, "ttft_seconds"), ttft) if fewer_bytes else None,
                transfer_packing_gain=_ratio(_median(tuned, "transfer_seconds"), transfer) if name == PACKED else None,
                transfer_quantisation_gain=(
                    _ratio(_median(packed, "transfer_seconds"), transfer) if fewer_bytes else None
                ),
                link_bytes=_median(own, "link_bytes"),
                wire_bytes=wire,
                b=_ratio(wire, native_bytes),
                writes=_median(own, "writes"),
                pack_seconds=_median(own, "pack_seconds"),
                write_seconds=_median(own, "write_seconds"),
                wait_seconds=_median(own, "wait_seconds"),
                cpu_seconds=_median(own, "cpu_seconds"),
                failures=_failures(samples, name),
            )
        )
    return tuple(rows)


def _of(samples: Sequence[Sample], variant: str) -> list[Sample]:
    return [sample for sample in samples if sample.variant == variant and sample.status is Status.OK]


def _failures(samples: Sequence[Sample], variant: str) -> tuple[str, ...]:
    """What went wrong, with the number of requests for each text."""
    texts = [
        f"{'warm-up ' if sample.repeat < 0 else ''}{sample.status.value}: {sample.error}"
        for sample in samples
        if sample.variant == variant and sample.status is not Status.OK
    ]
    return tuple(f"{text} ({texts.count(text)} x)" for text in dict.fromkeys(texts))


def _median(samples: Sequence[Sample], field: str) -> float | None:
    values = [getattr(sample, field) for sample in samples]
    known = [value for value in values if value is not None]
    return float(statistics.median(known)) if known else None


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None
