"""A prefill that speaks the control protocol message by message, and so can break it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import zmq
from decode_peer import ANSWER_SECONDS, Pages, PeerRank
from prefill_side import PrefillSide

from spectrumkv_sglang.kernels.checksum import payload_checksum
from spectrumkv_sglang.payload.codec import pack_payload, write_prologue
from spectrumkv_sglang.payload.layout import plan_layout
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.payload.prologue import Prologue
from spectrumkv_sglang.payload.tier_map import encode_tier_map
from spectrumkv_sglang.profiles.profile import load_profile
from spectrumkv_sglang.transfer.control_keys import ControlKeys
from spectrumkv_sglang.transfer.messages import (
    Commit,
    DecodeMessage,
    Granted,
    Open,
    PrefillMessage,
    SlotGrant,
    decode_from_decode,
    encode,
)
from spectrumkv_sglang.transfer.slot_memory import SlotMemory
from spectrumkv_sglang.transfer.unpacking import pool_slots_of_pages


class RawPrefill:
    """One socket, one staging slot."""

    def __init__(self, source: PrefillSide, to: PeerRank, keys: ControlKeys | None = None) -> None:
        self.source, self.to = source, to
        self.table: PrecisionTable = load_profile("native-packed").table(source.geometry)
        self._memory = SlotMemory(source.engine, 1, to.handshake.slot_bytes, torch.device("cpu"))
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.decode.public)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.prefill.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.prefill.private)
        self._socket.connect(to.handshake.control_endpoint)

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._memory.close()

    def vanish(self) -> None:
        """Be gone without a word."""
        self._socket.close(linger=0)

    def send_frames(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def answered(self, seconds: float) -> bool:
        return bool(self._socket.poll(int(seconds * 1000)))

    def ask(self, message: PrefillMessage) -> DecodeMessage:
        self.send_frames(encode(message))
        return self.receive()

    def receive(self) -> DecodeMessage:
        if not self._socket.poll(int(ANSWER_SECONDS * 1000)):
            raise TimeoutError("decode did not answer")
        return decode_from_decode(self._socket.recv())

    def opening(self, room: int, pages: int, chunk: int = 1, **changes: Any) -> Open:
        fields: dict[str, Any] = {
            "chunk": chunk,
            "boot_id": self.to.handshake.boot_id,
            "room": room,
            "prompt": 0,
            "page_start": 0,
            "page_count": pages,
            "geometry_digest": self.source.geometry.digest(),
            "first_head": 0,
            "heads": self.source.geometry.kv_heads,
            "table": self.table.to_bytes(),
            "tiers": [0],
            "slots_wanted": 1,
            "wait_seconds": 1.0,
        }
        return Open(**{**fields, **changes})

    def grants(self, room: int, pages: int, chunk: int = 1, **changes: Any) -> list[SlotGrant]:
        answer = self.ask(self.opening(room, pages, chunk, **changes))
        assert isinstance(answer, Granted), answer
        return answer.slots

    def land(
        self, grant: SlotGrant, room: int, pages: Pages, chunk: int = 1, prologue: dict[str, Any] | None = None
    ) -> Commit:
        """Write the payload of ``pages`` into a granted slot; returns the COMMIT that fits it but for ``prologue``."""
        geometry = self.source.geometry
        rows = len(pages) * geometry.page_size
        tiers = np.zeros(rows, dtype=np.uint8)
        layout = plan_layout(geometry, self.table, [rows] + [0] * (self.table.tiers - 1))
        payload = self._memory.view(0, layout.total_bytes)
        slots = pool_slots_of_pages(np.array(pages, dtype=np.int64), geometry.page_size)
        pack_payload(self.source.buffers, slots, tiers, layout, payload)
        fields: dict[str, Any] = {
            "room": room,
            "generation": grant.generation,
            "sequence": 0,
            "first_position": 0,
            "rows_per_tier": layout.rows_per_tier,
            "total_bytes": layout.total_bytes,
            "geometry_digest": geometry.digest(),
            "table_digest": self.table.digest(),
        }
        write_prologue(payload, Prologue(**{**fields, **(prologue or {})}))
        code = self.source.engine.transfer_sync_write(
            self.to.peer.session, self._memory.address(0), grant.address, layout.total_bytes
        )
        assert code == 0
        return Commit(
            chunk=chunk,
            sequence=0,
            slot=grant.slot,
            generation=grant.generation,
            page_start=0,
            page_count=len(pages),
            first_position=0,
            rows_per_tier=list(layout.rows_per_tier),
            tier_map=encode_tier_map(tiers, self.table.tiers),
            length=layout.total_bytes,
            checksum=payload_checksum(payload),
        )
