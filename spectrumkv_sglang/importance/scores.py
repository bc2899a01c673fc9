"""Importance of cached tokens, kept where their KV is kept: by pool slot."""

from __future__ import annotations

import torch
from torch import Tensor


class SlotScores:
    """Normalised attention received, one score a KV pool slot.

    A numerator (attention received) and a denominator (sampled queries that could attend), both float32
    ``[pool_slots]``, add up over layers, chunks and requests: a cached prefix keeps its score and blends in what later
    queries say. Their ratio, the mean probability a query and layer gave to the token, does not favour early tokens as
    the raw sum does. Slot arguments are int64 ``[n]``, without repeats within one call, on any device.

    Not synchronised: on CUDA call it on the stream that runs the forward, or order the streams by events.
    """

    def __init__(self, pool_slots: int, device: torch.device | str) -> None:
        """Room for slot ids 0 .. ``pool_slots - 1``: 8 bytes a slot on ``device``."""
        if pool_slots < 1:
            raise ValueError(f"a KV pool has at least one slot, got {pool_slots}")
        self._received = torch.zeros(pool_slots, dtype=torch.float32, device=device)
        self._could_attend = torch.zeros(pool_slots, dtype=torch.float32, device=device)

    def reset(self, slots: Tensor) -> None:
        """Forget ``slots``: newly allocated ones must not inherit the score of an earlier token."""
        slots = self._on_device(slots)
        self._received[slots] = 0.0
        self._could_attend[slots] = 0.0

    def add(self, slots: Tensor, column_sums: Tensor, queries: Tensor) -> None:
        """Add one observation: ``column_sums`` and ``queries`` float32 ``[n]``, from ``observed_attention``."""
        if not slots.shape == column_sums.shape == queries.shape:
            raise ValueError(
                "slots, column sums and queries must have one shape, got "
                f"{tuple(slots.shape)}, {tuple(column_sums.shape)} and {tuple(queries.shape)}"
            )
        slots = self._on_device(slots)
        self._received.index_add_(0, slots, column_sums.to(self._received))
        self._could_attend.index_add_(0, slots, queries.to(self._could_attend))

    def read(self, slots: Tensor) -> Tensor:
        """Scores float32 ``[n]`` of ``slots``, in [0, 1]; 0 where no sampled query could ever attend."""
        slots = self._on_device(slots)
        could_attend = self._could_attend[slots]
        return torch.where(could_attend > 0, self._received[slots] / could_attend.clamp(min=1.0), 0.0)

    def _on_device(self, slots: Tensor) -> Tensor:
        return slots.to(device=self._received.device, dtype=torch.int64)
