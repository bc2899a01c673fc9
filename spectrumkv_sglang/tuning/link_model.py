"""How long KV takes over a link, native or compressed, and up to which bandwidth compression pays.

Sequential transfer, as in KVServe (arXiv 2605.13734): native T = V / B; compressed T = V / S + V / (B cr) with
1 / S = 1 / S_pack + 1 / S_unpack, which is sooner exactly when B < B* = (1 - 1 / cr) S. b = 1 / cr is wire bytes over
native bytes.

Pipelined transfer (KVShuttle's form): a chunk travels as n payloads that are packed, written and unpacked side by side.
With p, w, u the seconds of one payload in the three stages a chunk takes p + w + u + (n - 1) max(p, w, u).

Sizes are bytes, bandwidths bytes per second, times seconds. Bandwidth means goodput: what a plain write gets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spectrumkv_sglang.errors import SpectrumKVError

DEFAULT_PAYLOAD_BYTES = 16 * 1024 * 1024
"""SpectrumKV's default slot: the largest payload."""


class LinkModelError(SpectrumKVError):
    """Something that no link, codec or transfer can be; names the value and what was expected."""


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise LinkModelError(f"{name} is {value}, expected a finite number above 0")


def _check_not_negative(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise LinkModelError(f"{name} is {value}, expected a finite number of at least 0")


@dataclass(frozen=True)
class Codec:
    """How much smaller KV becomes, and how fast.

    Attributes:
        b: wire bytes over native bytes, metadata included; 1 / b is the compression ratio cr.
        pack_bytes_per_second: native bytes packed a second.
        unpack_bytes_per_second: native bytes verified and unpacked a second.
        pack_host_seconds, unpack_host_seconds: what the host needs in addition for every payload: planning and
            launching its kernels.

    Raises:
        LinkModelError: a b, speed or time that cannot be.
    """

    b: float
    pack_bytes_per_second: float
    unpack_bytes_per_second: float
    pack_host_seconds: float = 0.0
    unpack_host_seconds: float = 0.0

    def __post_init__(self) -> None:
        _check_positive("b", self.b)
        _check_positive("pack_bytes_per_second", self.pack_bytes_per_second)
        _check_positive("unpack_bytes_per_second", self.unpack_bytes_per_second)
        _check_not_negative("pack_host_seconds", self.pack_host_seconds)
        _check_not_negative("unpack_host_seconds", self.unpack_host_seconds)

    @property
    def speed(self) -> float:
        """S: native bytes a second through pack and unpack one after the other, without the host's time."""
        return 1.0 / (1.0 / self.pack_bytes_per_second + 1.0 / self.unpack_bytes_per_second)

    def pack_seconds(self, native_bytes: float) -> float:
        """Time to pack one payload that holds ``native_bytes`` of the pool."""
        return self.pack_host_seconds + native_bytes / self.pack_bytes_per_second

    def unpack_seconds(self, native_bytes: float) -> float:
        """Time to unpack one payload that holds ``native_bytes`` of the pool."""
        return self.unpack_host_seconds + native_bytes / self.unpack_bytes_per_second


@dataclass(frozen=True)
class FixedCost:
    """What no overlap hides: seconds for each chunk (asking for slots, last answer) and for each payload."""

    chunk_seconds: float = 0.0
    payload_seconds: float = 0.0

    def __post_init__(self) -> None:
        _check_not_negative("chunk_seconds", self.chunk_seconds)
        _check_not_negative("payload_seconds", self.payload_seconds)

    def of(self, chunks: int, payloads: int) -> float:
        """Seconds for so many chunks with so many payloads altogether."""
        return chunks * self.chunk_seconds + payloads * self.payload_seconds


NO_FIXED_COST = FixedCost()


@dataclass(frozen=True)
class Transfer:
    """KV to be moved.

    Attributes:
        native_bytes: its size V in the pool.
        chunks: chunks of equal size that it comes in; one starts when the one before has ended.
        payloads: payloads of all chunks together, at least one for each.

    Raises:
        LinkModelError: no bytes, no chunk, or fewer payloads than chunks.
    """

    native_bytes: float
    chunks: int = 1
    payloads: int = 1

    def __post_init__(self) -> None:
        _check_positive("native_bytes", self.native_bytes)
        if not 1 <= self.chunks <= self.payloads:
            raise LinkModelError(
                f"{self.chunks} chunks in {self.payloads} payloads: expected a chunk and a payload for each at least"
            )

    @classmethod
    def in_slots(
        cls, native_bytes: float, b: float, *, chunks: int = 1, payload_bytes: float = DEFAULT_PAYLOAD_BYTES
    ) -> Transfer:
        """The transfer cut into payloads of at most ``payload_bytes`` on the wire."""
        _check_positive("native_bytes", native_bytes)
        _check_positive("b", b)
        _check_positive("payload_bytes", payload_bytes)
        if chunks < 1:
            raise LinkModelError(f"{chunks} chunks: expected at least one")
        return cls(native_bytes, chunks, chunks * math.ceil(native_bytes * b / chunks / payload_bytes))


def bytes_per_second(gigabits_per_second: float) -> float:
    """Bandwidth in bytes a second of a rate in Gb/s (10**9 bits)."""
    _check_positive("gigabits_per_second", gigabits_per_second)
    return gigabits_per_second * 1e9 / 8


def native_seconds(
    native_bytes: float, bandwidth: float, *, blocks: int = 0, block_seconds: float = 0.0, fixed_seconds: float = 0.0
) -> float:
    """Time of an uncompressed transfer: V / B, what each of its blocks costs, and what is left even of nothing.

    Args:
        blocks: pieces that the engine is handed: layers x 2 x runs of pages.
        block_seconds: cost of one of them.
        fixed_seconds: everything that depends on neither.
    """
    _check_positive("native_bytes", native_bytes)
    _check_positive("bandwidth", bandwidth)
    _check_not_negative("blocks", blocks)
    _check_not_negative("block_seconds", block_seconds)
    _check_not_negative("fixed_seconds", fixed_seconds)
    return native_bytes / bandwidth + blocks * block_seconds + fixed_seconds


def sequential_seconds(transfer: Transfer, bandwidth: float, codec: Codec, fixed: FixedCost = NO_FIXED_COST) -> float:
    """Time of a compressed transfer in which no stage overlaps another: V / S + V b / B, host and fixed costs."""
    _check_positive("bandwidth", bandwidth)
    pack, write, unpack = _stages(transfer, bandwidth, codec)
    return transfer.payloads * (pack + write + unpack) + fixed.of(transfer.chunks, transfer.payloads)


def pipelined_seconds(transfer: Transfer, bandwidth: float, codec: Codec, fixed: FixedCost = NO_FIXED_COST) -> float:
    """Time of a compressed transfer in which the payloads of a chunk are packed, written and unpacked side by side."""
    _check_positive("bandwidth", bandwidth)
    stages = _stages(transfer, bandwidth, codec)
    later = transfer.payloads - transfer.chunks  # payloads that follow another one of their chunk
    return transfer.chunks * sum(stages) + later * max(stages) + fixed.of(transfer.chunks, transfer.payloads)


def break_even(codec: Codec) -> float:
    """B* of a sequential transfer, bytes per second: compression pays on links slower than this; 0 when b >= 1."""
    return max(0.0, 1.0 - codec.b) * codec.speed


def pipelined_break_even(transfer: Transfer, codec: Codec, fixed: FixedCost = NO_FIXED_COST) -> float:
    """B* of a pipelined transfer against V / B, bytes per second; 0 when b >= 1.

    The time is the larger of two straight lines in 1 / B, one for a chunk that the link holds up and one for a chunk
    that packing or unpacking holds up; compression pays where it is below V / B for both.
    """
    if codec.b >= 1.0:
        return 0.0
    share = transfer.native_bytes / transfer.payloads
    pack, unpack = codec.pack_seconds(share), codec.unpack_seconds(share)
    chunks, later = transfer.chunks, transfer.payloads - transfer.chunks
    always = chunks * (pack + unpack) + fixed.of(chunks, transfer.payloads)
    link_bound = transfer.native_bytes * (1.0 - codec.b) / always
    codec_bound = share * (transfer.payloads - codec.b * chunks) / (always + later * max(pack, unpack))
    return min(link_bound, codec_bound)


def _stages(transfer: Transfer, bandwidth: float, codec: Codec) -> tuple[float, float, float]:
    """Seconds of one payload: pack, write, unpack."""
    share = transfer.native_bytes / transfer.payloads
    return codec.pack_seconds(share), share * codec.b / bandwidth, codec.unpack_seconds(share)
