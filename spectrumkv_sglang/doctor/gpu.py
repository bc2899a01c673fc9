"""Which GPUs are there, and where do packing and unpacking run?"""

from __future__ import annotations

import importlib.util

import msgspec

from spectrumkv_sglang.doctor.findings import Section
from spectrumkv_sglang.doctor.isolated import run_python

_MARK = "gpus: "
_LIST_GPUS = f"""
import json, torch
gpus = []
if torch.cuda.is_available():
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        gpus.append([p.name, f"{{p.major}}.{{p.minor}}", p.total_memory])
print({_MARK!r} + json.dumps([torch.version.cuda or torch.version.hip or "", gpus]))
"""


class _Gpu(msgspec.Struct, array_like=True):
    name: str
    capability: str
    memory_bytes: int


def check_gpus() -> Section:
    """GPUs that torch sees. None is fine: then everything runs on the CPU."""
    section = Section("gpu")
    if importlib.util.find_spec("torch") is None:
        section.info("gpu", "torch is not installed: GPUs cannot be checked")
        return section
    listed = run_python(_LIST_GPUS)
    lines = [line for line in listed.output.splitlines() if line.startswith(_MARK)]
    if not listed.succeeded or not lines:
        section.problem(
            "gpu", f"torch cannot be used: {listed.last_line}", "repair the torch installation or the driver"
        )
        return section
    toolkit, gpus = msgspec.json.decode(lines[-1][len(_MARK) :], type=tuple[str, list[_Gpu]])
    for index, gpu in enumerate(gpus):
        memory = f"{gpu.memory_bytes / 2**30:.0f} GiB"
        section.ok(f"gpu {index}", f"{gpu.name}, compute capability {gpu.capability}, {memory}, toolkit {toolkit}")
    if gpus and importlib.util.find_spec("triton") is None:
        section.problem("triton", "not installed, but packing on a GPU needs it", "install the Triton of your torch")
    if not gpus:
        built_for = f"torch is built for {toolkit} but sees none" if toolkit else "torch is a CPU build"
        section.info(
            "gpu",
            f"none ({built_for}): packing and unpacking run on the CPU",
            "fine for trying it out; if this host has a GPU, check the driver with nvidia-smi" if toolkit else "",
        )
    return section
