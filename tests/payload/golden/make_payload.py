"""Describe and write the golden payload of a format version.

``python tests/payload/golden/make_payload.py`` writes ``v<FORMAT_VERSION>.bin`` and refuses to replace an existing
file: a golden file is what released versions put on the wire, so a change of bytes needs a new format version, not a
new file.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.payload.codec import KVBuffers, pack_payload, write_prologue
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.layout import plan_layout
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.payload.prologue import FORMAT_VERSION, Prologue

GOLDEN = Path(__file__).with_name(f"v{FORMAT_VERSION}.bin")
GEOMETRY = KVGeometry(layers=2, kv_heads=3, head_dim=16, v_head_dim=24, page_size=4, dtype="float16")
TIERS = np.array([0, 1, 2, 2, 1, 0, 2, 1, 0, 0, 2, 2, 1, 2, 1, 1, 0, 2, 2, 2], dtype=np.uint8)
POOL_SLOTS = torch.arange(20).flip(0) * 2
POOL_SIZE = 40


def table() -> PrecisionTable:
    """All precisions, K unlike V, the first layer unlike the second, one head unlike the others."""
    values = np.zeros((3, 2, 2, 3), dtype=np.uint8)
    values[1, :, 0], values[1, :, 1] = Precision.FP8_E4M3, Precision.INT8
    values[2, :, 0], values[2, :, 1] = Precision.INT8, Precision.INT4
    values[2, 1, 0] = Precision.INT4
    values[2, :, :, 1] = Precision.NATIVE
    return PrecisionTable(values)


def buffers() -> KVBuffers:
    """Pool of small dyadic numbers (exact in float16) of several magnitudes, with one NaN and one infinity."""

    def pool(dim: int, seed: int) -> torch.Tensor:
        count = POOL_SIZE * GEOMETRY.kv_heads * dim
        mixed = (np.arange(count, dtype=np.uint64) + np.uint64(seed)) * np.uint64(2654435761) % np.uint64(2**32)
        signed = (mixed >> np.uint64(22)).astype(np.float32) - 512.0
        x = signed.reshape(POOL_SIZE, GEOMETRY.kv_heads, dim) / 2.0 ** (np.arange(POOL_SIZE) % 12)[:, None, None]
        return torch.from_numpy(x.astype(np.float16))

    k, v = [pool(GEOMETRY.head_dim, seed) for seed in (1, 2)], [pool(GEOMETRY.v_head_dim, seed) for seed in (3, 4)]
    k[0][POOL_SLOTS[2], 0, 5] = float("nan")
    v[1][POOL_SLOTS[3], 2, 7] = float("inf")
    v[1][POOL_SLOTS[6]] = 0.0
    return KVBuffers(k, v)


def payload() -> torch.Tensor:
    """The payload as this build makes it."""
    layout = plan_layout(GEOMETRY, table(), np.bincount(TIERS, minlength=3).tolist())
    out = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    pack_payload(buffers(), POOL_SLOTS, TIERS, layout, out)
    write_prologue(
        out,
        Prologue(
            room=0x0123_4567_89AB_CDEF,
            generation=42,
            sequence=7,
            rows_per_tier=layout.rows_per_tier,
            total_bytes=layout.total_bytes,
            geometry_digest=GEOMETRY.digest(),
            table_digest=table().digest(),
        ),
    )
    return out


def main() -> int:
    """Write the golden file of the current format version."""
    if GOLDEN.exists():
        sys.stderr.write(f"{GOLDEN} exists; changed bytes need a new FORMAT_VERSION in payload/prologue.py\n")
        return 1
    GOLDEN.write_bytes(payload().numpy().tobytes())
    return 0


if __name__ == "__main__":
    sys.exit(main())
