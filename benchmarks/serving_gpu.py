"""GPU memory while something runs."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence
from types import TracebackType

from pairs import gpu_bytes

from spectrumkv_sglang.launch.servers import SGLangServer

_SECONDS_BETWEEN_LOOKS = 2.0


class GpuMemoryWatch:
    """Looks at the GPU every two seconds for the length of a ``with`` block.

    Attributes:
        peak_bytes: the most that was in use; None without a GPU.
        peak_of: "pair" for the servers' own memory, "machine" for all GPUs together, where the driver hides processes.
    """

    def __init__(self, servers: Sequence[SGLangServer]) -> None:
        self.peak_bytes: int | None = None
        self.peak_of = "pair"
        self._servers = servers
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="gpu-memory", daemon=True)

    def __enter__(self) -> GpuMemoryWatch:
        self._note()
        if self.peak_bytes is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(_SECONDS_BETWEEN_LOOKS):
            self._note()

    def _note(self) -> None:
        used = gpu_bytes(self._servers) if self.peak_of == "pair" else None
        if used is None:
            used = _machine_bytes()
            self.peak_of = "machine"
        if used is not None:
            self.peak_bytes = max(used, self.peak_bytes or 0)


def _machine_bytes() -> int | None:
    """GPU memory in use on all GPUs of this machine; None without one."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return sum(int(line) for line in listing.split() if line.isdigit()) * 1024 * 1024
