"""Real SGLang servers and the router, on a CPU or a GPU: start, wait until healthy, stop.

    with Fleet() as fleet:
        prefill = fleet.start(SGLangServer(ServerSpec(role=Role.PREFILL, model=model), "prefill"))
        decode = fleet.start(SGLangServer(ServerSpec(role=Role.DECODE, model=model), "decode"))
        router = fleet.start_router(Router(prefill, decode))
        fleet.wait_ready()

Every server listens on loopback (or on the address given), on ports chosen at run time.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import TracebackType

from spectrumkv_sglang.launch.client import HttpError, get
from spectrumkv_sglang.launch.netns import NetworkNamespace
from spectrumkv_sglang.launch.processes import PROGRESS_SECONDS, ManagedProcess, ProcessError, stop_processes
from spectrumkv_sglang.launch.sglang_versions import (
    DECODE_RETRACTION_BACKUP_SINCE,
    DEFAULT_BUILD_DIR,
    installed_version,
    python_path,
    release_number,
)

LOOPBACK_ADDRESS = "127.0.0.1"
DEFAULT_LOG_DIR = DEFAULT_BUILD_DIR / "logs"
READY_TIMEOUT_SECONDS = 600.0
CPU_SHIMS = Path(__file__).parent / "cpu_shims"
_INFINIBAND = Path("/sys/class/infiniband")

# Below the kernel's range for outgoing connections, above the range in which Mooncake listens (15000-17000).
_PORT_RANGE = range(18000, 32000)
_ports_given: set[int] = set()

# The token pool is bounded by --max-total-tokens. The memory fraction only has to be large enough that servers which
# start side by side, and see each other's memory as used, do not refuse to.
_COMMON_FLAGS = ("--sampling-backend", "pytorch", "--grammar-backend", "none", "--mem-fraction-static", "0.9")
# bfloat16 serving on a CPU is untested; an idle scheduler without --sleep-on-idle takes half a core.
_CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
    *("--max-total-tokens", "4096", "--max-running-requests", "8", "--context-length", "2048"),
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--sleep-on-idle"),
)
# A fixed pool keeps servers that start together on one GPU from racing for its memory.
_GPU_FLAGS = (
    *("--attention-backend", "triton", "--dtype", "bfloat16", "--disable-cuda-graph", "--random-seed", "1"),
    *("--max-total-tokens", "131072", "--max-running-requests", "64"),
)


class Role(str, Enum):
    """What a server does: answer alone, or one half of a disaggregated pair."""

    PLAIN = "plain"
    PREFILL = "prefill"
    DECODE = "decode"


class Device(str, Enum):
    """Where a server runs its model."""

    CPU = "cpu"
    CUDA = "cuda"


class ServerError(ProcessError):
    """A server did not become healthy."""


def detect_device() -> Device:
    """CUDA when ``nvidia-smi`` lists a GPU, the CPU otherwise."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Device.CPU
    listing = subprocess.run([program, "-L"], capture_output=True, text=True, check=False)
    return Device.CUDA if listing.returncode == 0 and "GPU" in listing.stdout else Device.CPU


def device_flags(device: Device) -> tuple[str, ...]:
    """Flags of this project's demo and tests for a server on ``device``."""
    return (*_COMMON_FLAGS, *(_CPU_FLAGS if device is Device.CPU else _GPU_FLAGS))


def default_backend() -> str:
    """``spectrumkv`` on a machine with an RDMA device, ``spectrumkv_tcp`` elsewhere."""
    has_rdma = _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())
    return "spectrumkv" if has_rdma else "spectrumkv_tcp"


def free_port(namespace: NetworkNamespace | None = None) -> int:
    """Return a TCP port on which nothing listens; this process never gets the same one twice."""
    with namespace.entered() if namespace is not None else nullcontext():
        for _ in range(1000):
            port = random.choice(_PORT_RANGE)
            if port in _ports_given:
                continue
            with socket.socket() as probe:
                try:
                    probe.bind(("", port))
                except OSError:
                    continue
            _ports_given.add(port)
            return port
    raise ServerError(f"no free TCP port found between {_PORT_RANGE.start} and {_PORT_RANGE.stop}")


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """How to start one SGLang server.

    Attributes:
        role: plain, prefill or decode.
        model: the model's directory; text is passed on as it is (a hub id).
        backend: value of ``--disaggregation-transfer-backend``; not used by a plain server.
        device: CPU or GPU.
        sglang: another SGLang release than the installed one (see ``sglang_versions``).
        host: address to listen on; also the one that Mooncake announces.
        extra_args: flags put last, so that they override the ones chosen here.
        own_flags: put the flags of this project's demo and tests first; False: only what is needed to reach the
            server.
        launch_config: file of `spectrumkv launch`, which then starts a prefill or decode server: model, backend and
            flags come from it.
        env: environment variables on top of the program's own.
        python_paths: folders put in front on ``PYTHONPATH``.
        namespace: network namespace to run in.
        build_dir: where other SGLang releases are unpacked.
    """

    role: Role
    model: Path | str
    backend: str = "mooncake_tcp"
    device: Device = field(default_factory=detect_device)
    sglang: str | None = None
    host: str = LOOPBACK_ADDRESS
    extra_args: tuple[str, ...] = ()
    own_flags: bool = True
    launch_config: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    python_paths: tuple[Path, ...] = ()
    namespace: NetworkNamespace | None = None
    build_dir: Path = DEFAULT_BUILD_DIR

    def flags(self, port: int, bootstrap_port: int) -> tuple[str, ...]:
        """Return the flags of ``sglang.launch_server`` for this server."""
        on_cpu = self.device is Device.CPU
        flags = ["--host", self.host, "--port", str(port), "--nccl-port", str(free_port(self.namespace))]
        if self.launch_config is not None:
            if self.role is Role.PREFILL:
                flags += ["--disaggregation-bootstrap-port", str(bootstrap_port)]
            return (*flags, *self.extra_args)
        model = self.model if isinstance(self.model, str) else str(self.model.resolve())
        flags = ["--model-path", model, *flags]
        if self.own_flags:
            flags += device_flags(self.device)
        if self.role is not Role.PLAIN:
            flags += ["--disaggregation-mode", self.role.value, "--disaggregation-transfer-backend", self.backend]
        if self.role is Role.PREFILL:
            flags += ["--disaggregation-bootstrap-port", str(bootstrap_port)]
        version = self.sglang or installed_version()
        if self.role is Role.DECODE and on_cpu and release_number(version) >= DECODE_RETRACTION_BACKUP_SINCE:
            # Without it decode pins host memory through CUDA's runtime.
            flags += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
        return (*flags, *self.extra_args)

    def command(self, port: int, bootstrap_port: int) -> tuple[str, ...]:
        """Return the command line of this server."""
        flags = self.flags(port, bootstrap_port)
        if self.launch_config is None:
            return (sys.executable, "-m", "sglang.launch_server", *flags)
        config = ("--config", str(self.launch_config.resolve()))
        return (sys.executable, "-m", "spectrumkv_sglang.cli", "launch", self.role.value, *config, *flags)

    def environment(self) -> dict[str, str]:
        """Return the server's whole environment."""
        env = dict(os.environ)
        # Left by the plugin in a process that is itself a server: it must not leak into another one.
        env.pop("SPECTRUMKV_ACTIVE", None)
        env.update(HF_HUB_OFFLINE="1", SGLANG_HOST_IP=self.host, PYTHONUNBUFFERED="1", TOKENIZERS_PARALLELISM="false")
        paths = [*self.python_paths, *python_path(self.sglang, self.build_dir)]
        if self.device is Device.CPU:
            env.update(SGLANG_USE_CPU_ENGINE="1", OMP_NUM_THREADS="1")
            paths.insert(0, CPU_SHIMS)
        env.update(self.env)
        entries = [str(path.resolve()) for path in paths] + [env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(entry for entry in entries if entry)
        return env


class SGLangServer(ManagedProcess):
    """One ``sglang.launch_server`` process with its schedulers.

    Attributes:
        spec: how it was started.
        port: HTTP port.
        bootstrap_port: port of a prefill server's bootstrap service (reserved, unused by the other roles).
    """

    # Load statistics that a scheduler shares with its HTTP server; SGLang never unlinks the file.
    shared_memory_prefix = "sglang_loads_"

    def __init__(self, spec: ServerSpec, name: str, *, log_dir: Path = DEFAULT_LOG_DIR) -> None:
        self.spec = spec
        self.port = free_port(spec.namespace)
        self.bootstrap_port = free_port(spec.namespace)
        log_dir.mkdir(parents=True, exist_ok=True)
        super().__init__(
            name,
            spec.command(self.port, self.bootstrap_port),
            env=spec.environment(),
            # Not the repository's root: `python -m` puts the working directory on the path, and the folder kernels/
            # there would hide the package of that name which SGLang imports.
            cwd=log_dir,
            log_path=log_dir / f"{name}.log",
            namespace=spec.namespace,
        )

    @property
    def url(self) -> str:
        """Base address for HTTP requests from the server's own network namespace."""
        return f"http://{self.spec.host}:{self.port}"

    def ready(self) -> bool:
        """Whether the server has answered a one-token health request."""
        return _answers(f"{self.url}/health", self.namespace)


class Router(ManagedProcess):
    """SGLang's router in front of prefill and decode servers.

    Args:
        prefill: prefill server, or several.
        decode: decode server, or several.
        name: for messages and the log.
        log_dir: folder of the log.
        beside: the server on whose address and in whose network namespace it listens; the first prefill by default.
        native: SGLang's router proper, which leaves out servers that do not answer and asks again elsewhere; False: the
            small load balancer in Python that comes with it. Start a native one when its servers are healthy.
        extra_args: flags put last.
    """

    def __init__(
        self,
        prefill: SGLangServer | Sequence[SGLangServer],
        decode: SGLangServer | Sequence[SGLangServer],
        name: str = "router",
        *,
        log_dir: Path = DEFAULT_LOG_DIR,
        beside: SGLangServer | None = None,
        native: bool = False,
        extra_args: Sequence[str] = (),
    ) -> None:
        prefills = [prefill] if isinstance(prefill, SGLangServer) else list(prefill)
        decodes = [decode] if isinstance(decode, SGLangServer) else list(decode)
        neighbour = prefills[0] if beside is None else beside
        self.host = neighbour.spec.host
        self.port = free_port(neighbour.namespace)
        log_dir.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
        command += [] if native else ["--mini-lb"]
        for server in prefills:
            command += ["--prefill", server.url, str(server.bootstrap_port)]
        for server in decodes:
            command += ["--decode", server.url]
        command += ["--host", self.host, "--port", str(self.port)]
        if native:  # it would open a port for its own metrics that another router may have
            command += ["--prometheus-port", str(free_port(neighbour.namespace))]
        command += extra_args
        super().__init__(
            name,
            command,
            env=neighbour.spec.environment(),
            cwd=log_dir,
            log_path=log_dir / f"{name}.log",
            namespace=neighbour.namespace,
        )

    @property
    def url(self) -> str:
        """Base address for HTTP requests from the router's own network namespace."""
        return f"http://{self.host}:{self.port}"

    def ready(self) -> bool:
        """Whether the router listens; the servers behind it have their own `ready`."""
        return _answers(f"{self.url}/health", self.namespace)


Server = SGLangServer | Router


class Fleet:
    """Servers that are stopped together, however the block ends: normally, by an error or by Ctrl-C."""

    def __init__(self) -> None:
        self._members: list[Server] = []

    def start(self, server: SGLangServer) -> SGLangServer:
        """Start a server without waiting for it, and take charge of it."""
        self._members.append(server)
        server.start()
        return server

    def start_router(self, router: Router) -> Router:
        """Start a router without waiting for it, and take charge of it."""
        self._members.append(router)
        router.start()
        return router

    def wait_ready(
        self,
        servers: Iterable[Server] | None = None,
        *,
        timeout_seconds: float = READY_TIMEOUT_SECONDS,
        on_ready: Callable[[Server, float], None] | None = None,
        on_waiting: Callable[[Sequence[Server], float], None] | None = None,
    ) -> None:
        """Wait until the servers (default: all) are healthy.

        Args:
            servers: which ones.
            timeout_seconds: for all of them together.
            on_ready: called once for each as it becomes healthy, with the seconds waited so far.
            on_waiting: called every 15 s with those that are not healthy yet, and the seconds waited so far.

        Raises:
            ServerError: one died (at once, with the end of its log) or was not healthy in time.
        """
        waiting = list(self._members if servers is None else servers)
        started = time.monotonic()
        told = started
        while waiting:
            for server in list(waiting):
                server.check_alive()
                if server.ready():
                    waiting.remove(server)
                    if on_ready is not None:
                        on_ready(server, time.monotonic() - started)
            if waiting and on_waiting is not None and time.monotonic() - told >= PROGRESS_SECONDS:
                told = time.monotonic()
                on_waiting(tuple(waiting), told - started)
            if waiting and time.monotonic() - started > timeout_seconds:
                slow = waiting[0]
                raise ServerError(
                    f"{', '.join(server.name for server in waiting)} not healthy after {timeout_seconds:.0f} s; "
                    f"the log of {slow.name}, {slow.log_path}, ends with:\n{slow.log_tail()}"
                )
            if waiting:
                time.sleep(0.3)

    def stop(self, servers: Iterable[Server] | None = None) -> None:
        """Stop servers (default: all) at once."""
        leaving = list(self._members if servers is None else servers)
        stop_processes(leaving)
        self._members = [server for server in self._members if server not in leaving]

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _answers(url: str, namespace: NetworkNamespace | None) -> bool:
    try:
        get(url, namespace=namespace, timeout_seconds=30.0)
    except HttpError:
        return False
    return True
