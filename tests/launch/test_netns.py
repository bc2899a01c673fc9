"""Network namespaces: private counters, private ports, a link of known rate. Without root, a clear refusal."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

import pytest

from spectrumkv_sglang.launch.netns import (
    NamespaceError,
    NetworkNamespace,
    interface_bytes,
    linked_hosts,
    namespaces_available,
)

AVAILABLE = namespaces_available()


def for_root(test: Callable[[], None]) -> Callable[[], None]:
    """Run the test as root; for other users check instead that the refusal says what is missing."""

    def refused() -> None:
        with pytest.raises(NamespaceError, match=r"need root|need pyroute2|need Linux"):
            NetworkNamespace()

    refused.__doc__ = test.__doc__
    return test if AVAILABLE else refused


def send(receiver: socket.socket, sender: socket.socket, count: int) -> float:
    """Send ``count`` bytes between connected sockets; return the seconds that it took."""
    thread = threading.Thread(target=sender.sendall, args=(bytes(count),))
    started = time.monotonic()
    thread.start()
    left = count
    while left:
        left -= len(receiver.recv(min(left, 1 << 20)))
    thread.join()
    return time.monotonic() - started


def connected(listener_host, listener_address: str, caller_host) -> tuple[socket.socket, socket.socket]:
    with listener_host.entered():
        listener = socket.create_server((listener_address, 0))
    with listener, caller_host.entered():
        caller = socket.create_connection(listener.getsockname(), timeout=10)
        accepted, _ = listener.accept()
    return accepted, caller


@for_root
def test_loopback_counters_are_the_namespaces_own() -> None:
    with NetworkNamespace() as namespace:
        assert namespace.interface_bytes().sent == 0
        receiver, sender = connected(namespace, "127.0.0.1", namespace)
        before = namespace.interface_bytes()
        with receiver, sender:
            send(receiver, sender, 10_000_000)
        crossed = namespace.interface_bytes() - before
        assert crossed.sent == crossed.received
        assert 10_000_000 <= crossed.sent <= 10_300_000


@for_root
def test_only_the_entering_thread_is_inside_and_only_for_the_block() -> None:
    home = os.stat("/proc/thread-self/ns/net").st_ino
    with NetworkNamespace() as namespace:
        seen: list[int] = []
        with namespace.entered():
            assert os.stat("/proc/thread-self/ns/net").st_ino != home
            other = threading.Thread(target=lambda: seen.append(os.stat("/proc/self/ns/net").st_ino))
        other.start()
        other.join()
        assert seen == [home]
        with pytest.raises(RuntimeError, match="left early"), namespace.entered():
            raise RuntimeError("left early")
        assert os.stat("/proc/thread-self/ns/net").st_ino == home
    with pytest.raises(NamespaceError, match="is closed"), namespace.entered():
        pass


@for_root
def test_a_limited_link_keeps_its_rate_and_counts_each_direction() -> None:
    with linked_hosts(rate_bits_per_second=200_000_000) as link:
        receiver, sender = connected(link.right, link.right_address, link.left)
        with receiver, sender:
            seconds = send(receiver, sender, 5_000_000)
        assert 8 * 5_000_000 / seconds < 260_000_000  # the bucket's first burst comes on top of the rate
        assert 5_000_000 <= link.bytes_left_to_right() <= 5_400_000
        assert link.bytes_right_to_left() < 200_000


@for_root
def test_namespaces_leave_no_open_files_behind() -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    with linked_hosts():
        pass
    before = open_files()
    for _ in range(3):
        with linked_hosts():
            pass
    assert open_files() == before


def test_an_interface_that_does_not_exist_is_named() -> None:
    with pytest.raises(NamespaceError, match="no interface 'nothing0'"):
        interface_bytes("nothing0")


def test_a_rate_below_one_megabit_is_refused() -> None:
    with pytest.raises(NamespaceError, match="expected at least 1000000"), linked_hosts(rate_bits_per_second=1000):
        pass


@for_root
def test_a_links_rate_can_change_while_connections_live() -> None:
    megabyte = 1_000_000
    with linked_hosts() as link:
        receiver, sender = connected(link.right, link.right_address, link.left)
        with receiver, sender:
            seconds = {}
            for name, rate in (("first", None), ("slow", 80_000_000), ("fast", 800_000_000), ("free", None)):
                link.set_rate(rate)
                send(receiver, sender, megabyte)  # what an empty bucket lets through at once
                seconds[name] = send(receiver, sender, 4 * megabyte)
            assert 0.3 < seconds["slow"] < 3.0
            assert seconds["fast"] < seconds["slow"] / 2
            assert seconds["free"] < seconds["slow"] / 2
        with pytest.raises(NamespaceError, match="1 Mbit/s"):
            link.set_rate(1000)


@for_root
def test_a_cut_link_loses_everything_until_it_is_back_and_each_host_still_reaches_itself() -> None:
    with linked_hosts() as link:
        accepted, caller = connected(link.right, link.right_address, link.left)
        with accepted, caller:
            accepted.settimeout(0.5)
            with link.cut():
                caller.sendall(b"lost and sent again")
                with pytest.raises(TimeoutError):
                    accepted.recv(1)
                for end in connected(link.right, link.right_address, link.right):
                    end.close()
            accepted.settimeout(30)
            assert accepted.recv(100) == b"lost and sent again"
