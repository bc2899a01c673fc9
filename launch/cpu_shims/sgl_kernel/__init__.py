"""Import-only stand-in for SGLang's compiled kernel package, for servers on a CPU.

In CPU mode SGLang imports names that end in ``_cpu`` from ``sgl_kernel``, but the package index has only the CUDA
build, which does not load without a GPU. This module lets those imports succeed: each such name is a function that
raises when it is called. Nothing calls one, because the stand-in registers no ``torch.ops.sgl_kernel`` operator, and
SGLang takes its torch-native layers when the operators are absent (``srt/utils/common.py``,
``cpu_has_amx_support``). Every other name is missing, as it would be without the package.

It is on ``PYTHONPATH`` only for the CPU servers that ``spectrumkv_sglang.launch`` starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Return a function that raises for a ``*_cpu`` name; any other name does not exist."""
    if not name.endswith("_cpu"):
        raise AttributeError(f"module {__name__!r} (the CPU stand-in) has no attribute {name!r}")

    def unavailable(*_args: object, **_kwargs: object) -> NoReturn:
        raise RuntimeError(
            f"sgl_kernel.{name} was called, but only the import-only stand-in of sgl_kernel is installed: "
            "this SGLang configuration needs the compiled kernels, so it does not run on the CPU stand-in"
        )

    unavailable.__name__ = name
    return unavailable
