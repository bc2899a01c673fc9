"""TCP or RDMA: what a chunk costs on either, beside its bytes."""

from __future__ import annotations

from enum import Enum


class Transport(str, Enum):
    """How bytes travel."""

    TCP = "tcp"
    RDMA = "rdma"

    @property
    def chunk_seconds(self) -> float:
        """What a chunk costs beside packing, bytes and unpacking, where that was not measured with them.

        TCP: what single chunks took beyond kernels and bytes on the H200, fitted to 1, 5 and 25 Gb/s; 17 ms in an
        earlier run at 10 Gb/s (docs/results/gpu.md): host staging, the first payload and the last. RDMA was not to be
        had: asking for slots and answers alone.
        """
        return 0.026 if self is Transport.TCP else 0.002

    @property
    def why(self) -> str:
        """The same in words."""
        if self is Transport.TCP:
            return f"{self.chunk_seconds * 1e3:g} ms a chunk, as over TCP in docs/results/gpu.md"
        return f"{self.chunk_seconds * 1e3:g} ms a chunk, assumed: RDMA was not measured"
