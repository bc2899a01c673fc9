"""Codes of n bits in the words of a payload and back, plane by plane; `quantisers.code_planes` says how they lie.

Codes are int32 [rows, dim] in registers, dim a multiple of 64, so that each plane of a head fills whole 64-bit words.
"""

# Triton reads the annotations of kernels, so only what it knows can stand there.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from spectrumkv_sglang.kernels.triton_arithmetic import joined


@triton.jit
def plane_words(codes, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
    """Words of the plane of ``WIDTH`` bits of each code from bit ``SHIFT`` on, int64 [rows, dim * WIDTH / 64]."""
    ROWS: tl.constexpr = codes.shape[0]
    HALVES: tl.constexpr = codes.shape[1] * WIDTH // 32
    bits = tl.reshape((codes >> SHIFT) & ((1 << WIDTH) - 1), (ROWS, HALVES, 32 // WIDTH))
    # The bits of a half word do not overlap: their sum is their union, modulo 2^32.
    halves = tl.sum(bits << (tl.arange(0, 32 // WIDTH) * WIDTH)[None, None, :], axis=2)
    low, high = tl.split(tl.reshape(halves, (ROWS, HALVES // 2, 2)))
    return joined(low, high)


@triton.jit
def _load_plane(heads_ptr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    halves = tl.load(heads_ptr[:, None] + tl.arange(0, DIM * WIDTH // 32)[None, :])
    shift = tl.arange(0, 32 // WIDTH) * WIDTH
    bits = (halves[:, :, None] >> shift[None, None, :]) & ((1 << WIDTH) - 1)
    return tl.reshape(bits, (halves.shape[0], DIM))


@triton.jit
def load_codes(heads_ptr, DIM: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Codes of whole heads.

    Args:
        heads_ptr: int32 address of the first code of each head, [rows].
        DIM: codes of a head.
        LOW: bits of the first plane.
        HIGH: bits of the second, 0 if there is none.
    """
    codes = _load_plane(heads_ptr, DIM, LOW)
    if HIGH > 0:
        codes |= _load_plane(heads_ptr + DIM * LOW // 32, DIM, HIGH) << LOW
    return codes
