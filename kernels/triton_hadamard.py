"""The signed Hadamard transform of heads in registers; `transforms.hadamard` is the torch reference.

Heads are blocks of one power of two here. A head of 64 g elements is multiplied by the matrix of 64 in g pieces, on
tensor cores for operands of 16 bits, and the pieces are added and subtracted in pairs: Sylvester's matrix of twice the
size is [[H, H], [H, -H]]. Products are exact; sums are float32 in another order than the reference's.
"""

# Triton reads the annotations of kernels, so only what it knows can stand there.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

PIECE = tl.constexpr(64)
"""Elements that one matrix product takes."""


@triton.jit
def signs(DIM: tl.constexpr):
    """1 or -1 for each element of a head, float32 [1, DIM], as `transforms.hadamard.signs` has them."""
    mixed = (tl.arange(0, DIM) + 1).to(tl.uint32)
    mixed ^= mixed >> 16
    mixed *= 0x85EBCA6B
    mixed ^= mixed >> 13
    mixed *= 0xC2B2AE35
    mixed ^= mixed >> 16
    return (1 - 2 * (mixed & 1).to(tl.int32)).to(tl.float32)[None, :]


@triton.jit
def _matrix():
    """Sylvester's matrix of 64, float32."""
    number = tl.arange(0, PIECE)
    shared = number[:, None] & number[None, :]
    shared ^= shared >> 4
    shared ^= shared >> 2
    shared ^= shared >> 1
    return (1 - 2 * (shared & 1)).to(tl.float32)


@triton.jit
def _doubled(y, SIZE: tl.constexpr):
    """Transforms of twice ``SIZE`` elements of those of their halves; [2 n, SIZE] becomes [n, 2 * SIZE]."""
    HALF: tl.constexpr = y.shape[0] // 2
    first, second = tl.split(tl.permute(tl.reshape(y, (HALF, 2, SIZE)), (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 2, 1)), (HALF, 2 * SIZE))


@triton.jit
def _of_pieces(x, BFLOAT16_PARTS: tl.constexpr):
    """``x @ H`` of [n, 64], float32."""
    matrix = _matrix()
    if BFLOAT16_PARTS:
        # A float32 number is the sum of three of bfloat16, exactly.
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        matrix = matrix.to(tl.bfloat16)
        return tl.dot(high, matrix, tl.dot(middle, matrix, tl.dot(low, matrix)))
    else:
        return tl.dot(x, matrix.to(x.dtype), input_precision="ieee")


@triton.jit
def hadamard(x, DIM: tl.constexpr, HARDWARE_BFLOAT16: tl.constexpr):
    """``x @ H / sqrt(DIM)``, float32 [rows, DIM].

    Args:
        x: float16, bfloat16 where tensor cores take it, or float32.
        DIM: 64, 128 or 256.
        HARDWARE_BFLOAT16: tensor cores take bfloat16.
    """
    ROWS: tl.constexpr = x.shape[0]
    NORM: tl.constexpr = DIM**-0.5
    pieces = tl.reshape(x, (ROWS * DIM // PIECE, PIECE))
    y = _of_pieces(pieces, HARDWARE_BFLOAT16 and x.dtype == tl.float32)
    if DIM >= 128:
        y = _doubled(y, PIECE)
    if DIM >= 256:
        y = _doubled(y, 2 * PIECE)
    return y * NORM
