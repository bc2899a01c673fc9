"""Rooms: pages come from decode alone, and once a room is closed no byte is unpacked into them."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrumkv_sglang.observability.reasons import FailureCause
from spectrumkv_sglang.transfer.errors import ChunkFailedError
from spectrumkv_sglang.transfer.rooms import RoomRegistry

ROOM = 2**63 - 1
PAGES = np.array([9, 2, 7, 4], dtype=np.int32)


def open_rooms() -> tuple[RoomRegistry, int]:
    rooms = RoomRegistry()
    rooms.register(ROOM, PAGES)
    return rooms, rooms.registration(ROOM, 0, 1)


class Unpack:
    """Holds a room on a thread of its own, as an unpack does, until told to end."""

    def __init__(self, rooms: RoomRegistry, registration: int) -> None:
        self._rooms, self._registration = rooms, registration
        self._started, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold)
        self._thread.start()
        assert self._started.wait(5)

    def _hold(self) -> None:
        with self._rooms.pages(ROOM, self._registration, 0, 4):
            self._started.set()
            self._end.wait(10)

    def end(self) -> None:
        self._end.set()
        self._thread.join(5)


@given(pages=st.lists(st.integers(0, 2**31), min_size=1, max_size=20), data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_range_inside_the_room_gives_its_pages_in_order(pages: list[int], data: st.DataObject) -> None:
    rooms = RoomRegistry()
    rooms.register(ROOM, np.array(pages))
    start = data.draw(st.integers(0, len(pages) - 1))
    count = data.draw(st.integers(1, len(pages) - start))
    registration = rooms.registration(ROOM, start, count)
    with rooms.pages(ROOM, registration, start, count) as found:
        assert found.tolist() == pages[start : start + count]
        assert found.dtype == np.int64


@pytest.mark.parametrize(
    ("start", "count"), [(0, 5), (4, 1), (3, 2), (-1, 1), (0, 0), (0, -1), (2**32, 1), (0, 2**62), (2**64, 2**64)]
)
def test_a_range_outside_the_room_is_refused(start: int, count: int) -> None:
    rooms, registration = open_rooms()
    with pytest.raises(ChunkFailedError) as at_open:
        rooms.registration(ROOM, start, count)
    with pytest.raises(ChunkFailedError) as at_unpack, rooms.pages(ROOM, registration, start, count):
        pass
    assert at_open.value.cause is at_unpack.value.cause is FailureCause.PAGE_RANGE


def test_a_room_that_is_not_open_is_refused() -> None:
    rooms, registration = open_rooms()
    with pytest.raises(ChunkFailedError) as failure:
        rooms.registration(1, 0, 1)
    assert failure.value.cause is FailureCause.ROOM_GONE
    rooms.retire(ROOM)
    with pytest.raises(ChunkFailedError) as failure, rooms.pages(ROOM, registration, 0, 1):
        pass
    assert failure.value.cause is FailureCause.ROOM_GONE
    assert not rooms.knows(ROOM)
    assert len(rooms) == 0
    rooms.retire(ROOM)  # retiring what is not there is no error


def test_the_pages_are_a_copy() -> None:
    rooms, own = RoomRegistry(), PAGES.copy()
    rooms.register(ROOM, own)
    own[:] = 0
    with rooms.pages(ROOM, rooms.registration(ROOM, 0, 4), 0, 4) as pages:
        assert pages.tolist() == PAGES.tolist()


def test_closing_a_room_waits_for_its_running_unpack() -> None:
    rooms, registration = open_rooms()
    unpack = Unpack(rooms, registration)
    retired = threading.Event()

    def retire() -> None:
        rooms.retire(ROOM)
        retired.set()

    thread = threading.Thread(target=retire)
    thread.start()
    assert not retired.wait(0.3)
    assert not rooms.knows(ROOM)  # no new unpack starts meanwhile
    unpack.end()
    assert retired.wait(5)
    thread.join(5)


def test_an_unpack_that_waited_behind_another_sees_that_the_room_closed() -> None:
    rooms, registration = open_rooms()
    unpack = Unpack(rooms, registration)
    causes: list[FailureCause] = []

    def second_unpack() -> None:
        try:
            with rooms.pages(ROOM, registration, 0, 1):
                pass
        except ChunkFailedError as failure:
            causes.append(failure.cause)

    closing = threading.Thread(target=rooms.retire, args=(ROOM,))
    waiting = threading.Thread(target=second_unpack)
    waiting.start()
    time.sleep(0.1)
    closing.start()
    time.sleep(0.1)
    unpack.end()
    waiting.join(5)
    closing.join(5)
    # Whichever of the two got the room first: either the unpack ended before the room closed, or it was refused.
    assert causes in ([], [FailureCause.ROOM_GONE])
    assert not rooms.knows(ROOM)


def test_asking_whether_a_room_is_open_waits_for_no_unpack() -> None:
    rooms, registration = open_rooms()
    unpack = Unpack(rooms, registration)
    try:
        answers: list[int] = []
        thread = threading.Thread(target=lambda: answers.append(rooms.registration(ROOM, 0, 4)))
        thread.start()
        thread.join(5)
        assert answers == [registration]
    finally:
        unpack.end()


def test_a_room_opened_anew_refuses_payloads_of_its_former_self() -> None:
    rooms, former = open_rooms()
    rooms.register(ROOM, np.array([1, 3]))
    assert len(rooms) == 1
    with pytest.raises(ChunkFailedError) as failure, rooms.pages(ROOM, former, 0, 1):
        pass
    assert failure.value.cause is FailureCause.ROOM_GONE
    with rooms.pages(ROOM, rooms.registration(ROOM, 0, 2), 0, 2) as pages:
        assert pages.tolist() == [1, 3]


def test_a_room_is_open_for_one_prompt() -> None:
    rooms = RoomRegistry()
    rooms.register(ROOM, PAGES, 7)
    assert (rooms.prompt(ROOM), rooms.prompt(1)) == (7, 0)
    registration = rooms.registration(ROOM, 0, 4, 7)
    assert rooms.registration(ROOM, 0, 4) == registration  # a peer that does not know
    with pytest.raises(ChunkFailedError) as failure:
        rooms.registration(ROOM, 0, 4, 8)
    assert failure.value.cause is FailureCause.OTHER_REQUEST
    rooms.register(ROOM, PAGES)
    assert rooms.registration(ROOM, 0, 4, 8) == registration + 1


def test_opening_a_room_anew_waits_for_its_former_self() -> None:
    rooms, registration = open_rooms()
    unpack = Unpack(rooms, registration)
    thread = threading.Thread(target=rooms.register, args=(ROOM, np.array([1])))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    unpack.end()
    thread.join(5)
    assert not thread.is_alive()
    assert rooms.registration(ROOM, 0, 1) != registration


def test_a_busy_room_delays_no_other() -> None:
    rooms, registration = open_rooms()
    unpack = Unpack(rooms, registration)
    try:
        done = threading.Event()

        def other_room() -> None:
            rooms.register(5, PAGES)
            with rooms.pages(5, rooms.registration(5, 0, 4), 0, 4):
                pass
            rooms.retire(5)
            done.set()

        thread = threading.Thread(target=other_room)
        thread.start()
        assert done.wait(5)
        thread.join(5)
    finally:
        unpack.end()
