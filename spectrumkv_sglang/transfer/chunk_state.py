"""What a chunk is while it is being sent: the task, where each of its payloads stands, and what it took."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from spectrumkv_sglang.payload.exchange import Pending
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.payload.subchunks import SubChunk
from spectrumkv_sglang.transfer.control_channel import ControlChannel
from spectrumkv_sglang.transfer.handshake import Handshake
from spectrumkv_sglang.transfer.lossless_stage import Stored
from spectrumkv_sglang.transfer.messages import SlotGrant
from spectrumkv_sglang.transfer.mooncake_writes import PendingWrite
from spectrumkv_sglang.transfer.packing import Packed, PackJob
from spectrumkv_sglang.transfer.pool_view import PoolView
from spectrumkv_sglang.transfer.request_identity import UNKNOWN
from spectrumkv_sglang.transfer.slot_pool import Slot


@dataclass(frozen=True)
class ChunkTask:
    """One chunk to send. ``view`` has the heads that decode takes of it, which are its own heads from ``decode_head``
    on. ``pages`` are prefill's own page ids; the destination is a page range of the room.
    ``first_position`` is that of the chunk's first row in the prompt: the room's pages follow those that decode has
    cached. ``prompt`` is the digest of its request's."""

    room: int
    session: str
    peer: Handshake
    view: PoolView
    decode_head: int
    pages: np.ndarray
    page_start: int
    first_position: int
    tiers: np.ndarray
    table: PrecisionTable
    subchunks: list[SubChunk]
    room_is_live: Callable[[], bool]
    prompt: int = UNKNOWN


@dataclass
class ChunkStats:
    """What sending one chunk took; seconds are sums over the sub-chunks, which overlap.

    Attributes:
        wire_bytes: payloads and control messages.
        saved_bytes: that a lossless codec took off the payloads.
        writes: Mooncake writes.
        pack_seconds: the device at work on packing.
        write_seconds: writes under way, until this thread noticed their end.
        wait_seconds: this thread waiting for slots and for decode.
        unpack_seconds: decode at work on unpacking, as it says.
    """

    wire_bytes: int = 0
    saved_bytes: int = 0
    writes: int = 0
    pack_seconds: float = 0.0
    write_seconds: float = 0.0
    wait_seconds: float = 0.0
    unpack_seconds: float = 0.0


@dataclass(frozen=True)
class Packing:
    """A sub-chunk that is being packed into ``staging``."""

    job: PackJob
    staging: Slot
    remote: SlotGrant
    payload: Pending[Packed]


@dataclass(frozen=True)
class Writing:
    """A packed sub-chunk whose write has been submitted."""

    job: PackJob
    staging: Slot
    remote: SlotGrant
    checksum: int
    stored: Stored
    write: PendingWrite


@dataclass
class InFlight:
    """Everything of one chunk that must be released whatever happens. Queues have the oldest first.

    Attributes:
        chunk: its id in the control protocol.
        channel: control channel to decode.
        remote: granted landing slots that no payload uses.
        addresses: address of every granted landing slot.
        packing: payloads that are being packed.
        writing: payloads that are being written.
        failed_remote: landing slots of failed writes.
        unanswered: slots of commits that decode has not answered, by sequence.
    """

    chunk: int
    channel: ControlChannel
    remote: deque[SlotGrant] = field(default_factory=deque)
    addresses: dict[int, int] = field(default_factory=dict)
    packing: deque[Packing] = field(default_factory=deque)
    writing: deque[Writing] = field(default_factory=deque)
    failed_remote: list[int] = field(default_factory=list)
    unanswered: dict[int, int] = field(default_factory=dict)
