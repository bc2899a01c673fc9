"""The goodput of the link to each peer, for those that ask nothing else of it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from spectrumkv_sglang.tuning.bandwidth import MOST_PEERS, LinkBandwidth

MAX_AGE_SECONDS = 300.0


class PeerLinks:
    """Estimates by peer, those that were not heard of for longest forgotten first. Thread-safe.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._links: OrderedDict[str, LinkBandwidth] = OrderedDict()
        self._lock = threading.Lock()

    def sample(self, peer: str, size: float, seconds: float, native: bool) -> None:
        """The link to ``peer`` was busy for ``seconds`` and moved ``size`` bytes; fits ``LinkClock``.

        What SGLang's own path moves in many pieces says too little of the link.
        """
        if native:
            return
        with self._lock:
            link = self._links.get(peer)
            if link is None:
                link = self._links[peer] = LinkBandwidth(MAX_AGE_SECONDS)
                while len(self._links) > MOST_PEERS:
                    self._links.popitem(last=False)
            self._links.move_to_end(peer)
            link.add(size, seconds, self._clock())

    def estimate(self, peer: str) -> float | None:
        """Bytes a second; None: not known, or no longer."""
        with self._lock:
            link = self._links.get(peer)
            return link.estimate(self._clock()) if link is not None else None
