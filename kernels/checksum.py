"""64-bit payload checksum against late, torn and misplaced writes (not against an adversary).

The payload is read as little-endian 64-bit words in blocks of 16,384. Within a block each word is added to a key of its
position, scrambled by a bijection and summed modulo 2^64; the block sums are scrambled with a key of their block and
summed the same way, and the word count is mixed in. Every step is a bijection of one word while the others stand, so a
change of a single word is always noticed and any other change is missed once in about 2^64.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from spectrumkv_sglang.errors import SpectrumKVError

WORDS_PER_BLOCK = 16384
"""Words whose scratch (two times 128 KiB) stays in a core's second-level cache."""
POSITION_STEP = 0x9E3779B97F4A7C15
"""Key of word i is (i + 1) times this odd number (2^64 over the golden ratio)."""
FIRST_FACTOR = 0xBF58476D1CE4E5B9
SECOND_FACTOR = 0x94D049BB133111EB
"""Multipliers of the scrambler (SplitMix64: Steele, Lea, Flood, OOPSLA 2014)."""
FIRST_SHIFT, SECOND_SHIFT, THIRD_SHIFT = 32, 29, 32

_MODULUS = 2**64
_WORD_BYTES = 8
_POSITION_KEYS = np.arange(1, WORDS_PER_BLOCK + 1, dtype=np.uint64) * np.uint64(POSITION_STEP)


def payload_checksum(payload: torch.Tensor) -> int:
    """Checksum of a contiguous uint8 vector whose length is a multiple of 8 bytes.

    CPU tensors (pinned or not) are read in place by numpy, CUDA tensors by a Triton kernel; both give the same number.

    Returns:
        0 to 2^64 - 1.

    Raises:
        SpectrumKVError: another dtype, shape, stride or length, or memory that is not 8-byte aligned.
    """
    check_checksum_input(payload)
    words = payload.numel() // _WORD_BYTES
    if payload.is_cuda:
        from spectrumkv_sglang.kernels.triton_checksum import sum_payload

        verdict = torch.zeros(3, dtype=torch.int64, device=payload.device)
        sum_payload(payload.view(torch.int64), payload.view(torch.int64), verdict)
        total = int(verdict[0].item())
    else:
        total = _sum_of_mixed_block_sums(payload.numpy().view(np.uint64))
    return combine(total, words)


def combine(sum_of_mixed_block_sums: int, words: int) -> int:
    """Mix the word count into the sum over blocks."""
    return (sum_of_mixed_block_sums + words * POSITION_STEP) % _MODULUS


def check_checksum_input(payload: torch.Tensor) -> None:
    """Raise SpectrumKVError unless the tensor can be read as 64-bit words."""
    if payload.dtype != torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
        raise SpectrumKVError(
            f"payload checksum: expected a contiguous uint8 vector, got {payload.dtype} {tuple(payload.shape)}"
        )
    if payload.numel() % _WORD_BYTES:
        raise SpectrumKVError(f"payload checksum: expected a multiple of 8 bytes, got {payload.numel()}")
    if payload.numel() and payload.data_ptr() % _WORD_BYTES:
        raise SpectrumKVError("payload checksum: expected memory aligned to 8 bytes")


def _sum_of_mixed_block_sums(words: npt.NDArray[np.uint64]) -> int:
    blocks = -(-words.size // WORDS_PER_BLOCK)
    sums = np.zeros(blocks, dtype=np.uint64)
    mixed = np.empty(min(words.size, WORDS_PER_BLOCK), dtype=np.uint64)
    scratch = np.empty_like(mixed)
    for block in range(blocks):
        chunk = words[block * WORDS_PER_BLOCK : (block + 1) * WORDS_PER_BLOCK]
        x = mixed[: chunk.size]
        np.add(chunk, _POSITION_KEYS[: chunk.size], out=x)
        _scramble(x, scratch[: chunk.size])
        sums[block] = np.add.reduce(x)
    sums += np.arange(1, blocks + 1, dtype=np.uint64) * np.uint64(POSITION_STEP)
    _scramble(sums, np.empty_like(sums))
    return int(np.add.reduce(sums))


def _scramble(x: npt.NDArray[np.uint64], scratch: npt.NDArray[np.uint64]) -> None:
    np.right_shift(x, np.uint64(FIRST_SHIFT), out=scratch)
    np.bitwise_xor(x, scratch, out=x)
    np.multiply(x, np.uint64(FIRST_FACTOR), out=x)
    np.right_shift(x, np.uint64(SECOND_SHIFT), out=scratch)
    np.bitwise_xor(x, scratch, out=x)
    np.multiply(x, np.uint64(SECOND_FACTOR), out=x)
    np.right_shift(x, np.uint64(THIRD_SHIFT), out=scratch)
    np.bitwise_xor(x, scratch, out=x)
