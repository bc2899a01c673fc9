"""What the link model is fed with: codecs from the measured kernels, transfers from the measured pairs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transfer_samples import PLAIN, TUNED, UNLIMITED, Sample, Status, cases_of, samples_of

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.tuning.fixed_cost import MeasuredTransfer, fit_fixed_cost
from spectrumkv_sglang.tuning.link_model import (
    DEFAULT_PAYLOAD_BYTES,
    Codec,
    FixedCost,
    Transfer,
    bytes_per_second,
)

PROFILES = {
    "native-packed": "native-packed",
    "int8": "int8",
    "spectrum-0.5": "spectrum 20/30/50",
    "spectrum-0.35": "spectrum 5/25/70",
    "spectrum-0.28": "spectrum 1/2/97",
    "near-lossless-0.5": "near-lossless 8/0/92",
    "balanced-0.3": "balanced 1/11/88",
    "aggressive-0.2": "aggressive 1/17/82",
}
"""The kernels' measurement that stands for a variant of the transfers."""


DEFAULT_SLOT_MIB = DEFAULT_PAYLOAD_BYTES // 2**20


class PointsError(SpectrumKVError):
    """A file lacks what the model needs."""


@dataclass(frozen=True)
class Point:
    """One variant on one limited link with one prompt: the median of its requests."""

    variant: str
    rate_gbps: float
    prompt_tokens: int
    measured: MeasuredTransfer


@dataclass(frozen=True)
class Prediction:
    """A point, and what the model says of it when fitted without the points of its link."""

    point: Point
    seconds: float

    @property
    def relative_error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.seconds / self.point.measured.seconds - 1.0


def codecs_of(
    document: Mapping[str, Any], model: str, page_size: int = 1, slot_mib: int = DEFAULT_SLOT_MIB
) -> dict[str, Codec]:
    """Codec of every variant for a model's shape, from the output of benchmarks/kernels.py (or gpu.json).

    The host's time is that of queueing a payload that just fits into a slot of ``slot_mib``; where that was not
    measured, that of the whole chunk, an upper bound.

    Raises:
        PointsError: the document has no measurement of this shape.
    """
    kernels = document["kernels"] if isinstance(document.get("kernels"), dict) else document
    measured = {
        entry["profile"]: entry
        for entry in kernels.get("kernels", [])
        if entry["model"] == model and entry["page_size"] == page_size
    }
    missing = sorted(set(PROFILES.values()) - set(measured))
    if missing:
        raise PointsError(f"no kernels of {model}, page size {page_size}, for {', '.join(missing)} in the kernels file")
    codecs = {}
    for variant, profile in PROFILES.items():
        entry = measured[profile]
        seconds = entry["seconds"]
        host = next((one for one in entry.get("payloads", ()) if one["slot_mib"] == slot_mib), entry["steady_state"])
        codecs[variant] = Codec(
            b=entry["b"],
            pack_bytes_per_second=entry["pool_bytes"] / seconds["pack"],
            unpack_bytes_per_second=entry["pool_bytes"] / seconds["verified_unpack"],
            pack_host_seconds=host["pack"]["host_seconds"],
            unpack_host_seconds=host["unpack"]["host_seconds"],
        )
    return codecs


def pool_bytes_per_token(document: Mapping[str, Any], model: str) -> float:
    """Bytes of KV of one token in the pool, by the kernels' measurement."""
    kernels = document["kernels"] if isinstance(document.get("kernels"), dict) else document
    sizes = {entry["pool_bytes"] / kernels["tokens"] for entry in kernels["kernels"] if entry["model"] == model}
    return float(sizes.pop())


def transfers_of(
    documents: Iterable[Mapping[str, Any]], goodput_share: float
) -> tuple[list[Sample], dict[float, float]]:
    """Samples of transfer.json files and the goodput in Gb/s of every limited link.

    ``goodput_share`` is used for a link whose goodput was not measured in the run.
    """
    samples, goodput = [], {}
    for document in documents:
        found = samples_of(document)
        samples += found
        known = {float(rate): value for rate, value in document.get("goodput_gbps", {}).items()}
        for rate in {sample.rate_gbps for sample in found} - {UNLIMITED}:
            goodput[rate] = known.get(rate, rate * goodput_share)
    return samples, goodput


def points_of(
    samples: Sequence[Sample],
    goodput: Mapping[float, float],
    codecs: Mapping[str, Codec],
    chunk_tokens: int,
) -> tuple[list[Point], dict[str, int]]:
    """Points that the model can be held against, and why samples were left out (reason: how many).

    Raises:
        PointsError: none is left.
    """
    excluded: dict[str, int] = {}
    usable = []
    for sample in samples:
        reason = _reason_to_exclude(sample, codecs, chunk_tokens)
        if reason is None:
            usable.append(sample)
        else:
            excluded[reason] = excluded.get(reason, 0) + 1
    points = []
    for case in cases_of(usable):
        for row in case.rows:
            one = next(s for s in usable if (s.variant, s.rate_gbps, s.prompt_tokens)
                       == (row.variant, case.rate_gbps, case.prompt_tokens))  # fmt: skip
            if row.transfer_seconds is None or not (one.wire_bytes and one.native_bytes and one.writes):
                continue
            # Samples of one case and variant differ in their times only.
            measured = MeasuredTransfer(
                transfer=Transfer(one.native_bytes, 1, one.writes),
                bandwidth=bytes_per_second(goodput[case.rate_gbps]),
                codec=replace(codecs[row.variant], b=one.wire_bytes / one.native_bytes),
                seconds=row.transfer_seconds,
            )
            points.append(Point(row.variant, case.rate_gbps, case.prompt_tokens, measured))
    if not points:
        raise PointsError(f"no transfer that the model can be held against; left out: {excluded or 'nothing'}")
    return points, excluded


def cross_validated(points: Sequence[Point]) -> list[Prediction]:
    """Predict every point with a cost fitted to the points of other links; of other variants if there is one link."""
    by_rate = len({point.rate_gbps for point in points}) > 1
    predictions = []
    for point in points:
        others = [
            other.measured
            for other in points
            if (other.rate_gbps != point.rate_gbps if by_rate else other.variant != point.variant)
        ]
        fixed = fit_fixed_cost(others) if others else FixedCost()
        predictions.append(Prediction(point, point.measured.predicted(fixed)))
    return predictions


def plain_overheads(samples: Sequence[Sample], goodput: Mapping[float, float]) -> dict[str, list[tuple[Sample, float]]]:
    """What plain Mooncake's transfers took beyond V / B on limited links, in seconds, by variant."""
    found: dict[str, list[tuple[Sample, float]]] = {}
    for sample in samples:
        usable = sample.status is Status.OK and sample.repeat >= 0 and sample.rate_gbps != UNLIMITED
        if usable and sample.variant in (PLAIN, TUNED) and sample.transfer_seconds and sample.wire_bytes:
            over = sample.transfer_seconds - sample.wire_bytes / bytes_per_second(goodput[sample.rate_gbps])
            found.setdefault(sample.variant, []).append((sample, over))
    return found


def packing_seconds(samples: Sequence[Sample]) -> dict[str, float]:
    """Median time that packing one payload took in the pairs, staging and its wait for the GPU included, by variant."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        if sample.status is Status.OK and sample.repeat >= 0 and sample.pack_seconds and sample.writes:
            found.setdefault(sample.variant, []).append(sample.pack_seconds / sample.writes)
    return {variant: statistics.median(seconds) for variant, seconds in found.items()}


def _reason_to_exclude(sample: Sample, codecs: Mapping[str, Codec], chunk_tokens: int) -> str | None:
    if sample.status is not Status.OK:
        return f"no transfer: {sample.status.value}"
    if sample.repeat < 0:
        return "warm-up"
    if sample.variant not in codecs:
        return "not packed by SpectrumKV (plain, fp8-kv)"
    if sample.transfer_seconds is None:
        return "no transfer time"
    if (sample.chunks or math.ceil(sample.prompt_tokens / chunk_tokens)) > 1:
        return "several chunks: all but the last share GPU and host with the next chunk's forward"
    if sample.rate_gbps == UNLIMITED:
        return "no limit: bound by the host, not by a link of known bandwidth"
    return None
