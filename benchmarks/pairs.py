"""Ways to move the KV ("variants"), and running prefill/decode pairs of them, for the benchmarks that compare pairs.

    with linked_hosts() as link, PairBench(PairOptions(model, log_dir), link).running(VARIANTS[:3]) as group:
        for pair in group.pairs:
            ...

With a link, prefill and decode run on its two ends; without one, both on loopback.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from plain_transfer_log import PLAIN_LOG_VARIABLE

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.launch.netns import Link
from spectrumkv_sglang.launch.processes import ProcessError
from spectrumkv_sglang.launch.servers import (
    LOOPBACK_ADDRESS,
    READY_TIMEOUT_SECONDS,
    Device,
    Fleet,
    Role,
    ServerSpec,
    SGLangServer,
    detect_device,
)
from spectrumkv_sglang.launch.transfer_log_reader import TransferLogReader

# What makes plain Mooncake over TCP several times faster than its defaults (large copies from the GPU, more threads)
# and lets it queue a fragmented chunk: its queue can be set to at most 65535 blocks, and as many may wait for it.
TUNED = {
    "MC_TCP_SLICE_SIZE": "1048576",
    "MC_NUM_TCP_IO_THREADS": "8",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "120000",
}


@dataclass(frozen=True)
class Variant:
    """One way to move the KV.

    Attributes:
        name: for tables and file names.
        profile: SpectrumKV's profile; None for SGLang's own backend.
        budget: SpectrumKV's budget b; None for the profile's own.
        env: environment of both servers on top of the program's.
        prefill_env: of prefill alone, on top of that.
        flags: further SGLang flags of both servers.
        python_paths: folders put in front on both servers' PYTHONPATH.
    """

    name: str
    profile: str | None = None
    budget: float | None = None
    env: dict[str, str] = field(default_factory=lambda: dict(TUNED))
    prefill_env: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    python_paths: tuple[Path, ...] = ()

    @property
    def backend(self) -> str:
        """Value of ``--disaggregation-transfer-backend``."""
        return "mooncake_tcp" if self.profile is None else "spectrumkv_tcp"

    @property
    def decode_key(self) -> tuple[str, str, tuple[str, ...], tuple[Path, ...]]:
        """Variants of one key can share a decode server: the profile is prefill's alone."""
        return self.backend, str(sorted(self.env.items())), self.flags, self.python_paths


VARIANTS = (
    Variant("plain", env={}),
    Variant("plain-tuned"),
    Variant("fp8-kv", flags=("--kv-cache-dtype", "fp8_e4m3")),
    Variant("native-packed", "native-packed", 1.0),
    Variant("native-packed-zstd", "native-packed", 1.0, prefill_env={"SPECTRUMKV_CODEC": "zstd"}),
    Variant("int8", "int8"),
    Variant("near-lossless-0.5", "near-lossless", 0.5),
    Variant("balanced-0.3", "balanced", 0.3),
    Variant("aggressive-0.2", "aggressive", 0.2),
    Variant("spectrum-0.5", "spectrum-paper", 0.5),
    Variant("spectrum-0.35", "spectrum-paper", 0.35),
    Variant("spectrum-0.28", "spectrum-paper", 0.28),
)
"""``plain`` is Mooncake at its defaults, ``fp8-kv`` what SGLang halves for free: FP8 KV in both pools."""


def variants_named(names: Sequence[str]) -> list[Variant]:
    """The variants of these names, in the order of `VARIANTS`.

    Raises:
        SpectrumKVError: there is no variant of a name.
    """
    unknown = sorted(set(names) - {variant.name for variant in VARIANTS})
    if unknown:
        raise SpectrumKVError(
            f"no variant {', '.join(unknown)}; there are {', '.join(variant.name for variant in VARIANTS)}"
        )
    return [variant for variant in VARIANTS if variant.name in names]


def groups_of(variants: Sequence[Variant], most_servers: int) -> list[list[Variant]]:
    """Cut ``variants`` into groups whose servers, a prefill each and the decodes, are at most ``most_servers``.

    Raises:
        SpectrumKVError: fewer than the two servers of one pair.
    """
    if most_servers < 2:
        raise SpectrumKVError(f"{most_servers} servers at once: expected at least 2, a prefill and a decode")
    groups: list[list[Variant]] = []
    for variant in variants:
        grown = [*groups[-1], variant] if groups else []
        if grown and len(grown) + len({v.decode_key for v in grown}) <= most_servers:
            groups[-1] = grown
        else:
            groups.append([variant])
    return groups


@dataclass(frozen=True)
class PairOptions:
    """What all servers of a benchmark have in common.

    Attributes:
        model: the model's directory.
        log_dir: for the servers' logs and transfer logs.
        flags: further SGLang flags of every server.
        prefill_python_paths: folders put in front on prefill's PYTHONPATH, such as that of `plain_transfer_log`.
        decode_python_paths: folders put in front on decode's PYTHONPATH, such as that of `fragmented_pool`.
        device: where the servers run.
    """

    model: Path
    log_dir: Path
    flags: tuple[str, ...] = ()
    prefill_python_paths: tuple[Path, ...] = ()
    decode_python_paths: tuple[Path, ...] = ()
    device: Device = field(default_factory=detect_device)


@dataclass(frozen=True)
class Pair:
    """A running pair of one variant.

    Attributes:
        log: reader of prefill's transfer log; None for SGLang's own backend.
        log_path: that log; for SGLang's own backend the one that `plain_transfer_log` writes if it is loaded.
    """

    variant: Variant
    prefill: SGLangServer
    decode: SGLangServer
    log: TransferLogReader | None
    log_path: Path

    @property
    def servers(self) -> tuple[SGLangServer, SGLangServer]:
        """Prefill and decode."""
        return self.prefill, self.decode


@dataclass
class PairGroup:
    """Pairs that run side by side.

    Attributes:
        fleet: owner of all their servers; a router started through it is stopped with them.
        pairs: those that are healthy and were not given up.
        failed: why a variant's servers did not become healthy.
        ready_seconds: time until the last one was.
    """

    fleet: Fleet
    pairs: list[Pair] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    ready_seconds: float = 0.0

    def give_up(self, pair: Pair) -> None:
        """Stop a pair's servers; a decode that another pair uses stays."""
        if pair in self.pairs:
            self.pairs.remove(pair)
        in_use = [server for other in self.pairs for server in other.servers]
        self.fleet.stop([server for server in pair.servers if server not in in_use])


class PairBench:
    """Starts pairs on ``link`` (loopback when None)."""

    def __init__(self, options: PairOptions, link: Link | None = None) -> None:
        self.link, self.options = link, options

    @contextmanager
    def running(
        self, variants: Sequence[Variant], *, timeout_seconds: float = READY_TIMEOUT_SECONDS
    ) -> Iterator[PairGroup]:
        """Start all servers of ``variants`` side by side; variants of one `Variant.decode_key` share a decode.

        A variant whose servers fail to start goes to `PairGroup.failed`; the others go on.
        """
        with Fleet() as fleet:
            group = PairGroup(fleet)
            decodes: dict[object, SGLangServer] = {}
            for variant in variants:
                if variant.decode_key not in decodes:
                    decodes[variant.decode_key] = fleet.start(self._server(Role.DECODE, variant))
                prefill = fleet.start(self._server(Role.PREFILL, variant))
                path = self._transfer_log(variant)
                log = TransferLogReader(path) if variant.profile else None
                group.pairs.append(Pair(variant, prefill, decodes[variant.decode_key], log, path))
            started = time.monotonic()
            for pair in tuple(group.pairs):
                left = max(0.0, timeout_seconds - (time.monotonic() - started))
                try:
                    fleet.wait_ready(pair.servers, timeout_seconds=left)
                except ProcessError as error:
                    group.failed[pair.variant.name] = str(error)
                    group.give_up(pair)
            group.ready_seconds = time.monotonic() - started
            yield group

    def _server(self, role: Role, variant: Variant) -> SGLangServer:
        on_prefill = role is Role.PREFILL
        further = self.options.prefill_python_paths if on_prefill else self.options.decode_python_paths
        host, namespace = LOOPBACK_ADDRESS, None
        if self.link is not None:
            host = self.link.left_address if on_prefill else self.link.right_address
            namespace = self.link.left if on_prefill else self.link.right
        env = dict(variant.env)
        if variant.profile is not None:
            # Dummy weights have no probe result; decode's own profile has a low tier, so it asks for one too.
            env["SPECTRUMKV_REQUIRE_PROBE"] = "false"
        if on_prefill:
            env.update(variant.prefill_env)
            path = self._transfer_log(variant)
            path.unlink(missing_ok=True)
            env[PLAIN_LOG_VARIABLE if variant.profile is None else "SPECTRUMKV_TRANSFER_LOG"] = str(path)
            if variant.profile is not None:
                env["SPECTRUMKV_PROFILE"] = variant.profile
            if variant.budget is not None:
                env["SPECTRUMKV_BUDGET"] = str(variant.budget)
        spec = ServerSpec(
            role=role,
            model=self.options.model,
            backend=variant.backend,
            device=self.options.device,
            host=host,
            namespace=namespace,
            env=env,
            extra_args=(*self.options.flags, *variant.flags),
            python_paths=(*variant.python_paths, *further),
        )
        return SGLangServer(spec, f"{role.value}-{variant.name}", log_dir=self.options.log_dir)

    def _transfer_log(self, variant: Variant) -> Path:
        return (self.options.log_dir / f"{variant.name}.jsonl").resolve()


def cpu_seconds(servers: Sequence[SGLangServer]) -> float:
    """CPU time that the process trees of ``servers`` have used so far, in user and kernel mode."""
    total = 0.0
    for process in processes_of(servers):
        times = process.cpu_times()
        total += times.user + times.system
    return total


def gpu_bytes(servers: Sequence[SGLangServer]) -> int | None:
    """GPU memory of the processes of ``servers``; None without a GPU, or where the driver hides process ids."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    own = {process.pid for process in processes_of(servers)}
    sizes = {}
    for line in listing.splitlines():
        pid, _, mebibytes = line.partition(",")
        if pid.strip().isdigit() and mebibytes.strip().isdigit():
            sizes[int(pid)] = int(mebibytes)
    found = [size for pid, size in sizes.items() if pid in own]
    return sum(found) * 1024 * 1024 if found else None


def processes_of(servers: Sequence[SGLangServer]) -> list[psutil.Process]:
    """Every process of ``servers``.

    Raises:
        psutil.NoSuchProcess: a server has ended.
    """
    found = []
    for server in servers:
        leader = psutil.Process(server.pid)
        found += [leader, *leader.children(recursive=True)]
    return found
