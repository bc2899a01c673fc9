"""What host and GPU exchange about a payload: memory that goes up and down without waiting, and results to wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

Result = TypeVar("Result")

VERDICT_WORDS = 4
"""Sum over checksum blocks, the same as announced, differing words of the prologue, one unused."""


class Pending(Generic[Result]):
    """Something that the GPU is still at work on.

    Args:
        finish: waits and returns the result; called once.
    """

    def __init__(self, finish: Callable[[], Result]) -> None:
        self._finish: Callable[[], Result] | None = finish
        self._result: Result | None = None

    def wait(self) -> Result:
        """Wait, asleep, until the work is done, and return its result; again and again the same."""
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result  # type: ignore[return-value]


class Exchange:
    """Memory of one payload at a time: what goes up, what comes back, and the sums in between. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._up = self._memory(0)
        self.down = self._memory(VERDICT_WORDS)
        self.words = torch.empty(0, dtype=torch.int64, device=device)
        self.block_sums = torch.empty(0, dtype=torch.int64, device=device)
        self._done = torch.cuda.Event(blocking=True) if self._cuda else None

    def _memory(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int64, pin_memory=self._cuda)

    def begin(self, words: int, blocks: int) -> npt.NDArray[np.int64]:
        """Wait until the last payload is done with this memory; returns ``words`` words to fill in."""
        self.wait()
        if self._up.numel() < words:
            size = 1 << (words - 1).bit_length()
            self._up = self._memory(size)
            self.words = torch.empty(size, dtype=torch.int64, device=self._device)
        if self.block_sums.numel() <= blocks:
            self.block_sums = torch.zeros(1 << blocks.bit_length(), dtype=torch.int64, device=self._device)
        return self._up.numpy()[:words]

    def send(self, words: int) -> None:
        """Copy the first words up, in the stream's order."""
        self.words[:words].copy_(self._up[:words], non_blocking=True)

    def fetch(self) -> None:
        """Copy the verdict back, in the stream's order."""
        self.down.copy_(self.words[:VERDICT_WORDS], non_blocking=True)
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Wait for what was fetched last."""
        if self._done is not None:
            self._done.synchronize()
