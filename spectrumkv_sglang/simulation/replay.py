"""Plays requests against a controller, or a fixed candidate, in virtual time.

A cluster is so many prefill ranks, each with a link of its own to decode. A request is computed on the rank that is
free first, then its KV waits for that rank's link, is packed, written and unpacked one stage after the other, and its
tokens are decoded. The controller is the one that serves; only its clock is the replay's.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from spectrumkv_sglang.simulation.traces import BandwidthTrace, Request
from spectrumkv_sglang.tuning.controller import Controller
from spectrumkv_sglang.tuning.decision import Ask, Decision, Measured
from spectrumkv_sglang.tuning.frontier import NATIVE, Candidate
from spectrumkv_sglang.tuning.request_limits import RequestLimits
from spectrumkv_sglang.tuning.settings import ControllerSettings

_DECODE = "decode"


@dataclass(frozen=True)
class Cluster:
    """What the requests run on.

    Attributes:
        prefill_ranks: each with a link of its own.
        prefill_tokens_per_second: of one rank.
        decode_seconds_per_token: of one request.
        kv_bytes_per_token: native.
        codec_speeds: S of each candidate by name, native bytes a second.
        chunk_seconds: what a transfer takes beside packing, writing and unpacking.
    """

    prefill_ranks: int
    prefill_tokens_per_second: float
    decode_seconds_per_token: float
    kv_bytes_per_token: float
    codec_speeds: dict[str, float]
    chunk_seconds: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """One request in a replay. Seconds: from its arrival to the end of its transfer, and to its last token."""

    candidate: Candidate
    ttft_s: float
    jct_s: float
    transfer_s: float
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
    ranks = [_Rank(link, cluster, candidates, safe, settings, min_tokens) for _ in range(cluster.prefill_ranks)]
    free = [(0.0, number) for number in range(len(ranks))]
    outcomes = []
    for request in requests:
        when, number = heapq.heappop(free)
        computed = max(when, request.arrival_s) + request.prompt_tokens / cluster.prefill_tokens_per_second
        heapq.heappush(free, (computed, number))
        outcomes.append(ranks[number].send(request, computed, fixed))
    native = sum(request.prompt_tokens for request in requests) * cluster.kv_bytes_per_token
    wire = sum(outcome.wire_bytes for outcome in outcomes)
    target = settings.ttft_target_s
    return ReplayResult(
        policy=fixed.name if fixed is not None else "controller",
        requests=len(outcomes),
        ttft_s=_percentiles([outcome.ttft_s for outcome in outcomes]),
        jct_s=_percentiles([outcome.jct_s for outcome in outcomes]),
        transfer_s=_percentiles([outcome.transfer_s for outcome in outcomes]),
        wire_bytes=wire,
        wire_share=wire / native,
        mean_kl=float(np.mean([outcome.candidate.kl for outcome in outcomes])),
        late=sum(target is not None and outcome.ttft_s > target for outcome in outcomes),
        switches=sum(rank.controller.counts.switches for rank in ranks),
        chosen=dict(Counter(outcome.candidate.name for outcome in outcomes).most_common()),
    )


class _Rank:
    """One prefill rank with its link, which sends one request after the other."""

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

    def send(self, request: Request, computed: float, fixed: Candidate | None) -> Outcome:
        """Send what was computed by second ``computed``."""
        cluster = self._cluster
        native = request.prompt_tokens * cluster.kv_bytes_per_token
        begin = self._now = max(computed, self._link_free)
        decision: Decision | None = None
        candidate = fixed
        if candidate is None:
            elapsed = begin - request.arrival_s
            ask = Ask(_DECODE, native, request.prompt_tokens, RequestLimits(), elapsed)
            decision = self.controller.decide(ask)
            candidate = decision.candidate
        wire = native * candidate.b
        codec = 0.0 if candidate is NATIVE else native / cluster.codec_speeds[candidate.name]
        written = self._link.seconds(wire, begin + codec / 2)
        seconds = cluster.chunk_seconds + codec + written
        self._now = self._link_free = begin + seconds
        if decision is not None:
            on_link = written if candidate is not NATIVE else written + cluster.chunk_seconds
            self.controller.link_sample(_DECODE, wire, on_link, candidate is NATIVE)
            self.controller.finished(decision, Measured(native, wire, seconds, codec / 2, codec / 2))
        ttft = self._now - request.arrival_s
        jct = ttft + request.output_tokens * cluster.decode_seconds_per_token
        return Outcome(candidate, ttft, jct, self._now - computed, wire)


def with_true_speeds(candidates: Sequence[Candidate], speed: float) -> dict[str, float]:
    """S of each candidate: what it states, else ``speed``, native bytes a second."""
    return {candidate.name: candidate.speed or speed for candidate in candidates}


def unknown_speeds(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates as a controller meets them that has measured nothing."""
    return [replace(candidate, speed=None) for candidate in candidates]


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {"mean": float(np.mean(values)), "p50": float(p50), "p90": float(p90), "p99": float(p99)}
