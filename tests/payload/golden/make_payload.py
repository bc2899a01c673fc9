"""Describe and write the golden payloads of a format version.

``python tests/payload/golden/make_payload.py`` writes ``v<FORMAT_VERSION>.bin``, ``v<FORMAT_VERSION>-channels.bin`` and
``v<FORMAT_VERSION>-transforms.bin`` where they do not exist, and replaces none: a golden file is what released versions
put on the wire, so a change of bytes needs a new format version, not a new file.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.transforms import Transform
from spectrumkv_sglang.payload.codec import KVBuffers, pack_payload, write_prologue
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.key_rotation import KeyRotation
from spectrumkv_sglang.payload.layout import plan_layout
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.payload.prologue import FORMAT_VERSION, Prologue

GOLDEN = Path(__file__).with_name(f"v{FORMAT_VERSION}.bin")
GOLDEN_CHANNEL = GOLDEN.with_name(f"v{FORMAT_VERSION}-channels.bin")
GOLDEN_TRANSFORMS = GOLDEN.with_name(f"v{FORMAT_VERSION}-transforms.bin")
GEOMETRY = KVGeometry(layers=2, kv_heads=3, head_dim=16, v_head_dim=32, page_size=4, dtype="float16")
TIERS = np.array([0, 1, 2, 2, 1, 0, 2, 1, 0, 0, 2, 2, 1, 2, 1, 1, 0, 2, 2, 2], dtype=np.uint8)
POOL_SLOTS = torch.arange(20).flip(0) * 2
POOL_SIZE = 40
FIRST_POSITION = 3


def table() -> PrecisionTable:
    """All precisions, K unlike V, the first layer unlike the second, one head unlike the others."""
    values = np.zeros((3, 2, 2, 3), dtype=np.uint8)
    values[1, :, 0], values[1, :, 1] = Precision.FP8_E4M3, Precision.INT8
    values[2, :, 0], values[2, :, 1] = Precision.INT8, Precision.INT4
    values[2, 1, 0] = Precision.INT4
    values[2, :, :, 1] = Precision.NATIVE
    return PrecisionTable(values)


def channel_table() -> PrecisionTable:
    """Scales that rows share, of every width, in keys, in one head of the values, and in a tier of one row."""
    values = np.zeros((4, 2, 2, 3), dtype=np.uint8)
    values[1], values[2] = Precision.INT8, Precision.INT4
    values[2, 0, 0] = Precision.INT4_CHANNEL, Precision.INT2_CHANNEL, Precision.INT3_CHANNEL
    values[2, 1, 0] = Precision.INT5_CHANNEL, Precision.INT6_CHANNEL, Precision.INT8_CHANNEL
    values[2, 1, 1, 2] = Precision.INT4_CHANNEL
    values[3] = Precision.INT4_CHANNEL
    return PrecisionTable(values)


def transform_table() -> PrecisionTable:
    """Every width by row, values through the Hadamard transform in the second layer, keys without their rotation in the
    first. The pool's numbers make sums that no order of adding rounds."""
    values = np.zeros((3, 2, 2, 3), dtype=np.uint8)
    values[1], values[2] = Precision.INT8, Precision.INT3
    values[2, :, :, 1], values[2, :, :, 2] = Precision.INT2, Precision.INT5
    values[2, 0] = Precision.INT6
    return PrecisionTable(values, np.array([[Transform.DEROPE, 0], [0, Transform.HADAMARD]], dtype=np.uint8))


def rotation() -> KeyRotation:
    """Quarter turns, which are exact in every arithmetic, over half of a head, with a factor as YaRN's."""
    turns = np.arange(FIRST_POSITION + 20)[:, None] * np.arange(1, 5)[None, :] % 4
    cos, sin = (
        torch.from_numpy(np.tile(2.0 * np.array(of)[turns], 2).astype(np.float32))
        for of in ([1, 0, -1, 0], [0, 1, 0, -1])
    )
    return KeyRotation(((cos, sin), (cos, sin)))


def channel_rows() -> tuple[np.ndarray, torch.Tensor]:
    """Tiers and pool slots of 150 rows: 135 of tier 2 (a full block and a short one), 1 of tier 3."""
    tiers = np.full(150, 2, dtype=np.uint8)
    tiers[:4], tiers[100:110], tiers[140] = 0, 1, 3
    return tiers, torch.arange(150).flip(0)


def buffers(pool_size: int = POOL_SIZE) -> KVBuffers:
    """Pool of small dyadic numbers (exact in float16) of several magnitudes, with one NaN and one infinity."""

    def pool(dim: int, seed: int) -> torch.Tensor:
        count = pool_size * GEOMETRY.kv_heads * dim
        mixed = (np.arange(count, dtype=np.uint64) + np.uint64(seed)) * np.uint64(2654435761) % np.uint64(2**32)
        signed = (mixed >> np.uint64(22)).astype(np.float32) - 512.0
        x = signed.reshape(pool_size, GEOMETRY.kv_heads, dim) / 2.0 ** (np.arange(pool_size) % 12)[:, None, None]
        return torch.from_numpy(x.astype(np.float16))

    k, v = [pool(GEOMETRY.head_dim, seed) for seed in (1, 2)], [pool(GEOMETRY.v_head_dim, seed) for seed in (3, 4)]
    k[0][POOL_SLOTS[2], 0, 5] = float("nan")
    v[1][POOL_SLOTS[3], 2, 7] = float("inf")
    v[1][POOL_SLOTS[6]] = 0.0
    return KVBuffers(k, v)


def payload() -> torch.Tensor:
    """The payload of `table` as this build makes it."""
    return _payload(buffers(), table(), TIERS, POOL_SLOTS)


def channel_payload() -> torch.Tensor:
    """The payload of `channel_table` as this build makes it."""
    tiers, pool_slots = channel_rows()
    return _payload(buffers(len(tiers)), channel_table(), tiers, pool_slots)


def transform_payload() -> torch.Tensor:
    """The payload of `transform_table` as this build makes it."""
    return _payload(buffers(), transform_table(), TIERS, POOL_SLOTS)


def _payload(pool: KVBuffers, of: PrecisionTable, tiers: np.ndarray, pool_slots: torch.Tensor) -> torch.Tensor:
    layout = plan_layout(GEOMETRY, of, np.bincount(tiers, minlength=of.tiers).tolist())
    out = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    pack_payload(
        pool, pool_slots, tiers, layout, out, rotated=rotation().at(FIRST_POSITION, 20) if len(tiers) == 20 else None
    )
    write_prologue(
        out,
        Prologue(
            room=0x0123_4567_89AB_CDEF,
            generation=42,
            sequence=7,
            first_position=FIRST_POSITION,
            rows_per_tier=layout.rows_per_tier,
            total_bytes=layout.total_bytes,
            geometry_digest=GEOMETRY.digest(),
            table_digest=of.digest(),
        ),
    )
    return out


def main() -> int:
    """Write the golden files of the current format version that are not there."""
    written = 0
    for path, make in (
        (GOLDEN, payload),
        (GOLDEN_CHANNEL, channel_payload),
        (GOLDEN_TRANSFORMS, transform_payload),
    ):
        if path.exists():
            sys.stderr.write(f"{path} exists; changed bytes need a new FORMAT_VERSION in payload/prologue.py\n")
            continue
        path.write_bytes(make().numpy().tobytes())
        written += 1
    return 0 if written else 1


if __name__ == "__main__":
    sys.exit(main())
