"""What will the bytes travel over, and is that set up well?

What is said about Mooncake's variables was seen on Mooncake 0.3.13 and 0.3.14 over TCP.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable, Mapping
from pathlib import Path

from spectrumkv_sglang.doctor.findings import Section
from spectrumkv_sglang.transport_tuning import MEASURED_GAIN, TCP_TUNING

SYSTEM_LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "librdmacm.so.1": "librdmacm1",
}
_TRUE = {"1", "true", "on", "yes"}


def check_transport(
    environ: Mapping[str, str],
    root: Path = Path("/"),
    load_library: Callable[[str], object] = ctypes.CDLL,
    memlock_bytes: int | None = None,
) -> Section:
    """RDMA devices, system libraries, Mooncake's variables and the TCP settings of the host.

    root: where /sys and /proc are looked for. memlock_bytes: limit of locked memory; None asks the system.
    """
    section = Section("transport")
    _check_libraries(section, load_library)
    forced = environ.get("MC_FORCE_TCP", "").strip().lower() in _TRUE
    active = _check_rdma_devices(section, root / "sys/class/infiniband")
    if forced:
        section.ok("transport", "TCP (MC_FORCE_TCP is set)")
    elif active:
        section.ok("transport", "RDMA")
        _check_locked_memory(section, memlock_bytes)
        _check_peer_memory(section, root)
    else:
        section.info(
            "transport",
            "TCP: no active RDMA device",
            "start with --disaggregation-transfer-backend spectrumkv_tcp, which sets MC_FORCE_TCP",
        )
    if forced or not active:
        _check_tcp_tuning(section, environ)
        _check_congestion_control(section, root / "proc/sys/net/ipv4/tcp_congestion_control")
    _check_timeout(section, environ)
    section.info(
        "security",
        "Mooncake has no authentication and listens on all interfaces",
        "open its ports (15000-17000) and SpectrumKV's control port to the prefill and decode hosts only",
    )
    return section


def _check_libraries(section: Section, load_library: Callable[[str], object]) -> None:
    missing = []
    for library in SYSTEM_LIBRARIES:
        try:
            load_library(library)
        except OSError:
            missing.append(library)
    if missing:
        packages = " ".join(SYSTEM_LIBRARIES[library] for library in missing)
        section.problem(
            "system libraries", f"missing: {', '.join(missing)}; Mooncake does not load", f"apt-get install {packages}"
        )
    else:
        section.ok("system libraries", ", ".join(SYSTEM_LIBRARIES))


def _check_rdma_devices(section: Section, directory: Path) -> list[str]:
    """Names of the devices with an active port."""
    active = []
    for device in sorted(directory.iterdir()) if directory.is_dir() else []:
        ports = [_port(port) for port in sorted((device / "ports").glob("*"))]
        if any("ACTIVE" in port for port in ports):
            active.append(device.name)
            section.ok(f"rdma {device.name}", "; ".join(ports))
        else:
            section.warning(
                f"rdma {device.name}",
                f"no active port ({'; '.join(ports) or 'no port'})",
                "check cable, switch and driver",
            )
    return active


def _port(port: Path) -> str:
    values = [_read(port / name) for name in ("state", "rate", "link_layer")]
    return f"port {port.name}: " + ", ".join(value for value in values if value)


def _check_locked_memory(section: Section, limit: int | None) -> None:
    if limit is None:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit in (resource.RLIM_INFINITY, -1):
        section.ok("locked memory", "unlimited")
    else:
        section.warning(
            "locked memory",
            f"limited to {limit / 2**20:.0f} MiB: RDMA registration of the slots may fail",
            "start the server with `ulimit -l unlimited` (docker: --ulimit memlock=-1)",
        )


def _check_peer_memory(section: Section, root: Path) -> None:
    modules = {line.split(" ", 1)[0] for line in _read(root / "proc/modules").splitlines()}
    if "nvidia" in modules and not modules & {"nvidia_peermem", "nv_peer_mem"}:
        section.warning(
            "gpu direct", "nvidia_peermem is not loaded: RDMA may not reach GPU memory", "modprobe nvidia_peermem"
        )


def _check_tcp_tuning(section: Section, environ: Mapping[str, str]) -> None:
    unset = [variable for variable in TCP_TUNING if not environ.get(variable.name)]
    ours = [variable for variable in unset if variable.set_by_us]
    theirs = [variable for variable in unset if not variable.set_by_us]
    if ours:
        section.ok(
            "mooncake tcp",
            "a server with spectrumkv_tcp sets, unless tune_tcp is false:\n"
            + "\n".join(f"  {variable.name}={variable.value}: else {variable.without_it}" for variable in ours)
            + f"\n{MEASURED_GAIN}",
        )
    if theirs:
        section.info(
            "mooncake tcp timeouts",
            "not set:\n" + "\n".join(f"  {variable.name}: {variable.without_it}" for variable in theirs),
            "export " + " ".join(f"{variable.name}={variable.value}" for variable in theirs),
        )
    if not unset:
        section.ok("mooncake tcp", "tuning variables are set")


def _check_congestion_control(section: Section, path: Path) -> None:
    algorithm = _read(path)
    if algorithm == "bbr":
        section.info(
            "congestion control",
            "bbr: paces one host's loopback to about 2 GB/s",
            "for tests on one host: sysctl -w net.ipv4.tcp_congestion_control=cubic",
        )
    elif algorithm:
        section.ok("congestion control", algorithm)


def _check_timeout(section: Section, environ: Mapping[str, str]) -> None:
    value = environ.get("MC_TRANSFER_TIMEOUT", "")
    if value and not (value.isdigit() and int(value) >= 5):
        section.warning("MC_TRANSFER_TIMEOUT", f"{value!r}: Mooncake takes whole seconds from 5 up", "set it to 10")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
