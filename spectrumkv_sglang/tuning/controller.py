"""Chooses, for each room, how its KV travels: from the link, the codecs, the deadline and the accuracy asked for.

T = V / S + V b / B (``frontier``), B and S measured on our own transfers (``bandwidth``, ``codec_speed``), corrected by
what transfers took beyond that (``residuals``). Whatever is not known leads to the safe candidate, and no candidate is
ever taken that is expected to lose more than a request or the configuration allows: then SGLang's own path is.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from spectrumkv_sglang.observability.reasons import DecisionReason
from spectrumkv_sglang.tuning.bandwidth import MOST_PEERS, LinkBandwidth
from spectrumkv_sglang.tuning.codec_speed import CodecSpeeds
from spectrumkv_sglang.tuning.decision import Ask, Counts, Decision, Measured
from spectrumkv_sglang.tuning.frontier import NATIVE, Candidate, Envelope
from spectrumkv_sglang.tuning.residuals import Cooldowns, Residuals, size_class
from spectrumkv_sglang.tuning.settings import ControllerSettings

TIE = 0.02
"""Candidates whose times differ by less are equally fast, and the more accurate one is taken."""
EXPLORE_COST = 1.25
"""A neighbour is tried only where it is expected to take at most this many times as long as the best."""
MOST_SWITCH_GAIN = 0.5
NATIVE_TEACHES_AFTER = 4
"""Native transfers since the last write of our own after which they, of many pieces, tell the link's rate, too."""

Situation = tuple[tuple[int, ...], int]
"""Positions of the candidates that were possible, size class: what a choice may depend on beside the link."""


@dataclass
class _Peer:
    bandwidth: LinkBandwidth
    residuals: Residuals = field(default_factory=Residuals)
    cooldowns: Cooldowns = field(default_factory=Cooldowns)
    current: dict[Situation, str] = field(default_factory=dict)
    switches: dict[Situation, int] = field(default_factory=dict)  # under the present rate
    last_used: dict[str, int] = field(default_factory=dict)  # number of the decision
    met: set[str] = field(default_factory=set)  # candidates that were sent before
    native_since_own: int = 0
    sending: int = 0
    regime: int = 0


class Controller:
    """The controller of one prefill rank. Thread-safe.

    Args:
        candidates: what may be chosen beside SGLang's own path.
        safe: taken where nothing is known; its KL may be infinite where nobody knows it.
        short: what prompts under ``min_tokens`` travel as, whatever is decided.
        min_tokens: length of the shortest prompt that anything is decided for.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        safe: Candidate,
        settings: ControllerSettings,
        *,
        short: Candidate = NATIVE,
        min_tokens: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._all = (NATIVE, *candidates)
        self._safe, self._short, self._settings = safe, short, settings
        self._min_tokens, self._clock = min_tokens, clock
        self._random = random.Random(settings.seed)
        self._speeds = CodecSpeeds()
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        self._envelopes: dict[tuple[int, ...], Envelope] = {}  # emptied whenever a speed changes
        self._decisions = 0
        self._counts = Counts()
        self._lock = threading.Lock()

    # ---- deciding ------------------------------------------------------------------------------------------------

    def decide(self, ask: Ask) -> Decision:
        """How the room of ``ask`` travels. Never raises for what a request or a measurement holds."""
        now = self._clock()
        with self._lock:
            self._decisions += 1
            if self._speeds.fade():
                self._envelopes.clear()
            peer = self._peer(ask.peer)
            decision = self._decide(ask, peer, now)
            peer.cooldowns.decided()
            peer.last_used[decision.candidate.name] = self._decisions
            return decision

    def _decide(self, ask: Ask, peer: _Peer, now: float) -> Decision:
        limits, settings = ask.limits, self._settings
        target = limits.ttft_target_s if limits.ttft_target_s is not None else settings.ttft_target_s
        asked = [kl for kl in (limits.max_kl, settings.max_kl) if kl is not None]
        base = Decision(
            self._safe,
            DecisionReason.NO_SAMPLE,
            ask.peer,
            bandwidth=peer.bandwidth.estimate(now),
            allowance_s=None if target is None else max(0.0, target - ask.elapsed_s),
            max_kl=min(asked) if asked else None,
        )
        if ask.prompt_tokens < self._min_tokens:
            return replace(base, candidate=self._short, reason=DecisionReason.BELOW_MIN)
        if limits.problem:
            return self._safely(base, DecisionReason.BAD_REQUEST)
        if base.bandwidth is None or not (math.isfinite(ask.native_bytes) and ask.native_bytes > 0):
            return self._safely(base, DecisionReason.NO_SAMPLE)
        situation = self._situation(base, ask)
        peer.residuals.fade(peer.current.get(situation, ""))
        return self._fastest(ask, peer, base, base.bandwidth, situation)

    def _safely(self, base: Decision, reason: DecisionReason) -> Decision:
        if _allows(base.max_kl, self._safe):
            return replace(base, candidate=self._safe, reason=reason)
        return replace(base, candidate=NATIVE, reason=DecisionReason.ACCURACY_FLOOR)

    def _situation(self, base: Decision, ask: Ask) -> Situation:
        possible = tuple(
            index
            for index, candidate in enumerate(self._all)
            if _allows(base.max_kl, candidate) and candidate.name not in ask.forbidden
        )
        return possible, size_class(ask.native_bytes)

    def _fastest(self, ask: Ask, peer: _Peer, base: Decision, bandwidth: float, situation: Situation) -> Decision:
        possible = situation[0]
        x = max(1, peer.sending) / bandwidth  # the room itself is under way when it is decided
        if len(possible) == 1:
            seconds = self._expected(NATIVE, ask.native_bytes, x, peer)
            return replace(base, candidate=NATIVE, reason=DecisionReason.FIXED, expected_s=seconds)

        near = self._envelope(possible).neighbours(x)
        pool = [self._all[possible[at]] for at in near]
        if NATIVE in pool:  # packed, the same bytes go in fewer pieces: only residuals tell which is faster
            pool += [self._all[i] for i in possible if self._all[i].b >= 1.0 and self._all[i] not in pool]
        current = peer.current.get(situation)
        pool += [self._all[i] for i in possible if self._all[i].name == current and self._all[i] not in pool]
        reason = self._reason_of_the_envelope(possible, x, ask)

        everybody = [self._all[index] for index in possible]
        times = {c.name: self._expected(c, ask.native_bytes, x, peer) for c in everybody}
        in_time = [c for c in everybody if base.allowance_s is None or times[c.name] <= base.allowance_s]
        awake = [c for c in in_time if not peer.cooldowns.cooling(c.name)]
        if any(peer.cooldowns.cooling(c.name) for c in pool):
            reason = DecisionReason.COOLDOWN
        pool = [c for c in pool if c in awake]
        if not pool:  # none of the neighbours: whoever is in time, rested or not, or at last the fastest of all
            pool = awake or in_time or [min(everybody, key=lambda c: times[c.name])]
            reason = DecisionReason.SLO if base.allowance_s is not None else DecisionReason.COOLDOWN

        least = min(times[c.name] for c in pool)
        best = min((c for c in pool if times[c.name] <= least * (1 + TIE)), key=lambda c: (c.kl, times[c.name]))
        chosen, reason = self._kept(peer, situation, pool, times, best, reason)
        if chosen is NATIVE and reason in (DecisionReason.ENVELOPE, DecisionReason.HOLD):
            reason = DecisionReason.BYPASS
        tried = self._tried(peer, pool, times, chosen)
        if tried is not None:
            chosen, reason = tried, DecisionReason.EXPLORE
        return replace(base, candidate=chosen, reason=reason, expected_s=times[chosen.name])

    def _reason_of_the_envelope(self, possible: tuple[int, ...], x: float, ask: Ask) -> DecisionReason:
        """``accuracy_floor`` where a candidate that is not accurate enough would have been faster."""
        others = tuple(i for i, candidate in enumerate(self._all) if candidate.name not in ask.forbidden)
        fastest = others[self._envelope(others).fastest(x)]
        return DecisionReason.ENVELOPE if fastest in possible else DecisionReason.ACCURACY_FLOOR

    def _kept(
        self,
        peer: _Peer,
        situation: Situation,
        pool: list[Candidate],
        times: dict[str, float],
        best: Candidate,
        reason: DecisionReason,
    ) -> tuple[Candidate, DecisionReason]:
        """``best``, or the candidate in use where that is hardly slower: the choice must not swing with noise.

        What is gained by a change must be more after each one under the same rate, so that there is an end to them.
        """
        name = peer.current.get(situation, best.name)
        if name != best.name:
            switches = peer.switches.get(situation, 0)
            gain = min(MOST_SWITCH_GAIN, self._settings.switch_gain * (1 + switches))
            current = next((c for c in pool if c.name == name), None)  # None: it rests, or is not in time
            if current is not None and times[name] <= times[best.name] * (1 + gain):
                return current, DecisionReason.HOLD
            self._counts.switches += 1
            peer.switches[situation] = switches + 1
        peer.current[situation] = best.name
        return best, reason

    def _tried(
        self, peer: _Peer, pool: list[Candidate], times: dict[str, float], chosen: Candidate
    ) -> Candidate | None:
        """Now and then the other candidate that was used longest ago, if it is not expected to cost much."""
        if self._random.random() >= self._settings.explore:
            return None
        most = times[chosen.name] * EXPLORE_COST
        others = [c for c in pool if c is not chosen and times[c.name] <= most]
        return min(others, key=lambda c: (peer.last_used.get(c.name, 0), c.name), default=None)

    def _expected(self, candidate: Candidate, native_bytes: float, x: float, peer: _Peer) -> float:
        """T in seconds at ``x`` = load / B."""
        by_line = native_bytes * (self._speeds.of(candidate) + candidate.b * x)
        # However well stages overlap, something of it remains.
        return max(by_line / 4, by_line + peer.residuals.seconds(candidate.name, native_bytes))

    def _envelope(self, possible: tuple[int, ...]) -> Envelope:
        found = self._envelopes.get(possible)
        if found is None:
            lines = [(self._speeds.of(self._all[i]), self._all[i].b) for i in possible]
            found = self._envelopes[possible] = Envelope(lines)
        return found

    # ---- learning ------------------------------------------------------------------------------------------------

    def link_sample(self, peer: str, size: float, seconds: float, native: bool) -> None:
        """The link to ``peer`` was busy for ``seconds`` and moved ``size`` bytes; fits ``LinkClock``.

        SGLang's own path writes many pieces and shows less than the link can do, so it counts only if it is faster than
        what is known, or if there was nothing else for a while.
        """
        now = self._clock()
        with self._lock:
            state = self._peer(peer)
            if native:
                known = state.bandwidth.estimate(now)
                if known is not None and state.native_since_own < NATIVE_TEACHES_AFTER and size <= known * seconds:
                    return
                seconds = self._without_pieces(state, size, seconds)
            else:
                state.native_since_own = 0
            if not state.bandwidth.add(size, seconds, now):
                self._counts.refused_samples += 1
            if state.bandwidth.regime != state.regime:
                state.regime = state.bandwidth.regime
                state.residuals.clear()
                state.cooldowns.clear()
                state.switches.clear()

    def _without_pieces(self, peer: _Peer, size: float, seconds: float) -> float:
        """Seconds of a native transfer without what its pieces were seen to cost, as far as that makes sense."""
        if not (math.isfinite(size) and math.isfinite(seconds) and size > 0 and seconds > 0):
            return seconds
        left = seconds - max(0.0, peer.residuals.seconds(NATIVE.name, size))
        return max(left, seconds / 4)

    def sending(self, peer: str) -> int:
        """A chunk to ``peer`` begins; returns how many are under way. ``sent`` must follow."""
        with self._lock:
            state = self._peer(peer)
            state.sending += 1
            return state.sending

    def sent(self, peer: str) -> int:
        """A chunk to ``peer`` has ended or failed; returns how many were under way."""
        with self._lock:
            state = self._peer(peer)
            state.sending = max(0, state.sending - 1)
            return state.sending + 1

    def finished(self, decision: Decision, measured: Measured) -> None:
        """The room of ``decision`` was sent as decided. What makes no sense is refused and counted."""
        now, candidate = self._clock(), decision.candidate
        with self._lock:
            peer = self._peer(decision.peer)
            if not _makes_sense(measured):
                self._counts.refused_samples += 1
                return
            first = candidate is not NATIVE and candidate.name not in peer.met
            if candidate is not NATIVE and measured.pack_s > 0:
                self._speeds.add(candidate, measured.native_bytes, measured.pack_s + measured.unpack_s, first=first)
                self._envelopes.clear()
                peer.met.add(candidate.name)
            bandwidth = peer.bandwidth.estimate(now)
            taught = candidate is NATIVE and peer.native_since_own >= NATIVE_TEACHES_AFTER
            if candidate is NATIVE:
                peer.native_since_own += 1
            if bandwidth is not None and not taught and not first:
                line = self._speeds.of(candidate) * measured.native_bytes
                line += measured.wire_bytes * measured.load / bandwidth
                peer.residuals.add(candidate.name, measured.native_bytes, measured.seconds - line, predicted=line)
            self._judge(peer, decision, measured.seconds)

    def fell_back(self, decision: Decision, seconds: float) -> None:
        """The room of ``decision`` ended otherwise than decided, natively or not at all, after ``seconds``. That says
        nothing about the candidate's speed, but a target that was missed is held against it."""
        with self._lock:
            if not (math.isfinite(seconds) and seconds > 0):
                self._counts.refused_samples += 1
                return
            self._judge(self._peer(decision.peer), decision, seconds)

    def _judge(self, peer: _Peer, decision: Decision, seconds: float) -> None:
        if decision.allowance_s is None:
            return
        violated = seconds > decision.allowance_s
        self._counts.violations += violated
        # What was expected to be late says nothing against the candidate.
        if decision.expected_s is None or decision.expected_s <= decision.allowance_s:
            peer.cooldowns.add(decision.candidate.name, violated)

    # ---- books ---------------------------------------------------------------------------------------------------

    @property
    def counts(self) -> Counts:
        """Switches, violations and refused samples so far."""
        with self._lock:
            return replace(self._counts)

    def bandwidths(self) -> tuple[float, float] | None:
        """Least and median estimate over the peers whose link is known, bytes a second; None: there are none."""
        now = self._clock()
        with self._lock:
            known = [rate for p in self._peers.values() if (rate := p.bandwidth.estimate(now)) is not None]
        return (min(known), median(known)) if known else None

    def _peer(self, name: str) -> _Peer:
        state = self._peers.get(name)
        if state is None:
            state = self._peers[name] = _Peer(LinkBandwidth(self._settings.sample_max_age_s))
            while len(self._peers) > MOST_PEERS:
                self._peers.popitem(last=False)
        self._peers.move_to_end(name)
        return state


def _allows(max_kl: float | None, candidate: Candidate) -> bool:
    return max_kl is None or candidate.kl <= max_kl


def _makes_sense(measured: Measured) -> bool:
    numbers = (measured.native_bytes, measured.wire_bytes, measured.seconds, measured.load)
    return all(math.isfinite(n) and n > 0 for n in numbers) and all(
        math.isfinite(n) and n >= 0 for n in (measured.pack_s, measured.unpack_s)
    )
