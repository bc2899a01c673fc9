"""A prefill/decode pair whose servers can be made to fail, and what they hold: for `faults.py` and `soak.py`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from command_line import made
from fault_points import FOLDER_VARIABLE
from sglang_plugin import plugin_folder

from spectrumkv_sglang.launch.client import get
from spectrumkv_sglang.launch.netns import Link
from spectrumkv_sglang.launch.servers import LOOPBACK_ADDRESS, Device, Fleet, Role, ServerSpec, SGLangServer
from spectrumkv_sglang.observability.live_metrics import LiveMetrics, parse_metrics
from spectrumkv_sglang.observability.metric_specs import CHUNKS, FAILURES, LANDING_SLOTS, STAGING_SLOTS

# Short enough that a run sees slots come back, long enough that a busy machine does not fail by itself.
SETTINGS = {
    "SPECTRUMKV_PROFILE": "native-packed",
    "SPECTRUMKV_SLOT_BYTES": "4MiB",
    "SPECTRUMKV_OPEN_TIMEOUT_S": "5",
    "SPECTRUMKV_UNPACK_TIMEOUT_S": "15",
    "SPECTRUMKV_WRITE_TIMEOUT_S": "15",
    "SPECTRUMKV_LEASE_S": "30",
    "SPECTRUMKV_QUARANTINE_S": "10",
    "MC_TRANSFER_TIMEOUT": "10",
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "60",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "60",
}
# A GPU's servers get SGLang's own defaults but for what three of them on one GPU, and the kit there, need.
GPU_FLAGS = (
    *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--dtype", "float32", "--random-seed", "1", "--mem-fraction-static", "0.25"),
    *("--max-total-tokens", "65536", "--max-running-requests", "32"),
)
# SGLang, Mooncake and the HTTP server keep a few threads and connections for each peer they have met.
_ALLOWED_PER_PEER = {"threads": 8, "descriptors": 24}


@dataclass
class Books:
    """What a server holds: compared before and after."""

    counts: dict[str, float]

    @classmethod
    def of(cls, server: SGLangServer) -> Books:
        threads = descriptors = 0
        for process in family(server):
            threads += process.num_threads()
            descriptors += process.num_fds()
        live = metrics_of(server)
        slots = {
            f"slots {state}": sum(live.total(kind, state=state) for kind in (LANDING_SLOTS, STAGING_SLOTS))
            for state in ("in_use", "quarantined")
        }
        return cls({"threads": threads, "descriptors": descriptors, **slots})

    def more_than(self, before: Books, *, new_peers: int = 1) -> dict[str, float]:
        """What is held beyond ``before`` and beyond what ``new_peers`` cost."""
        return {
            name: count - before.counts[name]
            for name, count in self.counts.items()
            if count - before.counts[name] > _ALLOWED_PER_PEER.get(name, 0) * new_peers
        }


def family(server: SGLangServer) -> list[psutil.Process]:
    """Every process of ``server``.

    Raises:
        psutil.NoSuchProcess: it has ended.
    """
    leader = psutil.Process(server.pid)
    return [leader, *leader.children(recursive=True)]


def schedulers(server: SGLangServer) -> list[psutil.Process]:
    """Those of its processes that run the model: SGLang names them so."""
    return [process for process in family(server) if any("::scheduler" in part for part in process.cmdline())]


def metrics_of(server: SGLangServer) -> LiveMetrics:
    """What the server counts at this moment."""
    return parse_metrics(server.url, get(f"{server.url}/metrics", namespace=server.namespace).decode())


def reasons(prefill: LiveMetrics) -> dict[str, int]:
    """Chunks that prefill has sent, by reason."""
    return {reason: int(count) for (reason,), count in prefill.by_label(CHUNKS, "reason").items()}


def failures(prefill: LiveMetrics) -> dict[str, int]:
    """Tiered chunks that failed, by cause."""
    return {cause: int(count) for (cause,), count in prefill.by_label(FAILURES, "cause").items()}


def appears(path: Path, timeout_seconds: float) -> bool:
    """Whether a file is there before the time is over."""
    deadline = time.monotonic() + timeout_seconds
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return path.exists()


@dataclass(frozen=True)
class PairSettings:
    """What all servers of a run have in common.

    Attributes:
        model: the model's directory.
        out: for the plugin and the files with which its faults are ordered.
        logs: for the servers' logs.
        device: where they run.
        env: environment of prefill and decode.
        flags: further SGLang flags of every server.
        link: prefill runs on its left end and decode on its right one; loopback without.
    """

    model: Path
    out: Path
    logs: Path
    device: Device
    env: Mapping[str, str]
    flags: tuple[str, ...] = ()
    link: Link | None = None


class FaultPair:
    """Starts the servers with `fault_points` as a plugin; ``servers`` has those that run now."""

    def __init__(self, settings: PairSettings, fleet: Fleet) -> None:
        self.settings, self.fleet = settings, fleet
        self.servers: dict[Role, SGLangServer] = {}
        self._plugin = plugin_folder(settings.out / "plugins", Path(__file__).parent / "fault_points.py")
        self._started = 0

    @property
    def prefill(self) -> SGLangServer:
        return self.servers[Role.PREFILL]

    @property
    def decode(self) -> SGLangServer:
        return self.servers[Role.DECODE]

    def start(self, role: Role, *, env: Mapping[str, str] | None = None, flags: Iterable[str] = ()) -> SGLangServer:
        """Start a server without waiting for it; prefill and decode take their places in ``servers``."""
        self._started += 1
        settings, plain = self.settings, role is Role.PLAIN
        ours = {
            **settings.env,
            **(env or {}),
            FOLDER_VARIABLE: str(self._orders(role)),
            "BENCHMARK_FAULT_ROLE": role.value,
        }
        host, namespace = LOOPBACK_ADDRESS, None
        if settings.link is not None and not plain:
            link, left = settings.link, role is Role.PREFILL
            host = link.left_address if left else link.right_address
            namespace = link.left if left else link.right
        on_cpu = settings.device is Device.CPU
        spec = ServerSpec(
            role=role,
            model=settings.model,
            backend="spectrumkv_tcp",
            device=settings.device,
            own_flags=on_cpu,
            host=host,
            namespace=namespace,
            env={} if plain else ours,
            extra_args=(*(() if on_cpu else GPU_FLAGS), "--enable-metrics", *settings.flags, *flags),
            python_paths=() if plain else (self._plugin,),
        )
        server = self.fleet.start(SGLangServer(spec, f"{role.value}-{self._started}", log_dir=settings.logs))
        if not plain:
            self.servers[role] = server
        return server

    @contextmanager
    def armed(self, role: Role, stage: str, action: str) -> Iterator[Path]:
        """Yields the file that is there once the fault has happened."""
        folder = self._orders(role)
        (folder / "fired").unlink(missing_ok=True)
        (folder / "arm").write_text(f"{stage}\n{action}", encoding="utf-8")
        try:
            yield folder / "fired"
        finally:
            (folder / "arm").unlink(missing_ok=True)

    def _orders(self, role: Role) -> Path:
        return made(self.settings.out / role.value)
