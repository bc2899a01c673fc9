"""What one plain TCP connection gets of a link: the rate that transfers on it can be compared with."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

from spectrumkv_sglang.launch.netns import Link

_PIECE = bytes(1 << 20)
_TIMEOUT_SECONDS = 30.0


def goodput_gbps(link: Link, *, seconds: float = 0.6) -> float:
    """Gb/s of payload from the left host to the right one over about ``seconds``, its first tenth left out."""
    with link.right.entered():
        listener = socket.create_server((link.right_address, 0))
    with link.left.entered():
        sender = socket.create_connection(listener.getsockname(), timeout=_TIMEOUT_SECONDS)
    with listener, sender:
        receiver, _ = listener.accept()
        ended = threading.Event()
        thread = threading.Thread(target=_send, args=(sender, ended), name="goodput-sender")
        thread.start()
        try:
            with receiver:
                receiver.settimeout(_TIMEOUT_SECONDS)
                buffer = bytearray(1 << 20)
                started = time.monotonic()
                counted, since = 0, None
                while (now := time.monotonic()) < started + seconds:
                    if since is None and now > started + seconds / 10:
                        since, counted = now, 0
                    counted += receiver.recv_into(buffer)
        finally:
            ended.set()
            thread.join()
    if since is None:
        raise OSError(f"no byte arrived on the link within {seconds} s")
    return counted * 8 / (now - since) / 1e9


def _send(sender: socket.socket, ended: threading.Event) -> None:
    with suppress(OSError):  # the receiver closes when it has seen enough
        while not ended.is_set():
            sender.sendall(_PIECE)
