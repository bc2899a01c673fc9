"""The controller at work in a prefill rank: one decision for each request and decode rank, and what came of it.

A decision is taken at a request's first chunk and holds for all of its chunks, so that its budget does. It lies in the
request itself (`outgoing_request`), never under a room id.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from spectrumkv_sglang.observability.metrics import TransferMetrics
from spectrumkv_sglang.observability.once import log_once
from spectrumkv_sglang.observability.reasons import Reason
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.transfer.errors import GoNativeError
from spectrumkv_sglang.transfer.handshake import Handshake
from spectrumkv_sglang.transfer.outgoing_request import ChunkCost, DecidedRoom, OutgoingRequest
from spectrumkv_sglang.transfer.pool_view import PoolView
from spectrumkv_sglang.transfer.sending_policy import SendingPolicy, ServedCandidates
from spectrumkv_sglang.transfer.tier_agreement import forbidden_in
from spectrumkv_sglang.tuning.bandwidth import LinkClock
from spectrumkv_sglang.tuning.controller import Controller
from spectrumkv_sglang.tuning.decision import Ask, Counts, Decision, Measured
from spectrumkv_sglang.tuning.frontier import NATIVE, Candidate
from spectrumkv_sglang.tuning.own_candidate import NATIVE_PACKED
from spectrumkv_sglang.tuning.request_limits import read_limits
from spectrumkv_sglang.tuning.settings import ControllerSettings

logger = logging.getLogger(__name__)

_MOST_PEER_RULES = 256
PACKED = Candidate(NATIVE_PACKED, b=1.0, kl=0.0)
"""What a prompt under ``min_tokens`` travels as."""


@dataclass
class NativeTiming:
    """SGLang's own sending of one chunk; ``seconds`` are there when it has ended."""

    succeeded: bool = False
    seconds: float = 0.0


class RoomDecisions:
    """Asks the controller and tells it what transfers took. Thread-safe.

    Args:
        served: the candidates that this rank may use.
        min_tokens: shorter prompts travel packed at native precision.
    """

    def __init__(
        self,
        served: ServedCandidates,
        settings: ControllerSettings,
        view: PoolView,
        *,
        min_tokens: int,
        metrics: TransferMetrics,
    ) -> None:
        self._served, self._settings, self._metrics = served, settings, metrics
        self.controller = Controller(served.candidates, served.safe, settings, short=PACKED, min_tokens=min_tokens)
        self.clock = LinkClock(self.controller.link_sample)
        self._tables: dict[str, tuple[PrecisionTable, list[int]]] = {
            name: (policy.table(view), [int(tier) for tier in policy.usable_tiers])
            for name, policy in served.policies.items()
        }
        self._forbidden: dict[tuple[tuple[int, ...], bool], frozenset[str]] = {}
        self._lock = threading.Lock()
        self._told = Counts()

    @property
    def dry_run(self) -> bool:
        """Whether decisions are only told, and everything travels natively."""
        return self._settings.dry_run

    def require_tiered(self, decision: Decision) -> SendingPolicy | None:
        """What a chunk of the decided room is planned by; None: by what is configured.

        GoNativeError: it was decided for SGLang's own path, or decisions are only told.
        """
        if self.dry_run:
            name, why = decision.candidate.name, decision.reason.value
            raise GoNativeError(Reason.DRY_RUN, f"the controller would send {name} ({why})")
        if decision.candidate is NATIVE:
            raise GoNativeError(Reason.BYPASS, decision.reason.meaning)
        return self._served.policies.get(decision.candidate.name)

    def expect(self, room: int, parameters: Any) -> OutgoingRequest:
        """A request that came and will be sent as ``room``; ``parameters``: what it carries for this package."""
        limits = read_limits(parameters)
        if limits.problem:
            log_once(
                logger,
                logging.WARNING,
                "controller-bad-request",
                f"room {room} gets the safe candidate, its custom parameter `spectrumkv` was not understood: "
                f"{limits.problem}",
            )
        return OutgoingRequest(limits)

    def decide(
        self, request: OutgoingRequest, session: str, peer: Handshake, *, prompt_tokens: int, native_bytes: int
    ) -> Decision:
        """The decision for a chunk of ``request``: that of its first chunk to this rank.

        Args:
            session: decode rank that the chunk goes to.
            prompt_tokens: length of the whole prompt, or an upper bound.
            native_bytes: of the whole room.
        """
        known = request.decided.get(session)
        if known is not None:
            return known.decision
        decision = self.controller.decide(
            Ask(
                session,
                native_bytes,
                prompt_tokens,
                request.limits,
                time.monotonic() - request.came,
                self._forbidden_by(peer),
            )
        )
        request.decided[session] = DecidedRoom(decision)
        self._metrics.decision(decision.candidate.name, decision.reason)
        logger.debug("a room to %s: %s", session, decision)
        return decision

    @contextmanager
    def sending(self, request: OutgoingRequest, session: str, *, last: bool) -> Iterator[ChunkCost]:
        """Around the sending of one chunk, by whichever path; what it took is left in the cost that this yields."""
        cost, load, began = ChunkCost(), self.controller.sending(session), time.monotonic()
        try:
            yield cost
        finally:
            try:
                mean_load = (load + self.controller.sent(session)) / 2
                self._add(request, session, cost, mean_load, time.monotonic() - began, last)
            except Exception:  # the chunk was sent, whatever became of the books
                logger.exception("the controller did not learn from a transfer to %s", session)

    @contextmanager
    def timed_native(self, session: str, size: int) -> Iterator[NativeTiming]:
        """Around SGLang's own sending of ``size`` bytes."""
        timing, began = NativeTiming(), time.monotonic()
        self.clock.started(session, size, began, native=True)
        try:
            yield timing
        finally:
            ended = time.monotonic()
            timing.seconds = ended - began
            if timing.succeeded:
                self.clock.ended(session, size, ended, ended)
            else:
                self.clock.failed(session, size)

    def _add(
        self, request: OutgoingRequest, session: str, cost: ChunkCost, load: float, elapsed: float, last: bool
    ) -> None:
        found = request.decided.get(session)
        if found is None:
            return
        found.as_decided = found.as_decided and cost.as_decided
        found.loads.append(load)
        found.elapsed += elapsed
        total = found.total
        total.native_bytes += cost.native_bytes
        total.wire_bytes += cost.wire_bytes
        total.seconds += cost.seconds
        total.pack_s += cost.pack_s
        total.unpack_s += cost.unpack_s
        if not last:
            return
        del request.decided[session]
        if found.as_decided:
            decision = found.decision
            if self.dry_run:
                decision = replace(decision, candidate=NATIVE, allowance_s=None)
            mean = sum(found.loads) / len(found.loads)
            self.controller.finished(
                decision,
                Measured(total.native_bytes, total.wire_bytes, total.seconds, total.pack_s, total.unpack_s, mean),
            )
        else:
            self.controller.fell_back(found.decision, found.elapsed)
        self._tell()

    def _tell(self) -> None:
        """Bring the metrics up to what the controller counted."""
        bandwidths = self.controller.bandwidths()
        with self._lock:  # another thread's counts must not come between
            counts = self.controller.counts
            told, self._told = self._told, counts
        self._metrics.controller(
            switches=counts.switches - told.switches,
            violations=counts.violations - told.violations,
            refused_samples=counts.refused_samples - told.refused_samples,
            bandwidths=bandwidths,
        )

    def _forbidden_by(self, peer: Handshake) -> frozenset[str]:
        """Candidates that ``peer`` would refuse, or send natively for."""
        key = (tuple(sorted(int(tier) for tier in peer.allowed_tiers)), bool(peer.knows_rotation))
        found = self._forbidden.get(key)
        if found is None:
            found = frozenset(
                name
                for name, (table, tiers) in self._tables.items()
                if forbidden_in(table, tiers, key[0]) or (table.needs_rotation and not key[1])
            )
            if len(self._forbidden) < _MOST_PEER_RULES:
                self._forbidden[key] = found
        return found
