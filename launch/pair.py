"""A prefill and a decode server of one launch config on this machine, and a router in front, kept together.

They are started, waited for and watched as one: when one ends, or on SIGINT, SIGTERM or SIGHUP, all end.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from spectrumkv_sglang.launch.client import HttpError, get
from spectrumkv_sglang.launch.processes import PROGRESS_SECONDS, ManagedProcess, stop_processes, stopping_on_signals
from spectrumkv_sglang.launch.server_commands import LaunchError, ServerCommand, router_command, server_command
from spectrumkv_sglang.launch_config import LaunchConfig
from spectrumkv_sglang.launch_flags import last_value

DEFAULT_ROUTER_HOST = "127.0.0.1"
DEFAULT_ROUTER_PORT = 8000
DEFAULT_READY_TIMEOUT_SECONDS = 1800.0
DEFAULT_LOG_DIR = Path("spectrumkv-logs")
# Decode's default port above prefill's: farther than the ports that SGLang derives for data-parallel attention.
_DECODE_PORT_OFFSET = 1000
# SGLang looks for a SIGTERM every 5 seconds, finishes the requests that are running and gives its schedulers 15 seconds
# to release what they hold. After a failure there is nothing to finish: no request gets past the one that is gone.
_GRACE_SECONDS = 30.0
_GRACE_AFTER_FAILURE_SECONDS = 1.0
_SHARED_MEMORY = "/dev/shm/sglang_loads_"
_HEALTH_SECONDS = 0.5
# One server each: a flag for both cannot be meant.
_ROLE_FLAGS = ("--port", "--disaggregation-bootstrap-port")


@dataclass(frozen=True)
class PairCommands:
    """How to start the three programs of a pair."""

    prefill: ServerCommand
    decode: ServerCommand
    router: ServerCommand

    @property
    def all(self) -> tuple[ServerCommand, ...]:
        """In the order in which they start."""
        return (self.prefill, self.decode, self.router)

    @property
    def ports(self) -> dict[str, int]:
        """TCP ports by what they are for.

        Raises:
            LaunchError: a flag's value is no port.
        """
        return {
            "prefill": self.prefill.port,
            "prefill's bootstrap service": self.prefill.bootstrap_port,
            "decode": self.decode.port,
            "router": self.router.port,
        }


def pair_commands(
    config: LaunchConfig,
    path: Path,
    further: Sequence[str] = (),
    *,
    strict: bool = False,
    router_host: str = DEFAULT_ROUTER_HOST,
    router_port: int = DEFAULT_ROUTER_PORT,
    environ: Mapping[str, str] = os.environ,
) -> PairCommands:
    """Commands of a pair; decode gets a port of its own where the file names none.

    Args:
        further: flags for both servers, put last.
        router_host: address that the router listens on.
        router_port: its port.
        config, path, strict, environ: as in ``server_command``.

    Raises:
        LaunchError: two servers would share a port, or speak HTTPS.
    """
    for flag in _ROLE_FLAGS:
        if any(argument.partition("=")[0] == flag for argument in further):
            raise LaunchError(
                f"{flag} would hold for both servers of the pair: put {flag.lstrip('-')} under sglang: prefill: or "
                f"decode: in {path}"
            )
    prefill = server_command(config, path, "prefill", further, strict=strict, environ=environ)
    decode_port = ("--port", str(prefill.port + _DECODE_PORT_OFFSET))
    decode = server_command(config, path, "decode", further, strict=strict, defaults=decode_port, environ=environ)
    for server in (prefill, decode):
        if last_value(server.arguments, "--ssl-certfile") is not None:
            raise LaunchError(
                f"{server.name} has --ssl-certfile, but the pair's router reaches its servers by plain HTTP: leave it "
                "out, or start the servers with `spectrumkv launch prefill` and `decode` and a router of your own"
            )
    router = router_command(
        prefill, decode, host=router_host, port=router_port, small_load_balancer=not _native_router_works()
    )
    commands = PairCommands(prefill, decode, router)
    _require_distinct_ports(commands, path)
    return commands


def run_pair(
    commands: PairCommands,
    *,
    log_dir: Path = DEFAULT_LOG_DIR,
    ready_timeout_seconds: float = DEFAULT_READY_TIMEOUT_SECONDS,
    say: Callable[[str], None] = print,
) -> None:
    """Run a pair until it is told to stop, or one of its programs ends. Leaves no process behind.

    Args:
        log_dir: folder for one log a program; it is created.
        ready_timeout_seconds: for the servers to become healthy.
        say: takes what the operator should see.

    Raises:
        ProcessError: a program could not start, or ended: with its exit status and the end of its log.
        LaunchError: a port is taken, the log folder cannot be made, or the servers were not healthy in time.
        SystemExit: 128 + signal, when a signal stopped it.
    """
    _require_free_ports(commands)
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"cannot make the log folder {log_dir}: {error.strerror}; name another, --log-dir") from error
    members = [_Member(command, log_dir) for command in commands.all]
    prefill, decode, router = members
    grace_seconds = _GRACE_AFTER_FAILURE_SECONDS
    try:
        with stopping_on_signals():
            try:
                for server in (prefill, decode):
                    server.start()
                    say(f"starting {server.name}, log {server.log_path}")
                _wait_ready((prefill, decode), (prefill, decode), ready_timeout_seconds, say)
                # The native router takes servers that do not answer yet for broken ones.
                router.start()
                _wait_ready((router,), members, ready_timeout_seconds, say)
                say(f"the pair is ready: send requests to {commands.router.url}; Ctrl-C ends it")
                while True:
                    for member in members:
                        member.check_alive()
                    time.sleep(_HEALTH_SECONDS)
            except (KeyboardInterrupt, SystemExit):
                grace_seconds = _GRACE_SECONDS
                raise
            finally:
                stop_processes(members, grace_seconds)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


class _Member(ManagedProcess):
    """One program of the pair."""

    def __init__(self, command: ServerCommand, log_dir: Path) -> None:
        super().__init__(
            command.name,
            command.arguments,
            env={**os.environ, **command.variables},
            cwd=Path.cwd(),
            log_path=log_dir / f"{command.name}.log",
        )
        self.url = command.url
        self._shared_memory: set[Path] = set()

    def ready(self) -> bool:
        """Whether it answers health requests."""
        try:
            get(f"{self.url}/health", timeout_seconds=30.0)
        except HttpError:
            return False
        return True

    def remember_shared_memory(self) -> None:
        """Note which load statistics its schedulers share with its HTTP server. SGLang never unlinks the files, and
        nothing tells whose they are once the processes have ended."""
        leader = psutil.Process(self.pid)
        for process in (leader, *leader.children(recursive=True)):
            with suppress(psutil.Error):
                mapped = [found.path for found in process.memory_maps()]
                self._shared_memory.update(Path(path) for path in mapped if path.startswith(_SHARED_MEMORY))

    def stop(self, grace_seconds: float = _GRACE_AFTER_FAILURE_SECONDS) -> None:
        """End it and all its descendants, and remove what they leave in shared memory. Safe to repeat."""
        super().stop(grace_seconds)
        for left in self._shared_memory:
            left.unlink(missing_ok=True)


def _wait_ready(
    awaited: Sequence[_Member], running: Sequence[_Member], timeout_seconds: float, say: Callable[[str], None]
) -> None:
    waiting = list(awaited)
    started = told = time.monotonic()
    while waiting:
        for member in running:
            member.check_alive()
        for member in list(waiting):
            if member.ready():
                waiting.remove(member)
                member.remember_shared_memory()
                say(f"{member.name} is healthy after {time.monotonic() - started:.0f} s: {member.url}")
        if waiting and time.monotonic() - told >= PROGRESS_SECONDS:
            told = time.monotonic()
            say(f"waiting for {', '.join(member.name for member in waiting)}, {told - started:.0f} s so far")
        if waiting and time.monotonic() - started > timeout_seconds:
            slow = waiting[0]
            raise LaunchError(
                f"{', '.join(member.name for member in waiting)} not healthy after {timeout_seconds:g} s "
                f"(--ready-timeout); the log of {slow.name}, {slow.log_path}, ends with:\n{slow.log_tail()}"
            )
        if waiting:
            time.sleep(_HEALTH_SECONDS)


def _require_distinct_ports(commands: PairCommands, path: Path) -> None:
    owners: dict[int, str] = {}
    for owner, port in commands.ports.items():
        if port in owners:
            raise LaunchError(
                f"{owners[port]} and {owner} would both listen on port {port}: give them ports of their own, in {path} "
                "under sglang: prefill: and decode: (port, disaggregation-bootstrap-port), the router's with "
                "--router-port"
            )
        owners[port] = owner


def _require_free_ports(commands: PairCommands) -> None:
    for owner, port in commands.ports.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                raise LaunchError(
                    f"port {port} of {owner} cannot be used ({error.strerror}): stop what listens there, or choose "
                    "another port (in the launch config; the router's with --router-port)"
                ) from error


def _native_router_works() -> bool:
    """Whether SGLang's router can run, rather than only the small load balancer that comes with it."""
    try:
        importlib.import_module("sglang_router.sglang_router_rs")
    except ImportError:
        return False
    return True
