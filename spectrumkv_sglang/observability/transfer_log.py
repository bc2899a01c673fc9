"""One JSON line per chunk, for people and scripts that want every transfer and not a histogram.

The file is opened for appending and every line is one `write(2)`, so several ranks may share it and a reader never sees
half a line of a healthy file. A log that cannot be written is counted and mentioned; it never breaks a transfer.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

import msgspec

from spectrumkv_sglang.observability.once import log_once
from spectrumkv_sglang.observability.reasons import DecisionReason, Path, Reason

logger = logging.getLogger(__name__)


class TokensByTier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens of a chunk by tier; all zero when the chunk took the native path."""

    high: int = 0
    mid: int = 0
    low: int = 0


class ChunkRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One chunk as the prefill rank that sent it saw it; a line of the transfer log.

    time: end of the transfer, seconds since 1970. room: SGLang's bootstrap_room.
    native_bytes: size of the chunk's KV in the pool. wire_bytes: bytes sent for it, control messages included.
    achieved_b: wire_bytes / native_bytes. writes: Mooncake writes. *_seconds: transfer is start to end; pack, write
    and wait are sums over the sub-chunks, which overlap, so they may add up to more. last_chunk: the room's last chunk.
    codec_saved_bytes: that a lossless codec took off; wire_bytes is what is left.
    candidate, decision: what the controller chose for the room, and why; empty and None where it did not.
    """

    time: float
    room: int
    path: Path
    reason: Reason
    profile: str
    tokens: int
    native_bytes: int
    wire_bytes: int
    achieved_b: float
    tokens_by_tier: TokensByTier = TokensByTier()
    writes: int = 0
    subchunks: int = 0
    transfer_seconds: float = 0.0
    pack_seconds: float = 0.0
    write_seconds: float = 0.0
    wait_seconds: float = 0.0
    last_chunk: bool = False
    codec_saved_bytes: int = 0
    candidate: str = ""
    decision: DecisionReason | None = None


class TransferLog:
    """Appends `ChunkRecord`s to a file; safe to call from any thread.

    path: file to append to, created with mode 0644 when absent; reopened when it was moved away (log rotation).
    on_error: called for each line that was lost.
    """

    def __init__(self, path: str, on_error: Callable[[], None] | None = None) -> None:
        self._path = path
        self._on_error = on_error
        self._encoder = msgspec.json.Encoder()
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._line_is_torn = False
        self._closed = False
        self._lost_lines = 0

    @property
    def path(self) -> str:
        """File that is appended to."""
        return self._path

    @property
    def lost_lines(self) -> int:
        """Lines that could not be written since the start."""
        return self._lost_lines

    def write(self, record: ChunkRecord) -> bool:
        """Appends one line. False when it was lost; never raises."""
        try:
            line = self._encoder.encode(record) + b"\n"
            with self._lock:
                if self._closed:
                    return False
                self._append(line)
            return True
        except (OSError, ValueError, TypeError, msgspec.MsgspecError) as error:
            with self._lock:
                self._lost_lines += 1
            log_once(
                logger,
                logging.WARNING,
                f"transfer_log:{self._path}",
                f"transfer log {self._path}: a line was lost ({error}); transfers go on. "
                "Check free space and permissions, or unset transfer_log",
            )
            if self._on_error is not None:
                self._on_error()
            return False

    def close(self) -> None:
        """Closes the file; later writes are ignored. May be called twice."""
        with self._lock:
            self._closed = True
            self._close_file()

    def _append(self, line: bytes) -> None:
        fd = self._open_file()
        # A disk that fills up can take the first half of a line; the next line must not continue it.
        data = b"\n" + line if self._line_is_torn else line
        try:
            written = os.write(fd, data)
        except OSError:
            self._close_file()
            raise
        self._line_is_torn = written < len(data)
        if self._line_is_torn:
            raise OSError(f"only {written} of {len(data)} bytes were written")

    def _open_file(self) -> int:
        """Descriptor of the file that `path` names now."""
        if self._fd is not None and not self._is_same_file(self._fd):
            self._close_file()
            self._line_is_torn = False
        if self._fd is None:
            # Without O_NONBLOCK a named pipe that nobody reads would hold up the transfer.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
            self._fd = os.open(self._path, flags, 0o644)
        return self._fd

    def _is_same_file(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _close_file(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)


def read_transfer_log(path: str) -> list[ChunkRecord]:
    """All records of a transfer log, oldest first.

    Raises msgspec.DecodeError for a line that is not a record, OSError when the file cannot be read.
    """
    with open(path, "rb") as file:
        return [_decoder.decode(line) for line in file if line.strip()]


_decoder = msgspec.json.Decoder(ChunkRecord)
