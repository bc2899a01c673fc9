"""Fixed 256-byte prologue of a payload: what it is, whose it is, and how long.

Layout, little-endian: magic "SKVP", format version u16, tier count u16, sequence u32, first position u32, room u64,
generation u64, total length u64, geometry digest u64, table digest u64, rows of tiers 0 to 3 as u32 each; the rest is
reserved. Reserved bytes are zero, and a reader refuses anything else.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields

from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.precision_table import MAX_TIERS

PROLOGUE_BYTES = 256
FORMAT_VERSION = 2
_MAGIC = b"SKVP"
_FIELDS = struct.Struct("<4sHHIIQQQQQ4I")
_U32 = 2**32 - 1
_U64 = 2**64 - 1


@dataclass(frozen=True)
class Prologue:
    """Identity and size of one payload.

    Attributes:
        room: SGLang's bootstrap_room, u64.
        generation: generation of the landing slot that the payload was written for, u64.
        sequence: number of the sub-chunk within the chunk, u32.
        first_position: of its first row in the prompt, u32.
        rows_per_tier: rows (tokens) of each tier, 1 to 4 entries of u32; its length is the tier count.
        total_bytes: length of the payload including this prologue.
        geometry_digest: `KVGeometry.digest` of the sender.
        table_digest: `PrecisionTable.digest` of the table that the payload was packed with.
    """

    room: int
    generation: int
    sequence: int
    first_position: int
    rows_per_tier: tuple[int, ...]
    total_bytes: int
    geometry_digest: int
    table_digest: int

    def check(self, expected: Prologue) -> None:
        """Raise PayloadError naming the first field that differs from ``expected``."""
        for field in fields(self):
            want, got = getattr(expected, field.name), getattr(self, field.name)
            if want != got:
                raise PayloadError(f"payload prologue: {field.name}: expected {want}, got {got}")


def encode_prologue(prologue: Prologue) -> bytes:
    """Serialise to exactly 256 bytes.

    Raises:
        PayloadError: a field is outside its unsigned range or there are no, or more than 4, tiers.
    """
    rows = prologue.rows_per_tier
    if not 1 <= len(rows) <= MAX_TIERS:
        raise PayloadError(f"payload prologue: expected 1 to {MAX_TIERS} tiers, got {len(rows)}")
    for name in ("sequence", "first_position"):
        _require_range(name, getattr(prologue, name), _U32)
    for name in ("room", "generation", "total_bytes", "geometry_digest", "table_digest"):
        _require_range(name, getattr(prologue, name), _U64)
    for tier, count in enumerate(rows):
        _require_range(f"rows of tier {tier}", count, _U32)
    packed = _FIELDS.pack(
        _MAGIC,
        FORMAT_VERSION,
        len(rows),
        prologue.sequence,
        prologue.first_position,
        prologue.room,
        prologue.generation,
        prologue.total_bytes,
        prologue.geometry_digest,
        prologue.table_digest,
        *rows,
        *([0] * (MAX_TIERS - len(rows))),
    )
    return packed.ljust(PROLOGUE_BYTES, b"\0")


def decode_prologue(data: bytes | bytearray | memoryview) -> Prologue:
    """Read the first 256 bytes of a payload.

    Raises:
        PayloadError: too short, not a SpectrumKV payload, another format version, or set reserved bytes.
    """
    raw = bytes(data[:PROLOGUE_BYTES])
    if len(raw) < PROLOGUE_BYTES:
        raise PayloadError(f"payload prologue: expected {PROLOGUE_BYTES} bytes, got {len(raw)}")
    magic, version, tier_count, sequence, position, *identity = _FIELDS.unpack_from(raw)
    room, generation, total, geometry, table, *rows = identity
    if magic != _MAGIC:
        raise PayloadError(f"payload prologue: expected magic {_MAGIC!r}, got {magic!r}")
    if version != FORMAT_VERSION:
        raise PayloadError(
            f"payload prologue: expected format version {FORMAT_VERSION}, got {version}; "
            "install the same spectrumkv-sglang on prefill and decode"
        )
    if not 1 <= tier_count <= MAX_TIERS:
        raise PayloadError(f"payload prologue: expected 1 to {MAX_TIERS} tiers, got {tier_count}")
    if any(rows[tier_count:]):
        raise PayloadError(f"payload prologue: expected no rows beyond tier {tier_count - 1}, got {rows}")
    if any(raw[_FIELDS.size :]):
        raise PayloadError("payload prologue: expected zero in the reserved bytes, got others")
    return Prologue(room, generation, sequence, position, tuple(rows[:tier_count]), total, geometry, table)


def _require_range(name: str, value: int, largest: int) -> None:
    if not 0 <= value <= largest:
        raise PayloadError(f"payload prologue: {name} must be between 0 and {largest}, got {value}")
