"""Which of the operator's SGLang flags the probe's own server gets, and what it adds on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Mapping

from spectrumkv_sglang.launch.servers import Device
from spectrumkv_sglang.launch.sglang_versions import DECODE_RETRACTION_BACKUP_SINCE, release_number
from spectrumkv_sglang.launch_flags import Flags
from spectrumkv_sglang.probe.errors import ProbeError

_CPU_DEFAULTS: Flags = {
    "device": "cpu",
    "dtype": "float32",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "max-total-tokens": 8192,
    "max-running-requests": 8,
    "mem-fraction-static": 0.9,
    "disable-overlap-schedule": True,
    "sleep-on-idle": True,
}
# Of the servers, not of what is probed.
_LEFT_OUT = {
    "host", "port", "nccl-port", "api-key", "admin-api-key", "enable-metrics", "log-requests", "log-requests-level",
    "ssl-keyfile", "ssl-certfile", "served-model-name", "disable-radix-cache", "schedule-policy", "dist-init-addr",
    "base-gpu-id", "dp-size", "dp", "data-parallel-size", "enable-hierarchical-cache", "skip-server-warmup",
}  # fmt: skip
_SHORTEST_BEGINNING = 4
_REFUSED = {
    "model-path": "the probed model is named once, by the probe's own --model-path",
    "model": "the probed model is named once, by the probe's own --model-path",
    "speculative-algorithm": "a draft model's KV travels natively: probe and serve without it",
    "pp-size": "with pipeline parallelism KV travels natively: probe and serve with --tp-size",
    "pipeline-parallel-size": "with pipeline parallelism KV travels natively: probe and serve with --tp-size",
    "nnodes": "the probe runs on one node: give it a --tp-size that fits there",
    "lora-paths": "the probe judges the base model: give it a merged model",
}


def with_cpu_defaults(flags: Flags, device: Device) -> Flags:
    """``flags`` behind those that a server on a machine without a GPU needs, unless they name a device themselves."""
    if device is not Device.CPU or "device" in flags:
        return dict(flags)
    return {key: value for key, value in _CPU_DEFAULTS.items() if key not in _spelled(flags)} | flags


def decode_flags(flags: Flags, sglang_version: str) -> Flags:
    """What only a decode server needs beside ``flags``."""
    if flags.get("device") != "cpu" or release_number(sglang_version) < DECODE_RETRACTION_BACKUP_SINCE:
        return {}
    # Without it decode pins host memory through CUDA's runtime.
    return {"disaggregation-decode-retraction-backup": "cpu_tensor"}


def probe_server_flags(flags: Flags) -> tuple[Flags, tuple[str, ...]]:
    """Flags of the probe's own server, and the names of those that it leaves out.

    Raises:
        ProbeError: a flag under which KV is not tiered at all, or the probe would judge something else.
    """
    for key in flags:
        name = _full_name(key)
        if name in _REFUSED and flags[key] not in (1, None, False):
            raise ProbeError(f"--{key} {flags[key]}: {_REFUSED[name]}")
    left_out = tuple(key for key in flags if _full_name(key) in _LEFT_OUT)
    return {key: value for key, value in flags.items() if key not in left_out}, left_out


def _spelled(flags: Mapping[str, object]) -> set[str]:
    return {key.replace("_", "-") for key in flags}


def _full_name(key: str) -> str:
    """The one flag of those above that SGLang takes ``key`` for (``--speculative-algo``), else ``key`` itself."""
    name = key.replace("_", "-")
    known = {*_REFUSED, *_LEFT_OUT}
    meant = [flag for flag in known if len(name) >= _SHORTEST_BEGINNING and flag.startswith(name)]
    return name if name in known or len(meant) != 1 else meant[0]
