"""Errors of the transfer path, each bound to the reason or cause that the metrics count."""

from __future__ import annotations

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.observability.reasons import FailureCause, Reason


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
