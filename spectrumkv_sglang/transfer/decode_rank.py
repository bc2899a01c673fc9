"""The decode side of one rank: landing slots, rooms and the handshake that tells prefill about them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.observability.metrics import TransferMetrics
from spectrumkv_sglang.transfer.control_keys import ControlKeys
from spectrumkv_sglang.transfer.handshake import Handshake, encode_handshake
from spectrumkv_sglang.transfer.landing_server import LandingServer
from spectrumkv_sglang.transfer.pool_view import PoolView
from spectrumkv_sglang.transfer.request_identity import UNKNOWN, encode_prompt
from spectrumkv_sglang.transfer.rooms import RoomRegistry
from spectrumkv_sglang.transfer.sending_policy import configured_policies
from spectrumkv_sglang.transfer.shared_heads import RankHeads
from spectrumkv_sglang.transfer.slot_memory import SlotMemory
from spectrumkv_sglang.transfer.slot_pool import SlotPool
from spectrumkv_sglang.transfer.warm_up import warm_up

_EVERY_ADDRESS = ("0.0.0.0", "::", "*")


class DecodeRank:
    """Owns everything that receives tiered payloads in one decode process.

    Args:
        engine: Mooncake's TransferEngine.
        heads: KV heads of the model that the pool holds; None: not known, then only ranks of one TP size are served.
        host: address of this rank that prefill ranks can reach.
        rank: number of this rank on its host; where its search for a free control port begins.

    Raises:
        SpectrumKVError: the landing region could not be registered, ``control_host`` and ``control_port``
            cannot be bound, or ``control_secret_file`` cannot be used.
    """

    def __init__(
        self,
        *,
        view: PoolView,
        config: SpectrumKVConfig,
        engine: Any,
        host: str,
        metrics: TransferMetrics,
        rank: int = 0,
        heads: RankHeads | None = None,
    ) -> None:
        keys = ControlKeys.of(config)
        boot_id = random.getrandbits(63)
        warm_up(view, configured_policies(config, view))
        self.rooms = RoomRegistry()
        self._memory = SlotMemory(engine, config.landing_slots, config.slot_bytes, view.device)
        self._pool = SlotPool(config.landing_slots, config.quarantine_s)
        bind_host = config.control_host or host
        try:
            self.server = LandingServer(
                view=view,
                memory=self._memory,
                pool=self._pool,
                rooms=self.rooms,
                metrics=metrics,
                allowed_tiers=config.allowed_tiers,
                boot_id=boot_id,
                bind_host=bind_host,
                advertised_host=host if bind_host in _EVERY_ADDRESS else bind_host,
                lease_seconds=config.lease_s,
                slot_wait_seconds=config.slot_wait_s,
                ports=config.control_ports,
                rank=rank,
                keys=keys,
            )
        except SpectrumKVError:
            self._memory.close()
            raise
        geometry = view.geometry
        self.handshake = Handshake(
            control_endpoint=self.server.endpoint,
            boot_id=boot_id,
            kv_dtype=geometry.dtype,
            layers=geometry.layers,
            kv_heads=geometry.kv_heads,
            first_head=heads.first if heads is not None else 0,
            total_heads=heads.total if heads is not None else 0,
            head_dim=geometry.head_dim,
            v_head_dim=geometry.v_head_dim,
            page_size=geometry.page_size,
            slot_bytes=config.slot_bytes,
            landing_slots=config.landing_slots,
            allowed_tiers=[int(tier) for tier in config.allowed_tiers],
            codecs=self.server.codecs,
            knows_rotation=view.rotation is not None,
            control_key=keys.fingerprint if keys is not None else "",
        )
        self.handshake_frame = encode_handshake(self.handshake)

    def open_room(self, room: int, pages: Any, prompt: int = UNKNOWN) -> None:
        """Payloads for ``room``, of the request with this prompt digest, may now be unpacked into ``pages`` (page ids
        of decode's pool)."""
        self.rooms.register(room, np.asarray(pages), prompt)

    def prompt_frame(self, room: int) -> bytes:
        """What SGLang's message about the pages of ``room`` is to carry."""
        return encode_prompt(self.rooms.prompt(room))

    def close_room(self, room: int) -> None:
        """No payload for ``room`` is unpacked once this returns."""
        self.rooms.retire(room)

    def close(self) -> None:
        self.server.close()
        self._memory.close()
