"""KV geometry: what it refuses, and that its digest means its content."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.geometry import KVGeometry

GEOMETRY = KVGeometry(layers=30, kv_heads=3, head_dim=64, v_head_dim=64, page_size=1, dtype="float32")
GEOMETRY_DIGEST = 0xBF1773F1C3FF6549


def test_native_bytes_per_token_counts_keys_and_values() -> None:
    assert GEOMETRY.native_bytes_per_token == 46_080
    assert replace(GEOMETRY, v_head_dim=32, dtype="bfloat16").native_bytes_per_token == 30 * 3 * 96 * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers must be between 1 and 4096, got 0"),
        ({"kv_heads": -1}, "kv_heads must be between 1"),
        ({"head_dim": 60}, "head_dim must be a multiple of 8, got 60"),
        ({"v_head_dim": 12}, "v_head_dim must be a multiple of 8, got 12"),
        ({"page_size": 2**20}, "page_size must be between 1 and 65536"),
        ({"layers": True}, "layers must be an int, got bool"),
        ({"kv_heads": 2.0}, "kv_heads must be an int, got float"),
        ({"dtype": "float8_e5m2"}, "dtype must be one of float32, float16, bfloat16, got 'float8_e5m2'"),
    ],
)
def test_impossible_geometry_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        replace(GEOMETRY, **change)  # type: ignore[arg-type]


def test_digest_tells_every_field_apart_and_never_changes() -> None:
    others = [
        replace(GEOMETRY, layers=31),
        replace(GEOMETRY, kv_heads=4),
        replace(GEOMETRY, head_dim=128),
        replace(GEOMETRY, v_head_dim=128),
        replace(GEOMETRY, page_size=16),
        replace(GEOMETRY, dtype="float16"),
    ]
    assert len({geometry.digest() for geometry in (GEOMETRY, *others)}) == 7
    assert replace(GEOMETRY).digest() == GEOMETRY.digest() == GEOMETRY_DIGEST
