"""Start-up adjustments for SGLang servers on a machine without a GPU.

Python imports ``sitecustomize`` when it starts, so putting this folder on ``PYTHONPATH`` reaches the server and the
scheduler processes that it spawns. Nothing heavy is imported here: a finder on ``sys.meta_path`` waits for the
modules that need help, acts once for each, and leaves the ordinary finders to do the import.

1. **torchvision.** The package index has torchvision's CUDA build. Beside a CPU build of torch its compiled part does
   not load, and importing it fails because it registers a fake kernel for the operator ``torchvision::nms``, which
   then does not exist. The schemas of ``nms`` and ``qnms`` are defined, without an implementation, just before
   torchvision is first imported. SGLang imports torchvision, but calls neither operator for a text model.
2. **SGLang 0.5.23 and later.** ``MooncakeKVSender.supports_host_tensor_indices`` makes prefill copy page ids through
   pinned memory and a CUDA event. Without CUDA it must be off, which selects SGLang's older path.

Another ``sitecustomize`` later on the path (a distribution's, a coverage tool's) still runs.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

_TORCHVISION_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_MOONCAKE_MODULE = "sglang.srt.disaggregation.mooncake.conn"
_kept_alive: list[object] = []  # an operator schema lives as long as its Library object


def _define_torchvision_schemas() -> None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _TORCHVISION_SCHEMAS:
        if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):
            library.define(schema)
    _kept_alive.append(library)


def _keep_page_ids_on_the_host(module: ModuleType) -> None:
    sender = getattr(module, "MooncakeKVSender", None)
    if sender is not None and getattr(sender, "supports_host_tensor_indices", False):
        sender.supports_host_tensor_indices = False


class _MooncakeLoader(importlib.abc.Loader):
    """Runs the module's own loader, then switches the host-tensor page ids off."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _keep_page_ids_on_the_host(module)


class _CpuServerFinder(importlib.abc.MetaPathFinder):
    """Acts on the first import of each module that needs help, then steps aside for that name."""

    def __init__(self) -> None:
        self._waiting = {"torchvision", _MOONCAKE_MODULE}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._waiting:
            return None
        self._waiting.discard(fullname)
        if fullname == "torchvision":
            _define_torchvision_schemas()
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _MooncakeLoader(spec.loader)
        return spec


def _run_next_sitecustomize() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    others = [entry for entry in sys.path if os.path.abspath(entry) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# Another copy of this file on the path (a second checkout's) would run this one again, and so on.
if not any(type(finder).__name__ == _CpuServerFinder.__name__ for finder in sys.meta_path):
    sys.meta_path.insert(0, _CpuServerFinder())
    _run_next_sitecustomize()
