"""Tier map: two bits a row, nothing else accepted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.tier_map import decode_tier_map, encode_tier_map, tier_map_bytes


@given(tier_count=st.integers(1, 4), data=st.data())
@settings(deadline=None)
def test_round_trip(tier_count: int, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, tier_count - 1), max_size=70))
    tiers = np.array(rows, dtype=np.uint8)
    raw = encode_tier_map(tiers, tier_count)
    assert len(raw) == tier_map_bytes(len(rows)) == -(-len(rows) // 4)
    decoded = decode_tier_map(raw, len(rows), tier_count)
    assert decoded.dtype == np.uint8
    assert np.array_equal(decoded, tiers)


def test_first_row_sits_in_the_lowest_bits() -> None:
    assert encode_tier_map(np.array([1, 0, 2, 3, 2], np.uint8), 4) == bytes([0b11_10_00_01, 0b10])


@given(raw=st.binary(max_size=6), rows=st.integers(0, 24), tier_count=st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_garbage_is_refused_or_is_exactly_a_tier_map(raw: bytes, rows: int, tier_count: int) -> None:
    try:
        tiers = decode_tier_map(raw, rows, tier_count)
    except PayloadError:
        return
    assert encode_tier_map(tiers, tier_count) == raw


@pytest.mark.parametrize(
    ("raw", "rows", "tier_count", "message"),
    [
        (b"\0", 5, 3, "expected 2 bytes for 5 rows, got 1"),
        (b"\0\0\0", 5, 3, "expected 2 bytes for 5 rows, got 3"),
        (b"\x03", 4, 3, "expected tiers below 3, got 3"),
        (b"\x00\x10", 6, 3, "expected zero bits after row 6, got 0x10"),
        (b"", -1, 3, "rows must not be negative"),
        (b"\0", 1, 5, "tier count must be 1 to 4, got 5"),
    ],
)
def test_errors_say_what_was_expected_and_what_came(raw: bytes, rows: int, tier_count: int, message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        decode_tier_map(raw, rows, tier_count)


def test_encoding_refuses_a_tier_that_the_table_lacks() -> None:
    with pytest.raises(PayloadError, match="expected tiers below 2, got 2"):
        encode_tier_map(np.array([0, 2], np.uint8), 2)
    with pytest.raises(PayloadError, match="expected a uint8 vector, got int64"):
        encode_tier_map(np.array([0, 1]), 2)
