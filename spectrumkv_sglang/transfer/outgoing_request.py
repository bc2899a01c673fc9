"""One request on prefill: what its client asks for, and what has been decided and sent for it.

A room id does not identify a request: SGLang knows transfers by it alone, ids are used again, and several decode
servers may bring equal ones to one prefill server. So each request gets an object of its own when SGLang makes its
sender. The sender and the request's chunks carry it, nothing is looked up by a room id, and it goes when they go: after
the last chunk, or after an abort. No other request can change it, and there is no table that could grow.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from spectrumkv_sglang.transfer.request_identity import UNKNOWN
from spectrumkv_sglang.tuning.decision import Decision
from spectrumkv_sglang.tuning.request_limits import NO_LIMITS, RequestLimits


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
class DecidedRoom:
    """The controller's decision for a request's room on one decode rank, and what its chunks took so far."""

    decision: Decision
    as_decided: bool = True
    total: ChunkCost = field(default_factory=ChunkCost)
    loads: list[float] = field(default_factory=list)
    elapsed: float = 0.0  # seconds, by whichever path


@dataclass(frozen=True)
class BytesSent:
    """Bytes of a room's chunks so far: what native transfer would have taken, and what went over the wire."""

    native: int = 0
    wire: int = 0

    def budget_of_next(self, native_bytes: int, budget: float) -> float:
        """Wire / native bytes that the next chunk of ``native_bytes`` may take so that the room keeps ``budget``."""
        return min(1.5, max(0.0, (budget * (self.native + native_bytes) - self.wire) / native_bytes))


NOTHING_SENT = BytesSent()


@dataclass(eq=False)
class OutgoingRequest:
    """See the module. SGLang gives all chunks of a room to one worker thread, which alone writes ``decided``, ``sent``.

    Attributes:
        limits: what its client asks of the controller.
        came: `time.monotonic` of its arrival.
        decided: by decode rank that it goes to (Mooncake session).
        sent: the same; until the last chunk.
    """

    limits: RequestLimits = NO_LIMITS
    came: float = field(default_factory=time.monotonic)
    decided: dict[str, DecidedRoom] = field(default_factory=dict)
    sent: dict[str, BytesSent] = field(default_factory=dict)


@dataclass(frozen=True)
class ChunkOrigin:
    """What the scheduler knows of a chunk when it hands it to a worker.

    Attributes:
        prompt: digest of its request's prompt.
        forward_done: CUDA event after the forward that writes its pages, or None.
        request: whose chunk it is.
    """

    prompt: int = UNKNOWN
    forward_done: Any = None
    request: OutgoingRequest = field(default_factory=OutgoingRequest)
