"""Prologue: fixed size, strict reading, and errors that name the field."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.prologue import PROLOGUE_BYTES, Prologue, decode_prologue, encode_prologue

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
PROLOGUES = st.builds(
    Prologue,
    room=U64,
    generation=U64,
    sequence=U32,
    first_position=U32,
    rows_per_tier=st.lists(U32, min_size=1, max_size=4).map(tuple),
    total_bytes=U64,
    geometry_digest=U64,
    table_digest=U64,
)
PROLOGUE = Prologue(2**63 - 1, 7, 3, 5, (1, 2, 3), 4096, 11, 13)


@given(prologue=PROLOGUES)
@settings(deadline=None)
def test_round_trip(prologue: Prologue) -> None:
    raw = encode_prologue(prologue)
    assert len(raw) == PROLOGUE_BYTES
    assert decode_prologue(raw) == prologue
    assert decode_prologue(raw + b"codes") == prologue


@given(raw=st.binary(max_size=300) | st.binary(max_size=300).map(lambda tail: b"SKVP\x02\x00" + tail))
@settings(deadline=None)
def test_garbage_never_reads_as_something_else(raw: bytes) -> None:
    try:
        prologue = decode_prologue(raw)
    except PayloadError:
        return
    assert encode_prologue(prologue) == raw[:PROLOGUE_BYTES]


@given(prologue=PROLOGUES, position=st.integers(0, PROLOGUE_BYTES - 1), flip=st.integers(1, 255))
@settings(deadline=None)
def test_any_changed_byte_is_refused_or_seen(prologue: Prologue, position: int, flip: int) -> None:
    raw = bytearray(encode_prologue(prologue))
    raw[position] ^= flip
    try:
        decoded = decode_prologue(raw)
    except PayloadError:
        return
    assert decoded != prologue


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, b"X", "expected magic b'SKVP', got b'XKVP'"),
        (4, b"\x01", "expected format version 2, got 1"),
        (4, b"\x03", "expected format version 2, got 3"),
        (6, b"\x00", "expected 1 to 4 tiers, got 0"),
        (6, b"\x05", "expected 1 to 4 tiers, got 5"),
        (6, b"\x02", "expected no rows beyond tier 1"),
        (72, b"\x01", "expected zero in the reserved bytes"),
        (255, b"\x01", "expected zero in the reserved bytes"),
    ],
)
def test_errors_say_what_was_expected_and_what_came(position: int, value: bytes, message: str) -> None:
    raw = bytearray(encode_prologue(PROLOGUE))
    raw[position : position + 1] = value
    with pytest.raises(PayloadError, match=message):
        decode_prologue(raw)


@pytest.mark.parametrize("length", [0, 1, 255])
def test_truncation_is_refused(length: int) -> None:
    with pytest.raises(PayloadError, match=f"expected 256 bytes, got {length}"):
        decode_prologue(encode_prologue(PROLOGUE)[:length])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"room": -1}, "room must be between 0"),
        ({"room": 2**64}, "room must be between 0"),
        ({"sequence": 2**32}, "sequence must be between 0"),
        ({"first_position": 2**32}, "first_position must be between 0"),
        ({"rows_per_tier": ()}, "expected 1 to 4 tiers, got 0"),
        ({"rows_per_tier": (1,) * 5}, "expected 1 to 4 tiers, got 5"),
        ({"rows_per_tier": (1, 2**32)}, "rows of tier 1 must be between 0"),
    ],
)
def test_fields_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        encode_prologue(replace(PROLOGUE, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"room": 1},
        {"generation": 8},
        {"sequence": 4},
        {"first_position": 6},
        {"rows_per_tier": (1, 2, 4)},
        {"total_bytes": 4352},
        {"geometry_digest": 12},
        {"table_digest": 12},
    ],
    ids=lambda change: next(iter(change)),
)
def test_check_names_the_field_that_differs(change: dict[str, object]) -> None:
    PROLOGUE.check(replace(PROLOGUE))
    (name, value), *_ = change.items()
    with pytest.raises(PayloadError, match=name):
        replace(PROLOGUE, **change).check(PROLOGUE)  # type: ignore[arg-type]
    with pytest.raises(PayloadError, match=str(value).replace("(", r"\(").replace(")", r"\)")):
        replace(PROLOGUE, **change).check(PROLOGUE)  # type: ignore[arg-type]
