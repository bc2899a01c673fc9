"""Network namespaces, veth pairs and slow links on one machine, without the ``ip`` or ``tc`` programs (root only).

A server started inside a namespace sees only that namespace's interfaces, so bytes counted there are the server's
own, and two namespaces joined by a veth pair behave like two hosts with a link of known rate.

The namespaces have no name in the file system: each lives as long as this object holds it open or a process runs in
it. Nothing is left behind, even after SIGKILL. A thread enters a namespace for a while with ``entered()``; the
sockets that it opens there and the processes that it starts there stay in the namespace.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from spectrumkv_sglang.errors import SpectrumKVError

LOOPBACK = "lo"
_CLONE_NEWNET = 0x40000000
_THREAD_NETNS = "/proc/thread-self/ns/net"
_TBF_MIN_BURST_BYTES = 512 * 1024
_TBF_LATENCY = "50ms"
_TBF_HANDLE = 0x10000


class NamespaceError(SpectrumKVError):
    """A namespace, interface or queueing discipline could not be made."""


@dataclass(frozen=True)
class InterfaceBytes:
    """Byte counters of one interface: link-layer bytes, as the kernel counts them."""

    received: int
    sent: int

    def __sub__(self, earlier: InterfaceBytes) -> InterfaceBytes:
        return InterfaceBytes(self.received - earlier.received, self.sent - earlier.sent)


def namespaces_available() -> bool:
    """Whether this process may make network namespaces: root, Linux, pyroute2 installed."""
    try:
        _require_root()
        _iproute_class()
    except NamespaceError:
        return False
    return True


def interface_bytes(interface: str) -> InterfaceBytes:
    """Return the counters of ``interface`` in the calling thread's namespace.

    On the loopback interface each byte is sent once and received once, so either counter is the traffic.

    Raises:
        NamespaceError: there is no such interface.
    """
    lines = Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines()
    for line in lines[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            columns = numbers.split()
            return InterfaceBytes(received=int(columns[0]), sent=int(columns[8]))
    raise NamespaceError(f"no interface {interface!r} in this network namespace")


class NetworkNamespace:
    """An unnamed network namespace with its loopback interface up; a context manager that closes it.

    Args:
        label: name for messages.

    Raises:
        NamespaceError: not root, not Linux, or pyroute2 is missing.
    """

    def __init__(self, label: str = "servers") -> None:
        _require_root()
        _iproute_class()
        self.label = label
        with _current_namespace_kept():
            _check(_libc().unshare(_CLONE_NEWNET), "unshare(CLONE_NEWNET)")
            self._fd = os.open(_THREAD_NETNS, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _bring_up(LOOPBACK)
                # BBR, where it is the default, caps a local link far below its rate.
                Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno", encoding="ascii")
            except BaseException:
                self.close()
                raise

    @property
    def fd(self) -> int:
        """File descriptor of the namespace.

        Raises:
            NamespaceError: it is closed.
        """
        if self._fd < 0:
            raise NamespaceError(f"network namespace {self.label!r} is closed")
        return self._fd

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Put the calling thread, and no other, into the namespace for the length of the block."""
        target = self.fd
        with _current_namespace_kept():
            _enter(target)
            yield

    def interface_bytes(self, interface: str = LOOPBACK) -> InterfaceBytes:
        """Return the counters of one of the namespace's interfaces."""
        with self.entered():
            return interface_bytes(interface)

    def close(self) -> None:
        """Let go of the namespace; the kernel removes it when no process runs in it. Safe to repeat."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> NetworkNamespace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Link:
    """Two namespaces joined by a veth pair: one "host" on each end."""

    left: NetworkNamespace
    right: NetworkNamespace
    left_address: str
    right_address: str
    left_interface: str
    right_interface: str

    def set_rate(self, rate_bits_per_second: int | None) -> None:
        """Limit each direction to another rate (see ``linked_hosts``), or lift the limit; what runs goes on.

        Raises:
            NamespaceError: a rate below 1 Mbit/s.
        """
        _check_rate(rate_bits_per_second)
        for host, interface in ((self.left, self.left_interface), (self.right, self.right_interface)):
            with host.entered(), _iproute() as route:
                index = route.link_lookup(ifname=interface)[0]
                if any(discipline.get_attr("TCA_KIND") == "tbf" for discipline in route.get_qdiscs(index)):
                    route.tc("del", index=index, parent=0xFFFFFFFF)
                if rate_bits_per_second is not None:
                    _limit(route, index, rate_bits_per_second)

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Lose every packet of both directions for the length of the block, as a broken cable between switches does.

        Interfaces stay up, so that each host still reaches itself. A rate limit is lifted first and not set again.

        Raises:
            NamespaceError: the kernel refuses.
        """
        self.set_rate(None)
        try:
            for host, interface in ((self.left, self.left_interface), (self.right, self.right_interface)):
                with host.entered(), _iproute() as route:
                    index = route.link_lookup(ifname=interface)[0]
                    # A token bucket that holds less than the smallest frame drops each one.
                    route.tc("add", "tbf", index=index, handle=_TBF_HANDLE, rate=1000, burst=16, latency=_TBF_LATENCY)
            yield
        finally:
            self.set_rate(None)

    def bytes_left_to_right(self) -> int:
        """Link-layer bytes that have left the left host so far."""
        return self.left.interface_bytes(self.left_interface).sent

    def bytes_right_to_left(self) -> int:
        """Link-layer bytes that have left the right host so far."""
        return self.right.interface_bytes(self.right_interface).sent


@contextmanager
def linked_hosts(*, rate_bits_per_second: int | None = None, subnet: str = "192.168.77") -> Iterator[Link]:
    """Make two namespaces joined by a veth pair, each direction limited to a rate if one is given.

    The limit is a token bucket (tbf) whose burst is the larger of 512 KiB and 1 ms of the rate. With both hosts on
    few cores, stay at or below 1 Gbit/s and check bytes as well as time.

    Args:
        rate_bits_per_second: rate of each direction; None leaves the link unlimited.
        subnet: first three numbers of the /24 network; the hosts are ``.1`` and ``.2``.

    Raises:
        NamespaceError: not root, or the kernel refuses.
    """
    _check_rate(rate_bits_per_second)
    with ExitStack() as stack:
        left = stack.enter_context(NetworkNamespace("left"))
        right = stack.enter_context(NetworkNamespace("right"))
        link = Link(left, right, f"{subnet}.1", f"{subnet}.2", "veth-left", "veth-right")
        with left.entered(), _iproute() as route:
            peer = {"ifname": link.right_interface, "net_ns_fd": right.fd}
            route.link("add", ifname=link.left_interface, kind="veth", peer=peer)
        for host, interface, address in (
            (left, link.left_interface, link.left_address),
            (right, link.right_interface, link.right_address),
        ):
            with host.entered():
                _bring_up(interface, address=address, rate_bits_per_second=rate_bits_per_second)
        yield link


def _bring_up(interface: str, *, address: str | None = None, rate_bits_per_second: int | None = None) -> None:
    """Configure an interface of the calling thread's namespace."""
    with _iproute() as route:
        index = route.link_lookup(ifname=interface)[0]
        if address is not None:
            route.addr("add", index=index, address=address, prefixlen=24)
        route.link("set", index=index, state="up")
        if rate_bits_per_second is not None:
            _limit(route, index, rate_bits_per_second)


def _check_rate(rate_bits_per_second: int | None) -> None:
    if rate_bits_per_second is not None and rate_bits_per_second < 1_000_000:
        raise NamespaceError(f"rate_bits_per_second is {rate_bits_per_second}, expected at least 1000000 (1 Mbit/s)")


def _limit(route: Any, index: int, rate_bits_per_second: int) -> None:
    bytes_per_second = rate_bits_per_second // 8
    burst = max(_TBF_MIN_BURST_BYTES, bytes_per_second // 1000)
    route.tc("add", "tbf", index=index, handle=_TBF_HANDLE, rate=bytes_per_second, burst=burst, latency=_TBF_LATENCY)


@contextmanager
def _current_namespace_kept() -> Iterator[None]:
    """Bring the calling thread back to the namespace that it is in now, whatever the block does."""
    home = os.open(_THREAD_NETNS, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        try:
            _enter(home)
        finally:
            os.close(home)


def _enter(fd: int) -> None:
    _check(_libc().setns(fd, _CLONE_NEWNET), "setns")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise NamespaceError(f"{call} failed: {os.strerror(number)} (network namespaces need root, CAP_SYS_ADMIN)")


def _require_root() -> None:
    if not os.path.exists(_THREAD_NETNS):
        raise NamespaceError("network namespaces need Linux with /proc mounted")
    if os.geteuid() != 0:
        raise NamespaceError(
            f"network namespaces need root, this process runs as user {os.geteuid()}: use sudo, or leave them out"
        )


def _iproute_class() -> Any:
    try:
        from pyroute2 import IPRoute
    except ImportError as error:
        raise NamespaceError("network namespaces need pyroute2: run `make setup`, or pip install pyroute2") from error
    return IPRoute


@contextmanager
def _iproute() -> Iterator[Any]:
    """Open a netlink socket in the calling thread's namespace."""
    route = _iproute_class()()
    try:
        yield route
    finally:
        route.close()
