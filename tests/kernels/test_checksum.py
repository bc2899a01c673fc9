"""The payload checksum follows its definition and notices what late or misplaced writes do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.kernels.checksum import WORDS_PER_BLOCK, payload_checksum

STEP = 0x9E3779B97F4A7C15
MASK = 2**64 - 1


def scramble(x: int) -> int:
    x &= MASK
    x ^= x >> 32
    x = x * 0xBF58476D1CE4E5B9 & MASK
    x ^= x >> 29
    x = x * 0x94D049BB133111EB & MASK
    return x ^ (x >> 32)


def checksum_by_definition(data: bytes) -> int:
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    total = len(words) * STEP
    for block, start in enumerate(range(0, len(words), WORDS_PER_BLOCK)):
        chunk = words[start : start + WORDS_PER_BLOCK]
        total += scramble(sum(scramble(w + (i + 1) * STEP) for i, w in enumerate(chunk)) + (block + 1) * STEP)
    return total & MASK


def random_payload(words: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (words * 8,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("words", [0, 1, 7, 1000, WORDS_PER_BLOCK, WORDS_PER_BLOCK + 1, 2 * WORDS_PER_BLOCK + 5])
def test_follows_the_definition(words: int) -> None:
    payload = random_payload(words)
    assert payload_checksum(payload) == checksum_by_definition(payload.numpy().tobytes())


def test_is_the_same_number_for_ever() -> None:
    assert payload_checksum(torch.arange(256, dtype=torch.uint8)) == 0x9F035455AE2A3C63


@given(position=st.integers(0, 3 * WORDS_PER_BLOCK * 8 - 1), flip=st.integers(1, 255))
@settings(max_examples=40, deadline=None)
def test_notices_any_changed_byte(position: int, flip: int) -> None:
    payload = random_payload(3 * WORDS_PER_BLOCK)
    before = payload_checksum(payload)
    payload[position] ^= flip
    assert payload_checksum(payload) != before


@given(first=st.integers(0, 299), second=st.integers(0, 299), bit=st.integers(0, 63))
@settings(max_examples=60, deadline=None)
def test_notices_the_same_bit_flipped_in_two_words(first: int, second: int, bit: int) -> None:
    payload = random_payload(300)
    before = payload_checksum(payload)
    words = payload.view(torch.int64)
    mask = (1 << bit) - (1 << 64 if bit == 63 else 0)
    words[first] ^= mask
    words[second] ^= mask
    assert (payload_checksum(payload) == before) == (first == second)


@pytest.mark.parametrize("apart", [1, 7, WORDS_PER_BLOCK], ids=["neighbours", "near", "same place of the next block"])
def test_notices_swapped_words(apart: int) -> None:
    payload = random_payload(2 * WORDS_PER_BLOCK)
    before = payload_checksum(payload)
    words = payload.view(torch.int64)
    words[[3, 3 + apart]] = words[[3 + apart, 3]]
    assert payload_checksum(payload) != before


def test_notices_swapped_blocks() -> None:
    payload = random_payload(2 * WORDS_PER_BLOCK)
    swapped = torch.cat(payload.chunk(2)[::-1])
    assert payload_checksum(swapped) != payload_checksum(payload)


@given(stale=st.integers(1, 400))
@settings(max_examples=30, deadline=None)
def test_notices_stale_bytes_of_an_earlier_payload_at_the_end(stale: int) -> None:
    earlier, payload = random_payload(400, seed=1), random_payload(400, seed=2)
    landed = torch.cat((payload[: -8 * stale], earlier[-8 * stale :]))
    assert payload_checksum(landed) != payload_checksum(payload)


def test_length_counts() -> None:
    sums = {payload_checksum(torch.zeros(8 * words, dtype=torch.uint8)) for words in range(200)}
    assert len(sums) == 200


def test_leaves_the_payload_alone() -> None:
    payload = random_payload(WORDS_PER_BLOCK + 3)
    copy = payload.clone()
    payload_checksum(payload)
    assert torch.equal(payload, copy)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (torch.zeros(12, dtype=torch.uint8), "multiple of 8 bytes, got 12"),
        (torch.zeros(8, dtype=torch.int8), "uint8 vector"),
        (torch.zeros(8, 8, dtype=torch.uint8), "uint8 vector"),
        (torch.zeros(32, dtype=torch.uint8)[::2], "contiguous"),
        (torch.zeros(32, dtype=torch.uint8)[4:20], "aligned to 8"),
    ],
)
def test_refuses_what_it_cannot_read(payload: torch.Tensor, message: str) -> None:
    with pytest.raises(SpectrumKVError, match=message):
        payload_checksum(payload)
