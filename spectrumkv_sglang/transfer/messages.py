"""Control messages between a prefill rank and a decode rank.

Every message is one ZMQ frame: an 8-byte envelope (magic ``SKVC``, protocol version u16, two zero bytes) followed
by one msgpack-encoded tagged struct. Decoding is strict: unknown tags, missing or mistyped fields, another
version, truncation and trailing bytes all raise :class:`ControlMessageError` that names what was expected.

    prefill                                        decode
    Open(room, prompt, geometry, table, ...)   ->
                                               <-  Granted(slots) | Refused(code)
    (one Mooncake write into a landing slot)
    Commit(slot, generation, page range, ...)  ->
                                               <-  Done(sequence, new generation) | Failed(code)
    Close(failed slots)                        ->
"""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec

from spectrumkv_sglang.payload.precision_table import MAX_TIERS
from spectrumkv_sglang.transfer.errors import ControlMessageError, quoted

MAGIC = b"SKVC"
PROTOCOL_VERSION = 7
MAX_MESSAGE_BYTES = 4 << 20
MAX_ANSWER_BYTES = 64 << 10  # of a decode rank: its longest has two texts
MOST_UNREAD_MESSAGES = 64  # of one peer; a chunk has three times MOST_GRANTED_SLOTS under way at most
MOST_GRANTED_SLOTS = 16  # a chunk's pipeline keeps no more busy
MOST_UNPACK_SECONDS = 3600.0
_ENVELOPE = struct.Struct("<4sHH")

U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
# msgpack has unsigned 64-bit integers, which msgspec bounds only below 2**63: the range is checked where it is used.
U64 = Annotated[int, msgspec.Meta(ge=0)]
TierList = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, lt=MAX_TIERS)]], msgspec.Meta(min_length=1, max_length=MAX_TIERS)
]
Text = Annotated[str, msgspec.Meta(max_length=2048)]
CodecText = Annotated[str, msgspec.Meta(max_length=16)]


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    chunk: U64  # random per chunk, unique within the sending process


class Open(_Message, frozen=True):
    """Prefill asks for landing slots for one chunk of a room."""

    boot_id: U64  # of the decode process, from its handshake: a peer that never got it is no peer
    room: U64
    prompt: U64  # digest of the request's prompt (see request_identity); 0: not known
    page_start: U32  # first page of the chunk, counted from the first page that decode allocated for the room
    page_count: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    geometry_digest: U64  # of the heads that travel
    first_head: U32  # of decode's own KV heads; those before and behind the chunk's heads stay as they are
    heads: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    table: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]  # PrecisionTable.to_bytes()
    tiers: TierList  # those that the chunk's rows use; a COMMIT with any other is refused
    slots_wanted: Annotated[int, msgspec.Meta(ge=1, le=MOST_GRANTED_SLOTS)]
    wait_seconds: Annotated[float, msgspec.Meta(ge=0, le=3600)]


class SlotGrant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One landing slot lent to a chunk: where to write, and under which generation."""

    slot: U32
    generation: U64
    address: U64


class Granted(_Message, frozen=True):
    """Decode lends landing slots."""

    slots: Annotated[list[SlotGrant], msgspec.Meta(min_length=1, max_length=MOST_GRANTED_SLOTS)]
    slot_bytes: U64


class Refused(_Message, frozen=True):
    """Decode lends no slot: a reason to go native, or a cause that ends the room."""

    code: Text  # value of Reason or FailureCause
    message: Text


class Commit(_Message, frozen=True, omit_defaults=True):
    """The payload lies complete in the slot; decode may verify and unpack it. Fields of a codec that was not used cost
    nothing on the wire."""

    sequence: U32
    slot: U32
    generation: U64
    page_start: U32
    page_count: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    first_position: U32  # of the first row in the prompt; page_start counts from decode's cached prefix
    rows_per_tier: Annotated[list[U32], msgspec.Meta(min_length=1, max_length=MAX_TIERS)]
    tier_map: Annotated[bytes, msgspec.Meta(max_length=MAX_MESSAGE_BYTES)]
    length: U64
    checksum: U64
    codec: CodecText = ""  # lossless codec that the slot's bytes are made with; "": they are the payload
    stored: U64 = 0  # bytes in the slot, where there is a codec


class Done(_Message, frozen=True):
    """The payload has been unpacked into the room's pages."""

    sequence: U32
    slot: U32
    generation: U64  # the slot stays granted to this chunk, under this new generation
    unpack_seconds: Annotated[float, msgspec.Meta(ge=0, le=MOST_UNPACK_SECONDS)]


class Failed(_Message, frozen=True):
    """The payload was refused and nothing was written to any page."""

    sequence: U32
    code: Text  # value of FailureCause
    message: Text


class Close(_Message, frozen=True):
    """Prefill is finished with the chunk; ``failed_slots`` may still receive late bytes and must be quarantined."""

    failed_slots: Annotated[list[U32], msgspec.Meta(max_length=MOST_GRANTED_SLOTS)]


PrefillMessage = Open | Commit | Close
DecodeMessage = Granted | Refused | Done | Failed

_encoder = msgspec.msgpack.Encoder()
_prefill_decoder = msgspec.msgpack.Decoder(PrefillMessage)
_decode_decoder = msgspec.msgpack.Decoder(DecodeMessage)


def encode(message: PrefillMessage | DecodeMessage) -> bytes:
    """One frame holding ``message``. Raises ControlMessageError when a number does not fit 64 bits."""
    try:
        return seal_envelope(MAGIC, _encoder.encode(message))
    except OverflowError as error:
        raise ControlMessageError(f"{type(message).__name__} cannot be sent: {error}") from error


def decode_from_prefill(frame: bytes) -> PrefillMessage:
    """Parse a frame that a prefill rank sent. Raises ControlMessageError."""
    return _decode(frame, _prefill_decoder)


def decode_from_decode(frame: bytes) -> DecodeMessage:
    """Parse a frame that a decode rank sent. Raises ControlMessageError."""
    return _decode(frame, _decode_decoder)


def _decode(frame: bytes, decoder: msgspec.msgpack.Decoder):  # type: ignore[no-untyped-def, type-arg]
    body = open_envelope(frame, MAGIC, "control message")
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise ControlMessageError(
            f"control message of {len(frame)} bytes is malformed: {quoted(str(error))}"
        ) from error


def seal_envelope(magic: bytes, body: bytes) -> bytes:
    """Put the version envelope with ``magic`` in front of ``body``."""
    return _ENVELOPE.pack(magic, PROTOCOL_VERSION, 0) + body


def open_envelope(frame: bytes, magic: bytes, what: str) -> bytes:
    """Check magic, version and size of ``frame`` and return the bytes behind the envelope.

    Raises:
        ControlMessageError: naming the expected and the received magic, version or size.
    """
    if len(frame) > MAX_MESSAGE_BYTES:
        raise ControlMessageError(f"{what} of {len(frame)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    if len(frame) < _ENVELOPE.size:
        raise ControlMessageError(f"{what} of {len(frame)} bytes is shorter than its {_ENVELOPE.size}-byte envelope")
    got_magic, version, reserved = _ENVELOPE.unpack_from(frame)
    if got_magic != magic:
        raise ControlMessageError(f"{what}: expected magic {magic!r}, got {got_magic!r}")
    if version != PROTOCOL_VERSION:
        raise ControlMessageError(
            f"{what}: expected protocol version {PROTOCOL_VERSION}, got {version}; "
            "install the same spectrumkv-sglang version on both sides to transfer tiered payloads"
        )
    if reserved:
        raise ControlMessageError(f"{what}: expected zero in the reserved bytes, got {reserved:#06x}")
    return frame[_ENVELOPE.size :]
