"""The demo's first step: `spectrumkv probe`, run as an operator runs it."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.launch.probe_process import PROBE_EXIT_CODES, run_to_end
from spectrumkv_sglang.launch.servers import CPU_SHIMS, Device, device_flags

# What a short demo leaves for needles; an operator's probe takes 45 s.
_NEEDLE_SECONDS = 20


class DemoProbeError(SpectrumKVError):
    """The probe had no result; it has said why."""


@dataclass(frozen=True)
class DemoProbe:
    """Files that the probe wrote: launch config, result, picture."""

    launch_config: Path
    result: Path
    plot: Path


def probe_arguments(files: DemoProbe, model: Path, device: Device, backend: str) -> list[str]:
    """Arguments of `spectrumkv probe`, which mean the same in every working directory."""
    paths = {"--model-path": model, "--out": files.launch_config, "--json": files.result, "--plot": files.plot}
    arguments = [part for option, path in paths.items() for part in (option, str(path.resolve()))]
    return [*arguments, "--backend", backend, "--needle-seconds", str(_NEEDLE_SECONDS), *device_flags(device)]


def run_probe(console: Console, *, model: Path, device: Device, backend: str, folder: Path) -> DemoProbe:
    """Probe ``model`` with the flags of the demo's servers and write the files into ``folder``.

    Raises:
        DemoProbeError: no result.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = DemoProbe(folder / "launch.yaml", folder / "probe.json", folder / "probe.png")
    arguments = probe_arguments(files, model, device, backend)
    console.print(f"$ spectrumkv probe {shlex.join(arguments)}", highlight=False, soft_wrap=True)
    paths = ([str(CPU_SHIMS.resolve())] if device is Device.CPU else []) + [os.environ.get("PYTHONPATH", "")]
    code = run_to_end(
        [sys.executable, "-m", "spectrumkv_sglang.cli", "probe", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "COLUMNS": str(console.width)},
        cwd=folder,  # not the repository's root: its folder kernels/ would hide a package that SGLang imports
    )
    if code not in PROBE_EXIT_CODES:
        raise DemoProbeError(f"spectrumkv probe ended with exit status {code}")
    return files
