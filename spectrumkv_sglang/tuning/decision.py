"""What the controller is asked, what it answers, and what it is told afterwards."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from spectrumkv_sglang.observability.reasons import DecisionReason
from spectrumkv_sglang.tuning.frontier import Candidate
from spectrumkv_sglang.tuning.request_limits import NO_LIMITS, RequestLimits


@dataclass(frozen=True)
class Ask:
    """A room that is about to be sent.

    Attributes:
        peer: decode rank that it goes to.
        native_bytes: of the whole room on this rank.
        prompt_tokens: of its prompt.
        limits: what its request asks for.
        elapsed_s: seconds since the request came; they count towards its TTFT target.
        forbidden: names of candidates that decode would refuse.
    """

    peer: str
    native_bytes: float
    prompt_tokens: int
    limits: RequestLimits = NO_LIMITS
    elapsed_s: float = 0.0
    forbidden: Collection[str] = ()


@dataclass(frozen=True)
class Decision:
    """How a room travels, and why.

    Attributes:
        candidate: ``NATIVE`` for SGLang's own path.
        bandwidth: B of the link, bytes a second; None: not known.
        expected_s: T that it was taken for; None: not known.
        allowance_s: seconds that the transfer may take for the TTFT target; None: no target.
        max_kl: the accuracy limit that held; None: none.
    """

    candidate: Candidate
    reason: DecisionReason
    peer: str = ""
    bandwidth: float | None = None
    expected_s: float | None = None
    allowance_s: float | None = None
    max_kl: float | None = None


@dataclass(frozen=True)
class Measured:
    """What sending a room as decided took.

    Attributes:
        native_bytes, wire_bytes: of the room.
        seconds: all of its chunks, from start to end.
        pack_s, unpack_s: of the codec; 0 on SGLang's own path.
        load: rooms that were sent to the peer at once, this one included.
    """

    native_bytes: float
    wire_bytes: float
    seconds: float
    pack_s: float = 0.0
    unpack_s: float = 0.0
    load: float = 1.0


@dataclass
class Counts:
    """What the controller counted since it was made."""

    switches: int = 0
    violations: int = 0
    refused_samples: int = 0
