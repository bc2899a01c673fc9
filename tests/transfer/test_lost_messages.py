"""Every control message lost, late, twice, behind the next one, cut or garbled, between two real processes.

A proxy stands between prefill and decode. Whatever it does: the chunk arrives bit by bit, goes native while its room
lives, or its room fails; nobody hangs, all slots return and the next room is as ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from conftest import MakePrefill, MakeRank
from decode_peer import GEOMETRY, SLOT_BYTES, PeerRank, eventually
from prefill_side import Outcome, assert_arrived, idle, next_room

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.observability.reasons import Reason
from spectrumkv_sglang.transfer.errors import GoNativeError
from spectrumkv_sglang.transfer.handshake import Handshake
from spectrumkv_sglang.transfer.prefill_rank import PrefillRank
from spectrumkv_sglang.transfer.slot_memory import RegistrationError, SlotMemory

pytestmark = pytest.mark.timeout(240)

MESSAGES = ("Open", "Granted", "Commit", "Done", "Close")
LATE_SECONDS = 2.0  # later than the timeout of its answer
FAULTS = ("lost", "late", "twice", "swapped", "cut", "garbled")


class Proxy:
    """Passes control messages on between one prefill and one decode rank, but for the first of the chosen kind."""

    def __init__(self, rank: PeerRank) -> None:
        self.kind, self.fault = "", ""
        self.hit = threading.Event()
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self.handshake: Handshake = msgspec.structs.replace(rank.handshake, control_endpoint=f"tcp://127.0.0.1:{port}")
        self._decode = rank.handshake.control_endpoint
        self._backs: dict[bytes, Any] = {}
        self._held: list[tuple[float, Any, list[bytes]]] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy")
        self._thread.start()

    def arm(self, kind: str, fault: str) -> None:
        self.hit.clear()
        self.fault, self.kind = fault, kind

    def close(self) -> None:
        self._ending.set()
        self._thread.join(10)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._ending.is_set():
            poller = zmq.Poller()
            for socket in (self._front, *self._backs.values()):
                poller.register(socket, zmq.POLLIN)
            ready = dict(poller.poll(10))
            if self._front in ready:
                identity, frame = self._front.recv_multipart()
                back = self._backs.get(identity)
                if back is None:
                    back = self._backs[identity] = self._context.socket(zmq.DEALER)
                    back.connect(self._decode)
                self._pass_on(back, [frame], frame)
            for identity, back in list(self._backs.items()):
                if back in ready:
                    frame = back.recv()
                    self._pass_on(self._front, [identity, frame], frame)
            due = [item for item in self._held if item[0] <= time.monotonic()]
            self._held = [item for item in self._held if item not in due]
            for _, socket, frames in due:
                socket.send_multipart(frames)

    def _pass_on(self, socket: Any, frames: list[bytes], frame: bytes) -> None:
        sent = [frames]
        kind = msgspec.msgpack.decode(frame[8:])["type"]
        if kind == self.kind:
            self.kind = ""
            self.hit.set()
            *head, body = frames
            if self.fault in ("lost", "late", "swapped"):
                if self.fault != "lost":  # "swapped": behind whatever is said meanwhile, but in time
                    self._held.append(
                        (time.monotonic() + (LATE_SECONDS if self.fault == "late" else 0.1), socket, frames)
                    )
                sent = []
            elif self.fault == "twice":
                sent = [frames, frames]
            elif self.fault == "cut":
                sent = [[*head, body[: len(body) // 2]]]
            else:
                sent = [[*head, body[:12] + bytes(byte ^ 0x5A for byte in body[12:])]]
        for message in sent:
            socket.send_multipart(message)


@pytest.fixture
def proxied(make_rank: MakeRank) -> Iterator[tuple[Proxy, PeerRank]]:
    rank = make_rank(
        slots_per_chunk=2, lease_s=3.5, write_timeout_s=3.0, quarantine_s=0.2, slot_wait_s=0.2, slot_bytes=65536
    )
    proxy = Proxy(rank)
    yield proxy, rank
    proxy.close()


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_message_that_does_not_arrive_as_it_was_sent(
    proxied: tuple[Proxy, PeerRank], make_prefill: MakePrefill, kind: str
) -> None:
    proxy, rank = proxied
    waits_for_slots = kind in ("Open", "Granted")  # in vain
    hasty = make_prefill(
        slots_per_chunk=2,
        slot_bytes=65536,
        slot_wait_s=0.2,
        open_timeout_s=1 if waits_for_slots else 5,
        unpack_timeout_s=1.5,
    )
    patient = make_prefill(slots_per_chunk=2, slot_bytes=65536)
    pages = hasty.some_pages(90)  # four sub-chunks
    results: dict[str, Outcome] = {}
    written: list[int] = []
    for room, fault in enumerate(FAULTS, start=1):
        room_pages = rank.open_room(room, len(pages))
        proxy.arm(kind, fault)
        source = patient if fault in ("twice", "swapped") or kind == "Close" else hasty  # nothing is missed there
        started = time.monotonic()
        outcome = source.send(rank, room, pages, peer=proxy.handshake)
        assert time.monotonic() - started < 60
        assert proxy.hit.wait(5), fault
        assert not outcome.peer_suspect, fault
        if outcome.code == 0 and not outcome.went_native:
            assert_arrived(source, pages, rank, room_pages)
        elif outcome.code == 0:
            assert outcome.reason in ("open_timeout", "control_error", "payload_rejected"), fault
        else:
            assert set(outcome.failures) <= {"commit_timeout", "bad_message"}, (fault, outcome.failures)
        rank.ask("close_room", room=room)
        written += room_pages
        assert rank.is_untouched(but=written), fault
        results[fault] = outcome
    assert [results[fault].reason for fault in ("twice", "swapped")] == ["tiered", "tiered"]
    if kind == "Close":  # the chunk is over by then
        assert all(outcome.reason == "tiered" for outcome in results.values())
    if kind in ("Commit", "Done"):
        assert results["lost"].failures == {"commit_timeout": 1}
    if kind in ("Open", "Granted"):
        assert (results["lost"].code, results["lost"].reason) == (0, "open_timeout")
    assert eventually(lambda: idle(rank), True, 20)
    next_room(rank, make_prefill(slot_bytes=65536))


class Overlapping:
    """The real engine; what is to be registered is registered a moment before by somebody else."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def register_memory(self, address: int, length: int) -> int:
        assert self._engine.register_memory(address, length) == 0
        try:
            return int(self._engine.register_memory(address, length))
        finally:
            self._engine.unregister_memory(address)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def test_a_registration_that_mooncake_refuses_is_an_error_and_then_everything_goes_native(
    engine: Any, make_rank: MakeRank, make_prefill: MakePrefill
) -> None:
    source = make_prefill()
    with pytest.raises(RegistrationError, match=r"code -\d+.*ulimit -l") as caught:
        SlotMemory(Overlapping(engine), 2, SLOT_BYTES, source.view.device)
    with pytest.raises(RegistrationError):
        PrefillRank(
            view=source.view,
            config=SpectrumKVConfig(slot_bytes=SLOT_BYTES),
            engine=Overlapping(engine),
            page_size=1,
            page_bytes=GEOMETRY.native_bytes_per_token,
            metrics=source.rank._metrics,
        )
    source.rank._view, served = GoNativeError(Reason.REGISTRATION_FAILED, str(caught.value)), source.rank._view
    rank = make_rank()
    rank.open_room(1, 10)
    outcome = source.send(rank, 1, source.some_pages(10))
    assert (outcome.code, outcome.went_native, outcome.reason) == (0, True, "registration_failed")
    source.rank._view = served
    next_room(rank, source)
