"""Prefill's side of the control channel: one DEALER socket per worker thread and decode endpoint."""

from __future__ import annotations

import time
from collections import OrderedDict

import zmq

from spectrumkv_sglang.observability.reasons import FailureCause, Reason
from spectrumkv_sglang.transfer.control_keys import ControlKeys
from spectrumkv_sglang.transfer.errors import ChunkFailedError, GoNativeError
from spectrumkv_sglang.transfer.messages import (
    MAX_ANSWER_BYTES,
    MOST_UNREAD_MESSAGES,
    DecodeMessage,
    PrefillMessage,
    decode_from_decode,
    encode,
)

_SEND_TIMEOUT_MS = 5000
_MOST_CHANNELS = 256
_CURVE_BYTES = 33  # command name, nonce, authenticator and flags around each frame (CurveZMQ, RFC 26)


class ControlChannel:
    """Request and reply with one decode rank. Not thread-safe: each worker thread owns its channels."""

    def __init__(
        self,
        context: zmq.Context,  # type: ignore[type-arg]
        endpoint: str,
        keys: ControlKeys | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.frame_bytes = 0  # bytes of frames sent and received, for wire accounting
        self.stale_messages = 0
        self._around = 0 if keys is None else _CURVE_BYTES
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDTIMEO, _SEND_TIMEOUT_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_ANSWER_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, MOST_UNREAD_MESSAGES)
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.decode.public)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.prefill.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.prefill.private)
        if endpoint.startswith("tcp://["):
            self._socket.setsockopt(zmq.IPV6, 1)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError:
            self._socket.close()
            raise

    def send(self, message: PrefillMessage) -> None:
        """Queue one message. Raises ChunkFailedError(bad_message) when the socket does not take it in time."""
        frame = encode(message)
        try:
            self._socket.send(frame)
        except zmq.ZMQError as error:
            raise ChunkFailedError(
                FailureCause.BAD_MESSAGE, f"control message to {self.endpoint} could not be sent: {error}"
            ) from error
        self.frame_bytes += len(frame) + self._around

    def receive(self, chunk: int, timeout: float) -> DecodeMessage | None:
        """Next message that belongs to ``chunk``, or None after ``timeout`` seconds.

        Messages of earlier chunks are dropped and counted; garbage raises ControlMessageError.
        """
        deadline = time.monotonic() + timeout
        while True:
            remaining = deadline - time.monotonic()
            if not self._socket.poll(max(0, int(remaining * 1000))):
                return None
            frame = self._socket.recv(zmq.NOBLOCK)
            self.frame_bytes += len(frame) + self._around
            message = decode_from_decode(frame)
            if message.chunk == chunk:
                return message
            self.stale_messages += 1
            if time.monotonic() > deadline:  # a peer that floods us must not keep us here
                return None

    def close(self) -> None:
        self._socket.close(linger=0)


class ControlChannels:
    """The channels of one worker thread, least recently used ones closed first."""

    def __init__(self, context: zmq.Context, keys: ControlKeys | None = None) -> None:  # type: ignore[type-arg]
        self._context, self._keys = context, keys
        self._channels: OrderedDict[str, ControlChannel] = OrderedDict()

    def get(self, endpoint: str) -> ControlChannel:
        """The channel to ``endpoint``. Raises GoNativeError(control_error) when it cannot be opened."""
        channel = self._channels.get(endpoint)
        if channel is None:
            try:
                channel = ControlChannel(self._context, endpoint, self._keys)
            except zmq.ZMQError as error:
                raise GoNativeError(
                    Reason.CONTROL_ERROR, f"cannot open a control channel to {endpoint}: {error}"
                ) from error
            self._channels[endpoint] = channel
            if len(self._channels) > _MOST_CHANNELS:
                self._channels.popitem(last=False)[1].close()
        self._channels.move_to_end(endpoint)
        return channel

    def drop(self, endpoint: str) -> None:
        """Close the channel to ``endpoint``, so that the next chunk starts from a fresh connection."""
        channel = self._channels.pop(endpoint, None)
        if channel is not None:
            channel.close()

    def close(self) -> None:
        while self._channels:
            self._channels.popitem()[1].close()
