"""The frames that decode adds to SGLang's messages, and what prefill reads from them.

Decode registers its pool with a multipart message whose optional trailing frames SGLang reads by index, treating
an empty frame as absent. The handshake goes behind a gap of empty frames, so that a plain peer of any supported
version sees only fields that it takes as unset. No handshake, or one of another version, means native transfer.
Its message about a room's pages carries the digest of the room's prompt in the same way (`request_identity`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec

from spectrumkv_sglang.profiles.tier import Tier
from spectrumkv_sglang.transfer.errors import ControlMessageError, quoted
from spectrumkv_sglang.transfer.messages import CodecText, TierList, open_envelope, seal_envelope
from spectrumkv_sglang.transfer.shared_heads import RankHeads

MAGIC = b"SKVH"
REGISTRATION_MARK = b"None"
# SGLang 0.5.23 reads 20 frames; the gap leaves room for fields that later versions append.
HANDSHAKE_FRAME_INDEX = 48

# One address and its port, and nothing that ends a line of a log. ("$" would let a line's end follow.)
_ENDPOINT = r"^tcp://[0-9A-Za-z.:%_\-\[\]]+\Z"
Count = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]


class Handshake(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What prefill must know of one decode rank before it sends it a tiered payload."""

    control_endpoint: Annotated[str, msgspec.Meta(pattern=_ENDPOINT, max_length=512)]
    boot_id: Annotated[int, msgspec.Meta(ge=0)]  # random per process start, repeated by every OPEN
    kv_dtype: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9_]+\Z", max_length=64)]
    layers: Count
    kv_heads: Count
    first_head: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]  # of the model's heads, which its kv_heads start at
    total_heads: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]  # of the model; 0: first_head is not known
    head_dim: Count
    v_head_dim: Count
    page_size: Count
    slot_bytes: Annotated[int, msgspec.Meta(ge=1)]
    landing_slots: Count
    allowed_tiers: TierList  # those that decode accepts; HIGH is among them
    knows_rotation: bool  # whether decode can rotate keys again that were rotated back by their position
    control_key: Annotated[str, msgspec.Meta(max_length=64)]  # ControlKeys.fingerprint; "": no secret is asked for
    codecs: Annotated[list[CodecText], msgspec.Meta(max_length=8)]  # lossless ones that decode can bring back

    @property
    def heads(self) -> RankHeads | None:
        """KV heads of the model that this rank holds, where it knows them."""
        return RankHeads(self.first_head, self.kv_heads, self.total_heads) if self.total_heads else None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Handshake)


def encode_handshake(handshake: Handshake) -> bytes:
    """The frame that carries ``handshake``."""
    return seal_envelope(MAGIC, _encoder.encode(handshake))


def decode_handshake(frame: bytes) -> Handshake:
    """Parse a handshake frame. Raises ControlMessageError (garbage, truncated, other version)."""
    body = open_envelope(frame, MAGIC, "handshake")
    try:
        handshake = _decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise ControlMessageError(f"handshake of {len(frame)} bytes is malformed: {quoted(str(error))}") from error
    if handshake.total_heads:
        try:
            RankHeads(handshake.first_head, handshake.kv_heads, handshake.total_heads)
        except ValueError as error:
            raise ControlMessageError(f"handshake: {error}") from error
    if Tier.HIGH not in handshake.allowed_tiers:
        raise ControlMessageError(f"handshake: expected high among the allowed tiers, got {handshake.allowed_tiers}")
    return handshake


def append_handshake(frames: list[bytes], handshake_frame: bytes) -> list[bytes]:
    """Registration message ``frames`` with the handshake at its fixed index.

    Raises:
        ControlMessageError: the running SGLang's registration message is longer than the gap.
    """
    if len(frames) > HANDSHAKE_FRAME_INDEX:
        raise ControlMessageError(
            f"SGLang's registration message has {len(frames)} frames, expected at most {HANDSHAKE_FRAME_INDEX}"
        )
    return [*frames, *[b""] * (HANDSHAKE_FRAME_INDEX - len(frames)), handshake_frame]


def split_handshake(frames: list[bytes], magic: bytes = MAGIC) -> tuple[list[bytes], bytes | None]:
    """Undo :func:`append_handshake`: SGLang's own frames and ours, or None where there is none with ``magic``."""
    if len(frames) != HANDSHAKE_FRAME_INDEX + 1 or not frames[-1].startswith(magic):
        return frames, None
    own = frames[:HANDSHAKE_FRAME_INDEX]
    while own and own[-1] == b"":
        own = own[:-1]
    return own, frames[-1]


class RegistrationSocket:
    """Stands before SGLang's PUSH socket and adds the handshake to registrations and ``room_frame(room)`` to messages
    about a room's pages."""

    def __init__(
        self, socket: object, handshake_frame: bytes, room_frame: Callable[[int], bytes] | None = None
    ) -> None:
        self._socket = socket
        self._handshake_frame = handshake_frame
        self._room_frame = room_frame

    def send_multipart(self, frames: list[bytes], *args: object, **kwargs: object) -> object:
        if frames and frames[0] == REGISTRATION_MARK:
            frames = append_handshake(list(frames), self._handshake_frame)
        elif frames and frames[0].isdigit() and self._room_frame is not None:
            frames = append_handshake(list(frames), self._room_frame(int(frames[0])))
        return self._socket.send_multipart(frames, *args, **kwargs)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> object:
        return getattr(self._socket, name)
