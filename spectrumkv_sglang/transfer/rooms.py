"""Decode's rooms: which pages a room's payload may be unpacked into, and until when.

The pages come from decode's own receiver, never from the peer. Retiring a room waits for an unpack that is running
for it, so that no byte lands in a page after SGLang may have given it to another request.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from spectrumkv_sglang.observability.reasons import FailureCause
from spectrumkv_sglang.transfer.errors import ChunkFailedError
from spectrumkv_sglang.transfer.request_identity import UNKNOWN, may_be_same


class _Room:
    def __init__(self, pages: npt.NDArray[np.int64], registration: int, prompt: int) -> None:
        self.pages = pages
        self.registration = registration
        self.prompt = prompt
        self.lock = threading.Lock()
        self.live = True


class RoomRegistry:
    """Thread-safe map from room id to the destination pages that decode allocated for it."""

    def __init__(self) -> None:
        self._rooms: dict[int, _Room] = {}
        self._registrations = itertools.count(1)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._rooms)

    def register(self, room: int, pages: npt.NDArray[np.integer], prompt: int = UNKNOWN) -> None:
        """Open ``room`` for the given destination pages; a room of the same id that is still open is retired first.

        Args:
            prompt: digest of the prompt whose KV belongs there, see `request_identity`.
        """
        self.retire(room)
        copied = np.array(pages, dtype=np.int64, copy=True)
        with self._lock:
            self._rooms[room] = _Room(copied, next(self._registrations), prompt)

    def retire(self, room: int) -> None:
        """Close ``room``; returns once no unpack for it is running. Unknown rooms are ignored."""
        with self._lock:
            entry = self._rooms.pop(room, None)
        if entry is not None:
            with entry.lock:
                entry.live = False

    def knows(self, room: int) -> bool:
        with self._lock:
            return room in self._rooms

    def prompt(self, room: int) -> int:
        """Digest of the prompt for which ``room`` is open; `UNKNOWN` where none is."""
        with self._lock:
            entry = self._rooms.get(room)
        return UNKNOWN if entry is None else entry.prompt

    def registration(self, room: int, start: int, count: int, prompt: int = UNKNOWN) -> int:
        """Which registration of ``room`` is open, if it is for ``prompt`` and has pages [start, start + count).

        Never waits for an unpack.

        Raises:
            ChunkFailedError: cause ``room_gone``, ``other_request`` or ``page_range``.
        """
        entry = self._entry(room)
        if not may_be_same(prompt, entry.prompt):
            raise ChunkFailedError(
                FailureCause.OTHER_REQUEST, f"room {room} is open here for another prompt: a router gives each id once"
            )
        _require_range(room, entry, start, count)
        return entry.registration

    @contextmanager
    def pages(self, room: int, registration: int, start: int, count: int) -> Iterator[npt.NDArray[np.int64]]:
        """Hold ``room`` open and yield its pages [start, start + count).

        Args:
            registration: what :meth:`registration` said when the chunk was opened: a room id that was closed and
                opened anew stands for another request with pages of its own.

        Raises:
            ChunkFailedError: cause ``room_gone`` or ``page_range``.
        """
        entry = self._entry(room)
        with entry.lock:
            if not entry.live or entry.registration != registration:
                raise ChunkFailedError(FailureCause.ROOM_GONE, f"room {room} was closed while its payload waited")
            _require_range(room, entry, start, count)
            yield entry.pages[start : start + count]

    def _entry(self, room: int) -> _Room:
        with self._lock:
            entry = self._rooms.get(room)
        if entry is None:
            raise ChunkFailedError(FailureCause.ROOM_GONE, f"room {room} is not open on this decode rank")
        return entry


def _require_range(room: int, entry: _Room, start: int, count: int) -> None:
    if start < 0 or count < 1 or start + count > len(entry.pages):
        raise ChunkFailedError(
            FailureCause.PAGE_RANGE,
            f"room {room} has {len(entry.pages)} pages, payload names pages {start}..{start + count - 1}",
        )
