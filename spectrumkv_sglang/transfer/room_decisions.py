"""The controller at work in a prefill rank: one decision for each room, and what came of it.

A decision is taken at a room's first chunk and holds for all of its chunks, so that its budget does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from spectrumkv_sglang.observability.metrics import TransferMetrics
from spectrumkv_sglang.observability.once import log_once
from spectrumkv_sglang.observability.reasons import Reason
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.transfer.errors import GoNativeError
from spectrumkv_sglang.transfer.handshake import Handshake
from spectrumkv_sglang.transfer.pool_view import PoolView
from spectrumkv_sglang.transfer.sending_policy import SendingPolicy, ServedCandidates
from spectrumkv_sglang.transfer.tier_agreement import forbidden_in
from spectrumkv_sglang.tuning.bandwidth import LinkClock
from spectrumkv_sglang.tuning.controller import Controller
from spectrumkv_sglang.tuning.decision import Ask, Counts, Decision, Measured
from spectrumkv_sglang.tuning.frontier import NATIVE, Candidate
from spectrumkv_sglang.tuning.own_candidate import NATIVE_PACKED
from spectrumkv_sglang.tuning.request_limits import NO_LIMITS, RequestLimits, read_limits
from spectrumkv_sglang.tuning.settings import ControllerSettings

logger = logging.getLogger(__name__)

_MOST_ROOMS = 4096
_MOST_REQUESTS = 65536  # far more than a server queues: a request's limits must not be lost
_MOST_PEER_RULES = 256
PACKED = Candidate(NATIVE_PACKED, b=1.0, kl=0.0)
"""What a prompt under ``min_tokens`` travels as."""


@dataclass
class _Expected:
    limits: RequestLimits
    came: float


@dataclass
class ChunkCost:
    """What one chunk took; to be filled in by the sender. ``as_decided``: it went the way that was decided."""

    native_bytes: float = 0.0
    wire_bytes: float = 0.0
    seconds: float = 0.0
    pack_s: float = 0.0
    unpack_s: float = 0.0
    as_decided: bool = False


@dataclass
class NativeTiming:
    """SGLang's own sending of one chunk; ``seconds`` are there when it has ended."""

    succeeded: bool = False
    seconds: float = 0.0


@dataclass
class _Room:
    decision: Decision
    as_decided: bool = True
    total: ChunkCost = field(default_factory=ChunkCost)
    loads: list[float] = field(default_factory=list)
    elapsed: float = 0.0  # seconds, by whichever path


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
        self._expected: OrderedDict[int, _Expected] = OrderedDict()
        self._rooms: OrderedDict[tuple[int, str], _Room] = OrderedDict()
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

    def expect(self, room: int, parameters: Any) -> None:
        """A request has come that will be sent as ``room``; ``parameters``: what it carries for this package."""
        limits = read_limits(parameters)
        if limits.problem:
            log_once(
                logger,
                logging.WARNING,
                "controller-bad-request",
                f"room {room} gets the safe candidate, its custom parameter `spectrumkv` was not understood: "
                f"{limits.problem}",
            )
            limits = replace(limits, problem="not understood")  # said above; thousands of requests are remembered
        with self._lock:
            self._expected[room] = _Expected(limits, time.monotonic())
            self._expected.move_to_end(room)
            while len(self._expected) > _MOST_REQUESTS:
                self._expected.popitem(last=False)

    def decide(
        self, room: int, session: str, peer: Handshake, *, first: bool, prompt_tokens: int, native_bytes: int
    ) -> Decision:
        """The decision for a chunk's room.

        Args:
            session: decode rank that the chunk goes to.
            first: whether it is the room's first chunk: an earlier decision is another room's of the same id.
            prompt_tokens: length of the whole prompt, or an upper bound.
            native_bytes: of the whole room.
        """
        key = (room, session)
        with self._lock:
            known = None if first else self._rooms.get(key)
            expected = self._expected.get(room)
        if known is not None:
            return known.decision
        decision = self.controller.decide(
            Ask(
                session,
                native_bytes,
                prompt_tokens,
                expected.limits if expected is not None else NO_LIMITS,
                time.monotonic() - expected.came if expected is not None else 0.0,
                self._forbidden_by(peer),
            )
        )
        with self._lock:
            self._rooms[key] = _Room(decision)
            self._rooms.move_to_end(key)
            while len(self._rooms) > _MOST_ROOMS:  # rooms that were aborted never send a last chunk
                self._rooms.popitem(last=False)
        self._metrics.decision(decision.candidate.name, decision.reason)
        logger.debug("room %d to %s: %s", room, session, decision)
        return decision

    @contextmanager
    def sending(self, room: int, session: str, *, last: bool) -> Iterator[ChunkCost]:
        """Around the sending of one chunk, by whichever path; what it took is left in the cost that this yields."""
        cost, load, began = ChunkCost(), self.controller.sending(session), time.monotonic()
        try:
            yield cost
        finally:
            try:
                mean_load = (load + self.controller.sent(session)) / 2
                self._add(room, session, cost, mean_load, time.monotonic() - began, last)
            except Exception:  # the chunk was sent, whatever became of the books
                logger.exception("room %d: the controller did not learn from its transfer", room)

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

    def forget(self, room: int) -> None:
        """The request of ``room`` has ended on prefill."""
        with self._lock:
            self._expected.pop(room, None)

    def _add(self, room: int, session: str, cost: ChunkCost, load: float, elapsed: float, last: bool) -> None:
        key = (room, session)
        with self._lock:
            found = self._rooms.get(key)
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
            del self._rooms[key]
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
