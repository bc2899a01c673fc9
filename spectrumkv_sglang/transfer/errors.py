"""Errors of the transfer path, each bound to the reason or cause that the metrics count."""

from __future__ import annotations

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.observability.reasons import FailureCause, Reason

_MOST_QUOTED = 1024


def quoted(text: str) -> str:
    """What a peer wrote, fit for a log: at most 1,024 characters, each one printable, so that it stays on its line."""
    shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[:_MOST_QUOTED])
    if len(text) <= _MOST_QUOTED and len(shown) <= _MOST_QUOTED:
        return shown
    return f"{shown[:_MOST_QUOTED]}... ({len(text)} characters)"


class ControlMessageError(SpectrumKVError):
    """A control message or handshake that cannot be understood (garbage, truncated, other version)."""


class GoNativeError(SpectrumKVError):
    """The chunk cannot travel tiered, nothing was written to decode's pages, and SGLang's own path is safe."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ChunkFailedError(SpectrumKVError):
    """The chunk failed and SGLang's own path must not be tried; only this room ends.

    ``peer_suspect`` is True when the peer itself seems dead (a failed Mooncake write): then SGLang's
    blacklisting of the session is kept, as plain Mooncake would do.
    """

    def __init__(self, cause: FailureCause, message: str, *, peer_suspect: bool = False) -> None:
        super().__init__(message)
        self.cause = cause
        self.peer_suspect = peer_suspect
