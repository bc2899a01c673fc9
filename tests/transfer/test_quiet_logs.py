"""Nothing of what is transferred appears in logs or in the transfer log, at the most talkative level."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import MakePrefill, MakeRank
from decode_peer import SLOT_BYTES, DecodePeer

from spectrumkv_sglang.observability.once import flush_log_once
from spectrumkv_sglang.payload.tier_map import encode_tier_map

pytestmark = pytest.mark.timeout(150)

MARK = 0.123456789


def traces(pages: list[int], tier_map: bytes) -> list[str]:
    """How KV values, pages or a tier map would look in a log."""
    value = np.float32(MARK).tobytes()
    return [
        "0.1234",
        "1.2345",
        value.hex(),
        repr(value)[2:-1],
        ", ".join(map(str, pages[:3])),
        " ".join(map(str, pages[:3])),
        tier_map[:8].hex(),
        repr(tier_map[:8])[2:-1],
    ]


def test_neither_side_logs_what_it_transfers(
    make_rank: MakeRank,
    make_prefill: MakePrefill,
    peer: DecodePeer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Transfers that succeed, are refused, arrive broken, and are answered by an error on decode."""
    flush_log_once()  # causes that other tests logged would be said only once a minute
    caplog.set_level(logging.DEBUG)
    rank = make_rank()
    source = make_prefill(profile="spectrum", budget=0.4, require_probe=False)
    for x in (*source.buffers.k, *source.buffers.v):
        x.fill_(MARK)
    pages = source.some_pages(60)
    tier_map = encode_tier_map(source.plan(5, pages, 65536).plan.tiers, 3)
    room_pages = rank.open_room(5, len(pages))
    assert source.send(rank, 5, pages).reason == "tiered"
    source.send(rank, 404, pages)
    source.send(rank, 5, pages, page_start=2**20)

    def late_byte(number: int) -> None:
        slot = (source.engine.writes[number][0] - source.engine.writes[0][0]) // SLOT_BYTES
        rank.ask("flip_byte", slot=slot, offset=5000)

    source.engine.on_written = late_byte
    source.send(rank, 5, pages)
    source.engine.on_written = lambda number: None
    assert torch.all(rank.read_pool().k[0][room_pages] - MARK < 0.1)
    said = caplog.text + "".join(path.read_text() for path in tmp_path.glob("*.jsonl")) + peer.log_text()
    assert "room 404" in said  # the logs were looked at
    assert "refused a payload" in said
    for trace in traces(pages, tier_map) + traces(room_pages, tier_map):
        assert trace not in said, trace
