"""One registered memory region cut into equal slots, and the work area that kernels see.

Placement: plain memory for a CPU pool, pinned host memory for a CUDA pool over TCP (Mooncake's TCP transport copies
device memory in small synchronous pieces), device memory for a CUDA pool over RDMA or NVLink. With pinned memory the
kernels work in a device-side scratch slot per thread and one copy moves the payload across.
"""

from __future__ import annotations

import os
import threading
from enum import Enum
from typing import Protocol

import torch

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.transport_tuning import tcp_is_forced


class RegistrationError(SpectrumKVError):
    """Mooncake refused to register slot memory: KV then travels natively."""


class RegistrationEngine(Protocol):
    """The two Mooncake engine calls that this module needs."""

    def register_memory(self, buffer_addr: int, capacity: int) -> int: ...
    def unregister_memory(self, buffer_addr: int) -> int: ...


class Placement(str, Enum):
    """Kind of memory that slots lie in."""

    host = "host"
    pinned = "pinned"
    device = "device"


def choose_placement(pool_device: torch.device) -> Placement:
    """Placement for a pool on ``pool_device``, from the transport that the environment selects."""
    if pool_device.type != "cuda":
        return Placement.host
    tcp = tcp_is_forced(os.environ) or os.environ.get("MOONCAKE_PROTOCOL", "").lower() == "tcp"
    return Placement.pinned if tcp else Placement.device


class SlotMemory:
    """``count`` slots of ``slot_bytes`` bytes in one region registered with the Mooncake engine.

    Raises:
        RegistrationError: the engine refused the registration (its return code is in the message).
    """

    def __init__(self, engine: RegistrationEngine, count: int, slot_bytes: int, pool_device: torch.device) -> None:
        if slot_bytes % 256:
            raise SpectrumKVError(f"slot_bytes must be a multiple of 256, got {slot_bytes}")
        self.slot_bytes = slot_bytes
        self.placement = choose_placement(pool_device)
        self.pool_device = pool_device
        total = count * slot_bytes
        if self.placement is Placement.device:
            self._region = torch.zeros(total, dtype=torch.uint8, device=pool_device)
        else:
            self._region = torch.zeros(total, dtype=torch.uint8, pin_memory=self.placement is Placement.pinned)
        self._engine = engine
        self._per_thread = threading.local()
        code = engine.register_memory(self._region.data_ptr(), total)
        if code != 0:
            raise RegistrationError(
                f"Mooncake refused to register {total} bytes of slot memory (code {code}; -1 zero length, -7 overlap); "
                "check the RDMA memlock limit (ulimit -l) or lower landing_slots / slot_bytes"
            )

    def address(self, index: int) -> int:
        """Address of slot ``index`` as the peer must name it."""
        return self._region.data_ptr() + index * self.slot_bytes

    def view(self, index: int, length: int) -> torch.Tensor:
        """uint8 tensor over the first ``length`` bytes of slot ``index``, in the registered region."""
        start = index * self.slot_bytes
        return self._region[start : start + length]

    def work_area(self, index: int, length: int) -> torch.Tensor:
        """uint8 tensor of ``length`` bytes that pack and unpack kernels may use: the slot itself, or device scratch."""
        if self.placement is not Placement.pinned:
            return self.view(index, length)
        scratch = getattr(self._per_thread, "scratch", None)
        if scratch is None:
            scratch = torch.empty(self.slot_bytes, dtype=torch.uint8, device=self.pool_device)
            self._per_thread.scratch = scratch
        return scratch[:length]

    def flush_to_slot(self, index: int, length: int) -> None:
        """Make what is packed in the work area visible in the slot, in the current stream's order."""
        if self.placement is Placement.pinned:
            self.view(index, length).copy_(self.work_area(index, length), non_blocking=True)

    def load_from_slot(self, index: int, length: int) -> torch.Tensor:
        """The slot's bytes where unpack kernels can read them."""
        work = self.work_area(index, length)
        if self.placement is Placement.pinned:
            work.copy_(self.view(index, length), non_blocking=True)
        return work

    def close(self) -> None:
        """Unregister the region. The memory itself is freed with the last reference."""
        self._engine.unregister_memory(self._region.data_ptr())
