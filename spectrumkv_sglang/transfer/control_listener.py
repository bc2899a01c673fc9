"""Decode's listening socket of the control channel: where it binds, and who may connect.

With keys the socket speaks CURVE and nothing else: a peer without the secret never gets a message past libzmq. Its
attempt is seen through the socket's monitor and through ZAP (ZeroMQ RFC 27), where libzmq asks about each client key.
"""

from __future__ import annotations

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.transfer.control_keys import ControlKeys
from spectrumkv_sglang.transfer.messages import MAX_MESSAGE_BYTES, MOST_UNREAD_MESSAGES

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"spectrumkv"
_ZAP_FRAMES = 7  # version, request id, domain, address, identity, mechanism, client key
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_MOST_AT_ONCE = 64


class ControlListener:
    """A ROUTER socket on a port of ``ports``. Used by one thread after it was made.

    Args:
        bind_host: address to bind to.
        advertised_host: address of this host that prefill ranks reach the socket at.
        ports: ports to choose from, the first free one from number ``rank`` on; empty: a random port.
        rank: number of this rank among those that share ``ports``.
        keys: None: whoever reaches the port may speak.

    Raises:
        SpectrumKVError: the address or none of the ports can be bound.
    """

    def __init__(
        self,
        context: zmq.Context,  # type: ignore[type-arg]
        *,
        bind_host: str,
        advertised_host: str,
        ports: range = range(0),
        rank: int = 0,
        keys: ControlKeys | None = None,
    ) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self.socket.setsockopt(zmq.RCVHWM, MOST_UNREAD_MESSAGES)
        self.socket.setsockopt(zmq.IPV6, int(":" in bind_host))
        self._zap: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        if keys is not None:
            self._client_key = z85.decode(keys.prefill.public)
            self._zap = context.socket(zmq.ROUTER)
            self._zap.setsockopt(zmq.LINGER, 0)
            self._zap.bind(_ZAP_ENDPOINT)
            self.socket.setsockopt(zmq.CURVE_SERVER, 1)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.decode.private)
            self.socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
            self._monitor = self.socket.get_monitor_socket(_FAILED)
        port = self._bind(bind_host, ports, rank)
        self.endpoint = f"tcp://{_in_url(advertised_host)}:{port}"

    def register(self, poller: zmq.Poller) -> None:
        """Make ``poller`` wake up for everything that :meth:`refusals` and ``socket`` have to do."""
        for socket in (self.socket, self._zap, self._monitor):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)

    def refusals(self) -> int:
        """Answer libzmq's questions about client keys; returns how many connections failed since the last call."""
        if self._zap is None or self._monitor is None:
            return 0
        for _ in range(_MOST_AT_ONCE):
            try:
                frames = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._answer(self._zap, frames)
        failed = 0
        for _ in range(_MOST_AT_ONCE):
            try:
                recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                break
            failed += 1
        return failed

    def _answer(self, zap: zmq.Socket[bytes], frames: list[bytes]) -> None:
        identity, empty, *request = frames
        known = (
            len(request) == _ZAP_FRAMES
            and request[0] == b"1.0"
            and request[5] == b"CURVE"
            and request[6] == self._client_key
        )
        status = (b"200", b"OK") if known else (b"400", b"unknown key")
        zap.send_multipart([identity, empty, b"1.0", request[1], *status, b"prefill" if known else b"", b""])

    def _bind(self, host: str, ports: range, rank: int) -> int:
        where = f"tcp://{_in_url(host)}"
        try:
            if not ports:
                return int(self.socket.bind_to_random_port(where))
            for number in range(len(ports)):
                port = ports[(rank + number) % len(ports)]
                try:
                    self.socket.bind(f"{where}:{port}")
                except zmq.ZMQError as error:
                    if error.errno != zmq.EADDRINUSE:
                        raise
                    continue
                return port
        except zmq.error.ZMQBaseError as error:
            raise SpectrumKVError(
                f"decode's control channel cannot listen on {host!r} ({error}): set control_host "
                "(SPECTRUMKV_CONTROL_HOST) to an IP address of this host that prefill can reach, and control_port to "
                "ports that this process may bind"
            ) from error
        raise SpectrumKVError(
            f"decode's control channel finds no free port on {host!r} among control_port {ports[0]}-{ports[-1]}: "
            "give it a range with a port for each decode rank of this host (SPECTRUMKV_CONTROL_PORT=18000-18015)"
        )


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
