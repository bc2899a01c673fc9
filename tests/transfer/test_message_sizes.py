"""The planner's allowance for control messages really bounds them: the budget counts every byte."""

from __future__ import annotations

import pytest

from spectrumkv_sglang.payload.precision_table import MAX_TIERS
from spectrumkv_sglang.transfer.chunk_planner import CHUNK_MESSAGE_BYTES, SUBCHUNK_MESSAGE_BYTES
from spectrumkv_sglang.transfer.messages import (
    MOST_GRANTED_SLOTS,
    Close,
    Commit,
    Done,
    Granted,
    Open,
    SlotGrant,
    decode_from_decode,
    decode_from_prefill,
    encode,
)

ALL_TIERS = list(range(MAX_TIERS))
CURVE = 33  # that an encrypted message is longer
U31, U32, U64 = 2**31 - 1, 2**32 - 1, 2**64 - 1


@pytest.mark.parametrize("tier_map_bytes", [0, 1, 225, 255, 256, 65_535, 65_536])
def test_the_messages_of_a_subchunk(tier_map_bytes: int) -> None:
    commit = Commit(U64, U32, U32, U64, U32, U31, U32, [U32] * MAX_TIERS, b"\xff" * tier_map_bytes, U64, U64)
    done = Done(U64, U32, U32, U64, 0.1)
    assert decode_from_prefill(encode(commit)) == commit
    assert decode_from_decode(encode(done)) == done
    assert len(encode(commit)) + len(encode(done)) + 2 * CURVE - tier_map_bytes <= SUBCHUNK_MESSAGE_BYTES


@pytest.mark.parametrize("slots", [1, 4, MOST_GRANTED_SLOTS])
@pytest.mark.parametrize("table_bytes", [0, 1, 255, 256, 65_535, 65_536])
def test_the_messages_of_a_chunk(slots: int, table_bytes: int) -> None:
    opening = Open(
        U64, U64, U64, U64, U32, U31, U64, U32, 2**16 - 1, b"\xff" * table_bytes, ALL_TIERS, MOST_GRANTED_SLOTS, 0.1
    )
    granted = Granted(U64, [SlotGrant(U32, U64, U64)] * slots, U64)
    close = Close(U64, [U32] * slots)
    assert decode_from_prefill(encode(opening)) == opening
    assert decode_from_decode(encode(granted)) == granted
    assert decode_from_prefill(encode(close)) == close
    size = len(encode(opening)) + len(encode(granted)) + len(encode(close)) + 3 * CURVE - table_bytes
    assert size <= CHUNK_MESSAGE_BYTES
