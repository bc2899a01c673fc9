"""Both ends of the control channel on their own: odd endpoints, floods, evictions, and where decode listens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import zmq
from decode_peer import GEOMETRY
from decode_process import HOST
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.observability.metrics import TransferMetrics
from spectrumkv_sglang.observability.reasons import Reason
from spectrumkv_sglang.payload.codec import KVBuffers
from spectrumkv_sglang.transfer.control_channel import ControlChannel, ControlChannels
from spectrumkv_sglang.transfer.control_listener import ControlListener
from spectrumkv_sglang.transfer.decode_rank import DecodeRank
from spectrumkv_sglang.transfer.errors import ControlMessageError, GoNativeError
from spectrumkv_sglang.transfer.messages import (
    MAX_ANSWER_BYTES,
    MOST_UNREAD_MESSAGES,
    Close,
    Done,
    Refused,
    encode,
)
from spectrumkv_sglang.transfer.pool_view import PoolView

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def context() -> Iterator[Any]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@given(host=st.text(max_size=30))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_endpoint_that_cannot_be_reached_is_no_reason_to_fail(context: Any, host: str) -> None:
    """A handshake may name anything behind tcp://."""
    channels = ControlChannels(context)
    refusal: GoNativeError | None = None
    try:
        channels.get("tcp://" + host)
    except GoNativeError as error:
        refusal = error
    assert refusal is None or refusal.reason is Reason.CONTROL_ERROR
    channels.close()


def test_only_the_most_recent_channels_stay_open(context: Any) -> None:
    channels = ControlChannels(context)
    first = channels.get("tcp://127.0.0.1:1")
    for port in range(2, 301):
        channels.get(f"tcp://127.0.0.1:{port}")
    assert first._socket.closed
    assert not channels.get("tcp://127.0.0.1:300")._socket.closed
    assert len(channels._channels) == 256
    channels.close()


def met(context: Any, **options: int) -> tuple[Any, ControlChannels, ControlChannel, bytes]:
    """A bare router with zmq ``options`` as decode, and a channel that it has heard from, by its identity."""
    router = context.socket(zmq.ROUTER)
    for name, value in options.items():
        router.setsockopt(getattr(zmq, name), value)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    channels = ControlChannels(context)
    channel = channels.get(f"tcp://127.0.0.1:{port}")
    channel.send(Close(1, []))
    identity, _ = router.recv_multipart()
    return router, channels, channel, identity


def test_messages_of_earlier_chunks_are_dropped_and_counted(context: Any) -> None:
    router, channels, channel, identity = met(context)
    answer = Done(9, 0, 0, 1, 0.0)
    for chunk in (7, 8):
        router.send_multipart([identity, encode(Done(chunk, 0, 0, 1, 0.0))])
    router.send_multipart([identity, encode(answer)])
    assert channel.receive(9, timeout=10) == answer
    assert channel.stale_messages == 2
    router.send_multipart([identity, b"garbage"])
    with pytest.raises(ControlMessageError):
        channel.receive(9, timeout=10)
    started = time.monotonic()
    assert channel.receive(9, timeout=0.2) is None
    assert 0.19 <= time.monotonic() - started < 5
    channels.close()


def test_a_flood_of_other_messages_does_not_outlast_the_timeout(context: Any) -> None:
    router, channels, channel, identity = met(context, SNDHWM=0, RCVHWM=0)
    for _ in range(100_000):
        router.send_multipart([identity, encode(Done(7, 0, 0, 1, 0.0))])
    assert channel.receive(9, timeout=0.05) is None
    assert 0 < channel.stale_messages < 100_000
    channels.close()


def taken_unread(send: Callable[[bytes], Any]) -> int:
    """How many frames of 60 KiB a peer gets rid of before somebody reads them."""
    frames, waited = 0, 0
    while waited < 20 and frames < 1000:
        try:
            send(b"x" * (60 << 10))
            frames, waited = frames + 1, 0
        except zmq.Again:
            waited += 1
            time.sleep(0.02)
    return frames


def test_what_decode_does_not_read_waits_with_its_sender(context: Any) -> None:
    """A flood must not fill decode's memory while its control thread is busy; the kernel's buffers take some MB."""
    listener = ControlListener(context, bind_host=HOST, advertised_host=HOST)
    flooding, other = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    flooding.setsockopt(zmq.SNDHWM, 1)
    for socket in (flooding, other):
        socket.connect(listener.endpoint)
    taken = taken_unread(lambda frame: flooding.send(frame, zmq.NOBLOCK))
    assert MOST_UNREAD_MESSAGES <= taken < 700
    other.send(b"of another peer")
    got = []
    while listener.socket.poll(1000):
        got.append(len(listener.socket.recv_multipart()[1]))
    assert sorted(got) == [len(b"of another peer"), *[60 << 10] * taken]


def test_what_prefill_does_not_read_waits_with_decode(context: Any) -> None:
    router, channels, _, identity = met(context, SNDHWM=1, ROUTER_MANDATORY=1)
    taken = taken_unread(lambda frame: router.send_multipart([identity, frame], zmq.NOBLOCK))
    assert MOST_UNREAD_MESSAGES <= taken < 700
    channels.close()


def test_an_answer_longer_than_any_of_decode_is_not_read(context: Any) -> None:
    router, channels, channel, identity = met(context)
    longest = Refused(9, "\N{PILE OF POO}" * 2048, "\N{PILE OF POO}" * 2048)
    router.send_multipart([identity, encode(longest)])
    assert channel.receive(9, timeout=10) == longest
    router.send_multipart([identity, b"x" * (MAX_ANSWER_BYTES + 1)])
    assert channel.receive(9, timeout=0.2) is None
    assert channel.frame_bytes < MAX_ANSWER_BYTES
    channels.drop(channel.endpoint)  # as a sender does with a channel whose answer did not come
    channels.get(channel.endpoint).send(Close(2, []))
    assert router.poll(10_000)
    channels.close()


# ---- where decode listens --------------------------------------------------------------------------------------------


def decode_rank(engine: Any, host: str, control_host: str | None) -> DecodeRank:
    buffers = KVBuffers(
        [torch.zeros(16, GEOMETRY.kv_heads, GEOMETRY.head_dim)] * GEOMETRY.layers,
        [torch.zeros(16, GEOMETRY.kv_heads, GEOMETRY.v_head_dim)] * GEOMETRY.layers,
    )
    return DecodeRank(
        view=PoolView(buffers, GEOMETRY, torch.device("cpu"), 16),
        config=SpectrumKVConfig(slot_bytes=65536, control_host=control_host),
        engine=engine,
        host=host,
        metrics=TransferMetrics("decode", 0, registry=CollectorRegistry()),
    )


@pytest.mark.parametrize(
    ("control_host", "advertised"),
    [(None, HOST), ("127.0.0.2", "127.0.0.2"), ("0.0.0.0", HOST), ("*", HOST)],
)
def test_prefill_is_told_an_address_that_it_can_reach(engine: Any, control_host: str | None, advertised: str) -> None:
    rank = decode_rank(engine, HOST, control_host)
    assert rank.handshake.control_endpoint.startswith(f"tcp://{advertised}:")
    rank.close()


def test_ipv6_addresses_stand_in_brackets(engine: Any) -> None:
    rank = decode_rank(engine, "fd00::7", "::")
    assert rank.handshake.control_endpoint.startswith("tcp://[fd00::7]:")
    rank.close()


@pytest.mark.parametrize("control_host", ["203.0.113.9", "no such host", "decode:7"])
def test_an_address_that_decode_cannot_listen_on_is_named_and_leaves_nothing(engine: Any, control_host: str) -> None:
    for _ in range(2):  # a landing region left registered would overlap the next
        with pytest.raises(SpectrumKVError, match=r"SPECTRUMKV_CONTROL_HOST") as error:
            decode_rank(engine, HOST, control_host)
        assert repr(control_host) in str(error.value)
    decode_rank(engine, HOST, None).close()
