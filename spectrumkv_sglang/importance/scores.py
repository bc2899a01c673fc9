"""Importance of cached tokens, kept where their KV is kept: by pool slot."""

from __future__ import annotations

import threading

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spectrumkv_sglang.kernels.importance_format import MOST_OBSERVATIONS, RECEIVED_ONE


class SlotScores:
    """Normalised attention received, one score a KV pool slot.

    A numerator (attention received, fixed-point int64) and a denominator (sampled queries that could attend, int32),
    both ``[pool_slots]``, add up over layers, chunks and requests: a cached prefix keeps its score and blends in what
    later queries say. Their ratio, the mean probability a query and layer gave to the token, does not favour early
    tokens as the raw sum does. Fixed point adds up to the same number in any order.

    What is read is the ratio as it was when it was last **published**: a forward publishes at its end, and chunked
    prefill never publishes a chunk again once it may be on its way. So a reader does not see how far a later forward
    has come, and equal prefills read equal scores.

    Slot arguments are integers ``[n]``, without repeats within one call, on any device.

    On CUDA all methods but ``fetch`` belong on the stream that runs the forward; ``fetch`` on any stream that waits
    for the forward's event.
    """

    def __init__(self, pool_slots: int, device: torch.device | str) -> None:
        """Room for slot ids 0 .. ``pool_slots - 1``: 16 bytes a slot on ``device``."""
        if pool_slots < 1:
            raise ValueError(f"a KV pool has at least one slot, got {pool_slots}")
        self.received = torch.zeros(pool_slots, dtype=torch.int64, device=device)
        self.could_attend = torch.zeros(pool_slots, dtype=torch.int32, device=device)
        self.published = torch.zeros(pool_slots, dtype=torch.float32, device=device)
        self._per_thread = threading.local()

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Received, could-attend and published scores, as the kernels take them."""
        return self.received, self.could_attend, self.published

    def reset(self, slots: Tensor) -> None:
        """Forget ``slots``: newly allocated ones must not inherit the score of an earlier token."""
        slots = self._on_device(slots)
        for kept in self.tensors:
            kept.index_fill_(0, slots, 0)

    def add(self, slots: Tensor, column_sums: Tensor, queries: Tensor) -> None:
        """Add one observation: ``column_sums`` and ``queries`` float32 ``[n]``, from ``observed_attention``.

        A sum that is not finite adds nothing.
        """
        if not slots.shape == column_sums.shape == queries.shape:
            raise ValueError(
                "slots, column sums and queries must have one shape, got "
                f"{tuple(slots.shape)}, {tuple(column_sums.shape)} and {tuple(queries.shape)}"
            )
        slots = self._on_device(slots)
        takes_more = self.could_attend[slots] < MOST_OBSERVATIONS
        sums = column_sums.to(device=self.received.device, dtype=torch.float64).nan_to_num_(0.0, 0.0, 0.0)
        self.received.index_add_(0, slots, (sums * RECEIVED_ONE).round_().to(torch.int64) * takes_more)
        self.could_attend.index_add_(0, slots, queries.to(self.could_attend) * takes_more)

    def publish(self, slots: Tensor) -> None:
        """Make what has been observed by now the scores that are read."""
        slots = self._on_device(slots)
        could_attend = self.could_attend[slots].to(torch.float32)
        received = self.received[slots].to(torch.float32) / RECEIVED_ONE
        self.published[slots] = torch.where(could_attend > 0, received / could_attend.clamp(min=1.0), 0.0)

    def read(self, slots: Tensor) -> Tensor:
        """Published scores float32 ``[n]`` of ``slots``, in [0, 1]; 0 where no sampled query could ever attend."""
        return self.published[self._on_device(slots)]

    def fetch(self, slots: NDArray[np.int64]) -> NDArray[np.float32]:
        """Published scores float32 ``[n]`` of ``slots`` on the host.

        On CUDA in the order of the calling thread's current stream, through pinned memory that the thread keeps; it
        sleeps until the copy is there. The result is the caller's own.
        """
        if self.published.device.type != "cuda":
            return self.read(torch.from_numpy(slots)).numpy()
        staging = getattr(self._per_thread, "staging", None)
        if staging is None or staging.rows < len(slots):
            staging = self._per_thread.staging = _Staging(len(slots), self.published.device)
        return staging.fetch(self.published, slots)

    def _on_device(self, slots: Tensor) -> Tensor:
        return slots.to(device=self.received.device, dtype=torch.int64)


class _Staging:
    """Memory on both sides for one thread's reads of up to ``rows`` scores."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows = 1 << max(0, rows - 1).bit_length()
        self._slots = torch.empty(self.rows, dtype=torch.int64, pin_memory=True)
        self._scores = torch.empty(self.rows, dtype=torch.float32, pin_memory=True)
        self._device_slots = torch.empty(self.rows, dtype=torch.int64, device=device)
        self._device_scores = torch.empty(self.rows, dtype=torch.float32, device=device)
        self._there = torch.cuda.Event(blocking=True)

    def fetch(self, published: Tensor, slots: NDArray[np.int64]) -> NDArray[np.float32]:
        rows = len(slots)
        self._slots.numpy()[:rows] = slots
        self._device_slots[:rows].copy_(self._slots[:rows], non_blocking=True)
        torch.index_select(published, 0, self._device_slots[:rows], out=self._device_scores[:rows])
        self._scores[:rows].copy_(self._device_scores[:rows], non_blocking=True)
        self._there.record(torch.cuda.current_stream(published.device))
        self._there.synchronize()
        return self._scores.numpy()[:rows].copy()
