"""The signed Hadamard transform of a head."""

from __future__ import annotations

from functools import cache
from typing import ClassVar

import torch

from spectrumkv_sglang.kernels.transforms.base import Angles, HeadTransform, finite

SMALLEST_BLOCK = 16
"""Fewer elements would not spread an outlier far enough to be worth the arithmetic."""


class HadamardTransform(HeadTransform):
    """``y = (x * signs) @ H / sqrt(m)`` over blocks of m neighbouring elements, H Sylvester's Hadamard matrix.

    m is the largest power of two that divides the head dimension. The map is orthonormal. With `signs` it is the
    randomised Hadamard transform that QuaRot (arXiv 2404.00456) and QuIP# (arXiv 2402.04396) take outliers away with.

    It is a float32 matrix product, which a butterfly of torch calls is 3 to 6 times slower than on a CPU; the order
    of its sums, so the last bit of ``y``, depends on the machine. What was sent decodes everywhere within rounding.
    """

    near_normal: ClassVar[bool] = True

    def check_dim(self, head_dim: int) -> None:
        hadamard_block(head_dim)

    def forward(self, x: torch.Tensor, angles: Angles | None = None) -> torch.Tensor:
        return _by_blocks(finite(x), signed_matrices(x.shape[-1]).to(x.device))

    def inverse(self, y: torch.Tensor, angles: Angles | None = None) -> torch.Tensor:
        return _by_blocks(y, signed_matrices(y.shape[-1]).to(y.device).mT)


def hadamard_block(head_dim: int) -> int:
    """Elements m of the blocks that a head is cut into.

    Raises:
        ValueError: m would be below `SMALLEST_BLOCK`.
    """
    block = head_dim & -head_dim
    if block < SMALLEST_BLOCK:
        raise ValueError(
            f"Hadamard transform: expected a head dimension that is a multiple of {SMALLEST_BLOCK}, got {head_dim}; "
            "use the identity transform for this model"
        )
    return block


def signs(head_dim: int) -> tuple[int, ...]:
    """1 or -1 for each element of a head, the same for every head, layer and machine.

    Element j is negated if bit 0 of ``mix(j + 1)`` is set, mix being the 32-bit finaliser of MurmurHash3
    (https://github.com/aappleby/smhasher).
    """
    return tuple(-1 if _mix(element + 1) & 1 else 1 for element in range(head_dim))


@cache
def signed_matrices(head_dim: int) -> torch.Tensor:
    """``diag(signs) @ H / sqrt(m)`` of each block, float32 [blocks, m, m], on the CPU; not to be written to."""
    block = hadamard_block(head_dim)
    rows = torch.arange(block)
    shared_bits = rows[:, None] & rows[None, :]
    # Sylvester's: -1 where the binary numbers of row and column share an odd number of ones.
    parity = torch.zeros_like(shared_bits)
    for bit in range(block.bit_length() - 1):
        parity ^= shared_bits >> bit & 1
    matrix = (1 - 2 * parity).double() / block**0.5
    negated = torch.tensor(signs(head_dim), dtype=torch.float64).view(-1, block, 1)
    return (negated * matrix).float()


def _by_blocks(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Multiply each block of the last dimension by its matrix."""
    if len(matrices) == 1:
        return x @ matrices[0]
    blocks = x.unflatten(-1, (len(matrices), -1))
    return torch.einsum("...bi,bij->...bj", blocks, matrices).flatten(-2)


def _mix(number: int) -> int:
    number ^= number >> 16
    number = number * 0x85EBCA6B & 0xFFFFFFFF
    number ^= number >> 13
    number = number * 0xC2B2AE35 & 0xFFFFFFFF
    return number ^ number >> 16
