"""Keys that travel without their rotary embedding between two processes that know the model's angles, or do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from conftest import MakePrefill, MakeRank
from decode_peer import GEOMETRY, Pages, PeerRank
from key_angles import key_angles
from prefill_side import PrefillSide, idle

from spectrumkv_sglang.kernels.transforms.derope import rotate
from spectrumkv_sglang.payload.key_rotation import KeyRotation
from spectrumkv_sglang.transfer.unpacking import pool_slots_of_pages

pytestmark = pytest.mark.timeout(150)

PAGED = replace(GEOMETRY, page_size=16)
SMALL_SLOT = 64 * 1024
MakeProfile = Callable[[str], str]


@pytest.fixture
def profile(tmp_path: Path) -> MakeProfile:
    """A profile of one tier, its keys in three bits of a channel, after the named transform of them."""

    def make(keys: str) -> str:
        path = tmp_path / f"{keys}.yaml"
        path.write_text(
            f"name: {keys}\ntransform: {{keys: {keys}}}\ntiers:\n  high: {{keys: int3_channel, values: int8}}\n"
        )
        return str(path)

    return make


def hold_constant_keys(source: PrefillSide, pages: Pages, first_position: int) -> None:
    """Fill ``pages``, a prompt from ``first_position`` on, with one key for each layer and head, rotated by position.

    A channel of such keys is one number before rotation, which any precision holds, and a wave after it.
    """
    rows = pool_slots_of_pages(np.array(pages), source.geometry.page_size)
    rotated = key_angles(source.geometry).at(first_position, len(rows))
    for layer, keys in enumerate(source.buffers.k):
        key = torch.randn(1, *keys.shape[1:], generator=torch.Generator().manual_seed(layer))
        keys[rows] = rotate(key.expand(len(rows), -1, -1), *rotated.of(layer, 0, len(rows)))


def largest_error_of_keys(source: PrefillSide, pages: Pages, rank: PeerRank, room_pages: Pages) -> float:
    size, pool = source.geometry.page_size, rank.read_pool()
    rows, room_rows = (pool_slots_of_pages(np.array(some), size) for some in (pages, room_pages))
    pairs = zip(source.buffers.k, pool.k, strict=True)
    return max(float((sent[rows] - got[room_rows]).abs().max()) for sent, got in pairs)


@pytest.mark.parametrize("prefix_tokens", [0, 48], ids=["whole prompt", "behind a prefix that decode has cached"])
def test_keys_are_quantised_at_their_own_positions(
    make_rank: MakeRank,
    make_prefill: MakePrefill,
    profile: MakeProfile,
    monkeypatch: pytest.MonkeyPatch,
    prefix_tokens: int,
) -> None:
    rank, source = make_rank(PAGED), make_prefill(PAGED, profile=profile("derope"), slot_bytes=SMALL_SLOT)
    pages = source.some_pages(24)
    hold_constant_keys(source, pages, prefix_tokens)
    room_pages = rank.open_room(1, len(pages))
    asked: list[tuple[int, int]] = []
    original = KeyRotation.at

    def at(rotation: KeyRotation, first_position: int, rows: int) -> object:
        asked.append((first_position, rows))
        return original(rotation, first_position, rows)

    monkeypatch.setattr(KeyRotation, "at", at)
    for start, end in ((0, 16), (16, 24)):
        outcome = source.send(
            rank,
            1,
            pages[start:end],
            page_start=start,
            room_pages=len(pages),
            prefix_tokens=prefix_tokens,
            last_chunk=end == len(pages),
        )
        assert (outcome.code, outcome.reason, outcome.failures) == (0, "tiered", {})
    # Every sub-chunk of both chunks, one behind the other, from the first position behind the prefix on.
    assert len(asked) > 2
    assert np.cumsum([prefix_tokens, *(rows for _, rows in asked)]).tolist() == [
        *(first for first, _ in asked),
        prefix_tokens + 384,
    ]
    assert largest_error_of_keys(source, pages, rank, room_pages) < 0.01
    assert rank.is_untouched(but=room_pages)


def test_the_same_keys_lose_much_more_in_rotated_form(
    make_rank: MakeRank, make_prefill: MakePrefill, profile: MakeProfile
) -> None:
    rank, source = make_rank(PAGED), make_prefill(PAGED, profile=profile("identity"))
    pages = source.some_pages(24)
    hold_constant_keys(source, pages, 0)
    room_pages = rank.open_room(1, len(pages))
    assert source.send(rank, 1, pages).reason == "tiered"
    assert largest_error_of_keys(source, pages, rank, room_pages) > 0.1


@pytest.mark.parametrize("said", [True, False], ids=["said by the handshake", "refused by decode"])
def test_a_decode_rank_that_does_not_know_the_angles_gets_native_kv(
    make_rank: MakeRank, make_prefill: MakePrefill, profile: MakeProfile, said: bool
) -> None:
    rank, source = make_rank(knows_rotation=False), make_prefill(profile=profile("derope"))
    assert rank.handshake.knows_rotation is False
    pages = source.some_pages(60)
    rank.open_room(1, len(pages))
    peer = rank.handshake if said else msgspec.structs.replace(rank.handshake, knows_rotation=True)
    outcome = source.send(rank, 1, pages, peer=peer)
    assert (outcome.code, outcome.went_native, outcome.reason) == (0, True, "rotation_unknown")
    assert source.engine.writes == []
    assert rank.is_untouched()
    assert idle(rank)


def test_that_rank_takes_other_profiles_tiered(
    make_rank: MakeRank, make_prefill: MakePrefill, profile: MakeProfile
) -> None:
    rank, source = make_rank(knows_rotation=False), make_prefill(profile=profile("identity"))
    pages = source.some_pages(60)
    rank.open_room(1, len(pages))
    assert source.send(rank, 1, pages).reason == "tiered"
