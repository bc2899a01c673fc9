"""Plays requests against a controller, or a fixed candidate, in virtual time.

A cluster is so many prefill ranks, each with a link of its own to decode. A request is computed on the rank that is
free first, in chunks; each chunk is sent while the next one is computed, as soon as the rank's link is free. A chunk
travels as payloads that are packed, written and unpacked side by side (``link_model.pipelined_seconds``), and its
request's tokens are decoded when the last one has arrived. The controller is the one that serves; only its clock is the
replay's.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from spectrumkv_sglang.simulation.traces import BandwidthTrace, Request
from spectrumkv_sglang.tuning.controller import Controller
from spectrumkv_sglang.tuning.decision import Ask, Decision, Measured
from spectrumkv_sglang.tuning.frontier import NATIVE, Candidate
from spectrumkv_sglang.tuning.link_model import DEFAULT_PAYLOAD_BYTES, NO_FIXED_COST, FixedCost
from spectrumkv_sglang.tuning.request_limits import RequestLimits
from spectrumkv_sglang.tuning.settings import ControllerSettings

_DECODE = "decode"


@dataclass(frozen=True)
class CodecSpeed:
    """Native bytes a second that a candidate is packed and unpacked with."""

    pack: float
    unpack: float

    @classmethod
    def even(cls, speed: float) -> CodecSpeed:
        """Of S = ``speed``, half of the time packing and half of it unpacking."""
        return cls(2 * speed, 2 * speed)


@dataclass(frozen=True)
class Cluster:
    """What the requests run on.

    Attributes:
        prefill_ranks: each with a link of its own.
        prefill_tokens_per_second: of one rank.
        decode_seconds_per_token: of one request.
        kv_bytes_per_token: native.
        codecs: of each candidate by name.
        fixed: what nothing hides, of a chunk and of a payload that we pack.
        native_chunk_seconds: of a chunk on SGLang's own path, beside its bytes.
        payload_bytes: largest payload on the wire, SpectrumKV's ``slot_bytes``.
        chunk_tokens: of a chunk, SGLang's ``--chunked-prefill-size``; infinite: a prompt is one.
        overlap: speed of a transfer while its rank computes later chunks of the request, as a share of its full speed.
    """

    prefill_ranks: int
    prefill_tokens_per_second: float
    decode_seconds_per_token: float
    kv_bytes_per_token: float
    codecs: dict[str, CodecSpeed]
    fixed: FixedCost = NO_FIXED_COST
    native_chunk_seconds: float = 0.0
    payload_bytes: float = DEFAULT_PAYLOAD_BYTES
    chunk_tokens: float = math.inf
    overlap: float = 1.0


@dataclass(frozen=True)
class Outcome:
    """One request in a replay; seconds.

    Attributes:
        candidate: that it took.
        ttft_s: from its arrival to the end of its transfer.
        jct_s: to its last token.
        transfer_s: from the end of its prefill to the end of its transfer.
        sending_s: its chunks, each from start to end, added up, as the transfer log has them.
    """

    candidate: Candidate
    ttft_s: float
    jct_s: float
    transfer_s: float
    sending_s: float
    wire_bytes: float


@dataclass(frozen=True)
class ReplayResult:
    """What a policy came to.

    Attributes:
        policy: name of the candidate that all requests took, or "controller".
        wire_share: wire bytes over native bytes.
        mean_kl: accuracy spent, mean over the requests, nats a token.
        chosen: requests by candidate.
        late: requests over the TTFT target.
    """

    policy: str
    requests: int
    ttft_s: dict[str, float]
    jct_s: dict[str, float]
    transfer_s: dict[str, float]
    sending_s: dict[str, float]
    wire_bytes: float
    wire_share: float
    mean_kl: float
    late: int
    switches: int
    chosen: dict[str, int]


def replay(
    requests: Sequence[Request],
    link: BandwidthTrace,
    cluster: Cluster,
    candidates: Sequence[Candidate],
    safe: Candidate,
    settings: ControllerSettings,
    *,
    fixed: Candidate | None = None,
    min_tokens: int = 0,
) -> ReplayResult:
    """Send ``requests`` as the controller chooses, or all of them as ``fixed``."""
    ranks, outcomes = _play(requests, link, cluster, candidates, safe, settings, fixed, min_tokens)
    native = sum(request.prompt_tokens for request in requests) * cluster.kv_bytes_per_token
    wire = sum(outcome.wire_bytes for outcome in outcomes)
    target = settings.ttft_target_s
    return ReplayResult(
        policy=fixed.name if fixed is not None else "controller",
        requests=len(outcomes),
        ttft_s=_percentiles([outcome.ttft_s for outcome in outcomes]),
        jct_s=_percentiles([outcome.jct_s for outcome in outcomes]),
        transfer_s=_percentiles([outcome.transfer_s for outcome in outcomes]),
        sending_s=_percentiles([outcome.sending_s for outcome in outcomes]),
        wire_bytes=wire,
        wire_share=wire / native,
        mean_kl=float(np.mean([outcome.candidate.kl for outcome in outcomes])),
        late=sum(target is not None and outcome.ttft_s > target for outcome in outcomes),
        switches=sum(rank.controller.counts.switches for rank in ranks),
        chosen=dict(Counter(outcome.candidate.name for outcome in outcomes).most_common()),
    )


def outcomes_of(
    requests: Sequence[Request],
    link: BandwidthTrace,
    cluster: Cluster,
    candidates: Sequence[Candidate],
    safe: Candidate,
    settings: ControllerSettings,
    *,
    fixed: Candidate | None = None,
    min_tokens: int = 0,
) -> list[Outcome]:
    """What became of each request; as `replay`."""
    return _play(requests, link, cluster, candidates, safe, settings, fixed, min_tokens)[1]


def _play(
    requests: Sequence[Request],
    link: BandwidthTrace,
    cluster: Cluster,
    candidates: Sequence[Candidate],
    safe: Candidate,
    settings: ControllerSettings,
    fixed: Candidate | None,
    min_tokens: int,
) -> tuple[list[_Rank], list[Outcome]]:
    ranks = [_Rank(link, cluster, candidates, safe, settings, min_tokens) for _ in range(cluster.prefill_ranks)]
    free = [(0.0, number) for number in range(len(ranks))]
    outcomes = []
    for request in requests:
        when, number = heapq.heappop(free)
        begin = max(when, request.arrival_s)
        heapq.heappush(free, (begin + request.prompt_tokens / cluster.prefill_tokens_per_second, number))
        outcomes.append(ranks[number].send(request, begin, fixed))
    return ranks, outcomes


class _Rank:
    """One prefill rank with its link, which sends one chunk after the other."""

    def __init__(
        self,
        link: BandwidthTrace,
        cluster: Cluster,
        candidates: Sequence[Candidate],
        safe: Candidate,
        settings: ControllerSettings,
        min_tokens: int,
    ) -> None:
        self._link, self._cluster = link, cluster
        self._now = 0.0
        self._link_free = 0.0
        self.controller = Controller(candidates, safe, settings, min_tokens=min_tokens, clock=lambda: self._now)

    def send(self, request: Request, begin: float, fixed: Candidate | None) -> Outcome:
        """Compute from second ``begin`` on, and send chunk by chunk."""
        cluster, tokens = self._cluster, request.prompt_tokens
        native = tokens * cluster.kv_bytes_per_token
        chunks = max(1, math.ceil(tokens / cluster.chunk_tokens))
        computed = [begin + min(tokens, (i + 1) * cluster.chunk_tokens) / cluster.prefill_tokens_per_second
                    for i in range(chunks)]  # fmt: skip
        sizes = np.diff([0.0, *(min(tokens, (i + 1) * cluster.chunk_tokens) for i in range(chunks))])
        self._now = max(computed[0], self._link_free)
        decision: Decision | None = None
        candidate = fixed
        if candidate is None:
            ask = Ask(_DECODE, native, tokens, RequestLimits(), self._now - request.arrival_s)
            decision = self.controller.decide(ask)
            candidate = decision.candidate
        sending = 0.0
        for ready, size in zip(computed, sizes.tolist(), strict=True):
            started = max(ready, self._link_free)
            seconds, written = self._chunk_seconds(candidate, size * cluster.kv_bytes_per_token, started)
            if started < computed[-1]:
                slowed = self._slowed(seconds, computed[-1] - started)
                seconds, written = slowed, written * slowed / seconds
            self._now = self._link_free = started + seconds
            sending += seconds
            if decision is not None:
                wire = size * cluster.kv_bytes_per_token * candidate.b
                self.controller.link_sample(_DECODE, wire, written, candidate is NATIVE)
        if decision is not None:
            codec = cluster.codecs.get(candidate.name)
            packed, unpacked = (
                (native / codec.pack, native / codec.unpack) if codec and candidate is not NATIVE else (0, 0)
            )
            self.controller.finished(decision, Measured(native, native * candidate.b, sending, packed, unpacked))
        ttft = self._now - request.arrival_s
        jct = ttft + request.output_tokens * cluster.decode_seconds_per_token
        return Outcome(candidate, ttft, jct, self._now - computed[-1], sending, native * candidate.b)

    def _slowed(self, seconds: float, computing: float) -> float:
        """``seconds`` of a transfer when the rank computes during the first ``computing`` of them."""
        done = computing * self._cluster.overlap
        return seconds / self._cluster.overlap if done >= seconds else computing + seconds - done

    def _chunk_seconds(self, candidate: Candidate, native: float, started: float) -> tuple[float, float]:
        """Seconds of a chunk from second ``started`` on, and those in which the link is busy with it."""
        cluster = self._cluster
        if candidate is NATIVE:
            seconds = self._link.seconds(native, started) + cluster.native_chunk_seconds
            return seconds, seconds
        wire = native * candidate.b
        payloads = max(1, math.ceil(wire / cluster.payload_bytes))
        speed = cluster.codecs[candidate.name]
        pack, unpack = native / payloads / speed.pack, native / payloads / speed.unpack
        written = self._link.seconds(wire, started + pack)
        slowest = max(pack, written / payloads, unpack)
        seconds = pack + written / payloads + unpack + (payloads - 1) * slowest
        return seconds + cluster.fixed.of(1, payloads), written


def with_true_speeds(candidates: Sequence[Candidate], speed: float) -> dict[str, CodecSpeed]:
    """Speeds of each candidate: the S that it states, else ``speed``, native bytes a second."""
    return {candidate.name: CodecSpeed.even(candidate.speed or speed) for candidate in candidates}


def unknown_speeds(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates as a controller meets them that has measured nothing."""
    return [replace(candidate, speed=None) for candidate in candidates]


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {"mean": float(np.mean(values)), "p50": float(p50), "p90": float(p90), "p99": float(p99)}
