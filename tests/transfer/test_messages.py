"""Control messages: they survive the trip, and whatever else arrives is a ControlMessageError and nothing worse."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrumkv_sglang.payload.precision_table import MAX_TIERS
from spectrumkv_sglang.transfer.errors import ControlMessageError
from spectrumkv_sglang.transfer.handshake import MAGIC as HANDSHAKE_MAGIC
from spectrumkv_sglang.transfer.handshake import decode_handshake
from spectrumkv_sglang.transfer.messages import (
    MAGIC,
    MAX_MESSAGE_BYTES,
    MOST_GRANTED_SLOTS,
    PROTOCOL_VERSION,
    Close,
    Commit,
    DecodeMessage,
    Done,
    Failed,
    Granted,
    Open,
    PrefillMessage,
    Refused,
    SlotGrant,
    decode_from_decode,
    decode_from_prefill,
    encode,
    seal_envelope,
)

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
PAGE_COUNT = st.integers(1, 2**31 - 1)
TEXT = st.text(max_size=100)
GRANTS = st.lists(st.builds(SlotGrant, U32, U64, U64), min_size=1, max_size=MOST_GRANTED_SLOTS)
SECONDS = st.floats(0, 3600)
FROM_PREFILL: st.SearchStrategy[PrefillMessage] = st.one_of(
    st.builds(
        Open,
        U64,
        U64,
        U64,
        U64,
        U32,
        PAGE_COUNT,
        U64,
        U32,
        st.integers(1, 2**16 - 1),
        st.binary(max_size=300),
        st.lists(st.integers(0, MAX_TIERS - 1), min_size=1, max_size=MAX_TIERS),
        st.integers(1, MOST_GRANTED_SLOTS),
        SECONDS,
    ),
    st.builds(
        Commit,
        U64,
        U32,
        U32,
        U64,
        U32,
        PAGE_COUNT,
        U32,
        st.lists(U32, min_size=1, max_size=MAX_TIERS),
        st.binary(max_size=300),
        U64,
        U64,
        st.text(max_size=16),
        U64,
    ),
    st.builds(Close, U64, st.lists(U32, max_size=MOST_GRANTED_SLOTS)),
)
FROM_DECODE: st.SearchStrategy[DecodeMessage] = st.one_of(
    st.builds(Granted, U64, GRANTS, U64),
    st.builds(Refused, U64, TEXT, TEXT),
    st.builds(Done, U64, U32, U32, U64, SECONDS),
    st.builds(Failed, U64, U32, TEXT, TEXT),
)
# One message of each kind, with the decoder of its direction.
EXAMPLES: list[tuple[Any, Any]] = [
    (Open(1, 5, 2**63, 2**64 - 1, 0, 900, 2**64 - 1, 0, 8, b"\3" + b"\0" * 30, [0, 2], 4, 1.0), decode_from_prefill),
    (Commit(1, 2, 3, 4, 5, 6, 7, [1, 2, 3], b"\0\1", 70_000, 2**64 - 1), decode_from_prefill),
    (Close(1, [0, 7]), decode_from_prefill),
    (Granted(1, [SlotGrant(0, 1, 2**47), SlotGrant(1, 9, 2**47 + 4096)], 4096), decode_from_decode),
    (Refused(1, "room_gone", "room 5 is not open"), decode_from_decode),
    (Done(1, 2, 3, 4, 0.5), decode_from_decode),
    (Failed(1, 2, "checksum_mismatch", "slot 3"), decode_from_decode),
    (Commit(1, 2, 3, 4, 5, 6, 7, [1, 2, 3], b"\0\1", 70_000, 2**64 - 1, "zstd", 60_000), decode_from_prefill),
]
EACH_MESSAGE = pytest.mark.parametrize(("message", "decode"), EXAMPLES, ids=[type(m).__name__ for m, _ in EXAMPLES])
ENVELOPE_BYTES = 8


def frame_of(fields: dict[str, Any]) -> bytes:
    return seal_envelope(MAGIC, msgspec.msgpack.encode(fields))


@given(message=FROM_PREFILL)
@settings(max_examples=150, deadline=None)
def test_prefill_messages_round_trip(message: PrefillMessage) -> None:
    assert decode_from_prefill(encode(message)) == message


@given(message=FROM_DECODE)
@settings(max_examples=150, deadline=None)
def test_decode_messages_round_trip(message: DecodeMessage) -> None:
    assert decode_from_decode(encode(message)) == message


@EACH_MESSAGE
def test_every_truncation_and_any_trailing_byte_is_refused(message: Any, decode: Any) -> None:
    frame = encode(message)
    for end in range(len(frame)):
        with pytest.raises(ControlMessageError):
            decode(frame[:end])
    for extra in (b"\0", b"\xc0", frame):
        with pytest.raises(ControlMessageError):
            decode(frame + extra)


@EACH_MESSAGE
def test_another_magic_version_or_reserved_byte_is_refused(message: Any, decode: Any) -> None:
    frame = encode(message)
    with pytest.raises(ControlMessageError, match="expected magic b'SKVC', got b'SKVH'"):
        decode(b"SKVH" + frame[4:])
    for version in (0, PROTOCOL_VERSION + 1, 2**16 - 1):
        with pytest.raises(ControlMessageError, match=f"expected protocol version {PROTOCOL_VERSION}, got {version}"):
            decode(frame[:4] + version.to_bytes(2, "little") + frame[6:])
    with pytest.raises(ControlMessageError, match="reserved"):
        decode(frame[:6] + b"\0\1" + frame[8:])


@EACH_MESSAGE
def test_a_frame_beyond_the_limit_is_refused_unread(message: Any, decode: Any) -> None:
    frame = encode(message)
    with pytest.raises(ControlMessageError, match=f"exceeds the limit of {MAX_MESSAGE_BYTES}"):
        decode(frame + b"\0" * (MAX_MESSAGE_BYTES + 1 - len(frame)))


@given(garbage=st.binary(max_size=400), sealed=st.booleans())
@settings(max_examples=300, deadline=None)
def test_garbage_is_refused(garbage: bytes, sealed: bool) -> None:
    for decode in (decode_from_prefill, decode_from_decode):
        with pytest.raises(ControlMessageError):
            decode(seal_envelope(MAGIC, garbage) if sealed else garbage)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_damaged_frame_is_a_message_or_refused(data: st.DataObject) -> None:
    message, decode = data.draw(st.sampled_from(EXAMPLES))
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        damaged = decode(bytes(frame))
    except ControlMessageError:
        return
    assert isinstance(damaged, PrefillMessage if decode is decode_from_prefill else DecodeMessage)
    assert decode(encode(damaged)) == damaged or damaged != damaged  # NaN seconds are not equal to themselves


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), U64, st.integers(-(2**63), -1), st.floats(), TEXT, st.binary(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)),
    max_leaves=8,
)


@given(data=st.data(), value=VALUES)
@settings(max_examples=300, deadline=None)
def test_any_value_in_any_field_is_a_message_or_refused(data: st.DataObject, value: Any) -> None:
    message, decode = data.draw(st.sampled_from(EXAMPLES))
    fields = msgspec.to_builtins(message, builtin_types=(bytes,))
    fields[data.draw(st.sampled_from(sorted(fields)))] = value
    with contextlib.suppress(ControlMessageError):
        decode(frame_of(fields))


@EACH_MESSAGE
def test_missing_and_unknown_fields_and_tags_are_refused(message: Any, decode: Any) -> None:
    fields = msgspec.to_builtins(message, builtin_types=(bytes,))
    assert decode(frame_of(fields)) == message
    for name in fields.keys() - {"codec", "stored"}:  # absent where no codec was used
        with pytest.raises(ControlMessageError):
            decode(frame_of({other: value for other, value in fields.items() if other != name}))
    with pytest.raises(ControlMessageError, match="unknown field `pages`"):
        decode(frame_of({**fields, "pages": [1, 2, 3]}))
    tags: list[object] = ["Abort", "", "open", 0, None, [], 2**64 - 1]
    for tag in tags:
        with pytest.raises(ControlMessageError):
            decode(frame_of({**fields, "type": tag}))


@EACH_MESSAGE
def test_a_message_of_the_other_direction_is_refused(message: Any, decode: Any) -> None:
    other = decode_from_decode if decode is decode_from_prefill else decode_from_prefill
    with pytest.raises(ControlMessageError):
        other(encode(message))


OUT_OF_RANGE = [
    (0, {"chunk": -1}),
    (0, {"boot_id": -1}),
    (0, {"room": -1}),
    (0, {"room": 1.5}),
    (0, {"room": True}),
    (0, {"room": 2.0**64}),
    (0, {"page_start": 2**32}),
    (0, {"page_start": -1}),
    (0, {"page_count": 0}),
    (0, {"page_count": 2**31}),
    (0, {"tiers": []}),
    (0, {"tiers": [MAX_TIERS]}),
    (0, {"tiers": [-1]}),
    (0, {"tiers": [0] * (MAX_TIERS + 1)}),
    (0, {"slots_wanted": 0}),
    (0, {"slots_wanted": MOST_GRANTED_SLOTS + 1}),
    (0, {"wait_seconds": -0.1}),
    (0, {"wait_seconds": 3601.0}),
    (0, {"wait_seconds": float("nan")}),
    (0, {"wait_seconds": float("inf")}),
    (0, {"table": b"\0" * ((1 << 20) + 1)}),
    (1, {"sequence": 2**32}),
    (1, {"slot": 2**32}),
    (1, {"slot": -1}),
    (1, {"generation": -1}),
    (1, {"page_count": 0}),
    (1, {"rows_per_tier": []}),
    (1, {"rows_per_tier": [1] * (MAX_TIERS + 1)}),
    (1, {"rows_per_tier": [-1]}),
    (1, {"rows_per_tier": [2**32]}),
    (1, {"length": -1}),
    (1, {"checksum": -1}),
    (2, {"failed_slots": [-1]}),
    (2, {"failed_slots": [2**32]}),
    (2, {"failed_slots": [0] * (MOST_GRANTED_SLOTS + 1)}),
    (3, {"slots": []}),
    (3, {"slots": [[0, 1, 2]] * (MOST_GRANTED_SLOTS + 1)}),
    (3, {"slots": [[0, 1]]}),
    (3, {"slots": [[0, 1, 2, 3]]}),
    (3, {"slots": [[2**32, 1, 2]]}),
    (3, {"slots": [[0, -1, 2]]}),
    (3, {"slots": [[0, 1, -1]]}),
    (3, {"slot_bytes": -1}),
    (4, {"code": "x" * 2049}),
    (4, {"message": "x" * 2049}),
    (5, {"generation": -1}),
    (5, {"slot": 2**32}),
    (5, {"unpack_seconds": -0.1}),
    (5, {"unpack_seconds": 3601.0}),
    (5, {"unpack_seconds": float("nan")}),
    (5, {"unpack_seconds": float("inf")}),
    (6, {"sequence": -1}),
]


@pytest.mark.parametrize(("example", "change"), OUT_OF_RANGE)
def test_numbers_and_lengths_out_of_range_are_refused(example: int, change: dict[str, Any]) -> None:
    message, decode = EXAMPLES[example]
    fields = msgspec.to_builtins(message, builtin_types=(bytes,))
    with pytest.raises(ControlMessageError):
        decode(frame_of({**fields, **change}))


@pytest.mark.parametrize("beyond", [2**64, 2**100, -(2**63) - 1])
@EACH_MESSAGE
def test_a_number_beyond_64_bits_cannot_be_sent(message: Any, decode: Any, beyond: int) -> None:
    with pytest.raises(ControlMessageError, match="cannot be sent"):
        encode(msgspec.structs.replace(message, chunk=beyond))


DEEP = 100_000


@pytest.mark.parametrize("decode", [decode_from_prefill, decode_from_decode])
@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * DEEP + b"\x90",  # arrays in arrays
        b"\x81\xa1a" * DEEP + b"\xc0",  # maps in maps
        b"\x82\xa1a" + b"\x91" * DEEP + b"\x90\xa4type\xa4Open",  # behind a field that is read before the tag
        b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1 elements that do not follow
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x82\xa4type\xa7Granted\xa5slots\xdd\xff\xff\xff\xff",
        b"\x81\xa4type\xa4\xff\xfe\xff\xfe",  # not UTF-8
        b"\xc1",  # never used by msgpack
    ],
    ids=["arrays", "maps", "untagged", "array-header", "map-header", "bytes-header", "slots-header", "utf8", "unused"],
)
def test_hostile_msgpack_is_refused(decode: Any, body: bytes) -> None:
    with pytest.raises(ControlMessageError):
        decode(seal_envelope(MAGIC, body))


@pytest.mark.parametrize("decode", [decode_from_prefill, decode_from_decode, decode_handshake])
@pytest.mark.parametrize("forged", ["\nERROR: all KV is lost", "\r\u2028\x1b[2J" * 100, "x" * (3 << 20)])
def test_what_a_peer_wrote_neither_fills_a_log_nor_forges_its_lines(decode: Any, forged: str) -> None:
    magic = HANDSHAKE_MAGIC if decode is decode_handshake else MAGIC
    for fields in ({"type": forged}, {forged: 1}, {"type": "Close", "chunk": 1, "failed_slots": [], forged: 1}):
        with pytest.raises(ControlMessageError) as error:
            decode(seal_envelope(magic, msgspec.msgpack.encode(fields)))
        assert str(error.value).isprintable()
        assert len(str(error.value)) < 1200


def test_the_envelope_has_eight_bytes() -> None:
    assert seal_envelope(MAGIC, b"body") == MAGIC + PROTOCOL_VERSION.to_bytes(2, "little") + b"\0\0body"
    assert len(seal_envelope(MAGIC, b"")) == ENVELOPE_BYTES
