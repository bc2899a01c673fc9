"""A link and codecs of known speeds under a controller, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from spectrumkv_sglang.tuning.controller import Controller
from spectrumkv_sglang.tuning.decision import Ask, Decision, Measured
from spectrumkv_sglang.tuning.frontier import NATIVE, Candidate
from spectrumkv_sglang.tuning.settings import ControllerSettings

GBPS = 1e9 / 8
MIB = 1024 * 1024

PACKED = Candidate("native-packed@1", b=1.0, kl=0.0)
NEAR = Candidate("near-lossless@0.5", b=0.5, kl=0.0001)
BALANCED = Candidate("balanced@0.3", b=0.3, kl=0.005)
AGGRESSIVE = Candidate("aggressive@0.2", b=0.2, kl=0.05)
CANDIDATES = (PACKED, NEAR, BALANCED, AGGRESSIVE)
# S, native bytes a second: fewer bits take longer.
SPEEDS = {PACKED.name: 8 * GBPS, NEAR.name: 4 * GBPS, BALANCED.name: 3.5 * GBPS, AGGRESSIVE.name: 2.5 * GBPS}


@dataclass
class SimulatedLink:
    """One peer's link at ``rate`` bytes a second; ``noise``: relative spread of what a transfer takes."""

    candidates: Sequence[Candidate] = CANDIDATES
    safe: Candidate = NEAR
    rate: float = GBPS
    noise: float = 0.0
    native_pieces: float = 0.0  # seconds a native byte that SGLang's own path takes in addition
    settings: dict[str, Any] = field(default_factory=dict)
    now: float = 1000.0
    peer: str = "decode:1"
    stalls: dict[str, float] = field(default_factory=dict)  # seconds in which a candidate's first transfer is unpacked

    def __post_init__(self) -> None:
        settings = ControllerSettings(**{"enabled": True, "explore": 0.0, **self.settings})
        self.controller = Controller(self.candidates, self.safe, settings, min_tokens=64, clock=lambda: self.now)
        self._random = random.Random(7)

    def seconds(self, candidate: Candidate, size: float) -> float:
        """What ``size`` native bytes truly take."""
        codec = self.native_pieces if candidate is NATIVE else 1 / SPEEDS[candidate.name]
        return size * (codec + candidate.b / self.rate)

    def best(self, size: float, max_kl: float = 1.0) -> Candidate:
        return min(
            (c for c in (NATIVE, *self.candidates) if c.kl <= max_kl), key=lambda c: (self.seconds(c, size), c.kl)
        )

    def send(self, size: float = 32 * MIB, **ask: Any) -> Decision:
        """One room."""
        decision = self.controller.decide(Ask(self.peer, size, **{"prompt_tokens": 1000, **ask}))
        spread = 1 + self.noise * self._random.uniform(-1, 1)
        seconds = self.seconds(decision.candidate, size) * spread
        native = decision.candidate is NATIVE
        wire = size * decision.candidate.b
        busy = seconds if native else wire / self.rate * spread
        stall = self.stalls.get(decision.candidate.name, 0.0)
        if stall:
            self.stalls[decision.candidate.name] = 0.0
        seconds += stall
        self.now += seconds
        self.controller.link_sample(self.peer, wire, busy, native)
        codec = 0.0 if native else size / SPEEDS[decision.candidate.name]
        self.controller.finished(decision, Measured(size, wire, seconds, codec / 2, codec / 2 + stall))
        return decision
