"""Zeros where a segment's arrays end before the next one begins."""

# Triton reads the annotations of kernels, so only what it knows can stand there.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from spectrumkv_sglang.kernels.triton_running_sum import BLOCK_BITS, BLOCK_WORDS, STEP, scramble

_PADDING_LANES = tl.constexpr(256)
"""More than the 16-bit halves of padding between two segments (at most 4 and 128)."""


@triton.jit
def pad_segment(payload_ptr, sums_ptr, codes_end, params_end, params_start, segment_end, CHECKSUM: tl.constexpr):
    """Zeros between codes and parameters and after the parameters, all in 16-bit halves; the first are summed up."""
    halves_ptr = payload_ptr.to(tl.pointer_type(tl.int16))
    padding = tl.arange(0, _PADDING_LANES)
    # A word between codes and parameters (lane 0), and what follows the parameters, or native codes.
    index = tl.where(padding < 4, codes_end + padding, params_end + padding - 4)
    empty = index < tl.where(padding < 4, params_start, segment_end)
    tl.store(halves_ptr + index, tl.zeros((_PADDING_LANES,), dtype=tl.int16), mask=empty)
    if CHECKSUM:
        index //= 4
        mixed_zeros = scramble(((index & (BLOCK_WORDS - 1)) + 1) * STEP)
        tl.atomic_add(sums_ptr + (index >> BLOCK_BITS), mixed_zeros, mask=empty & (padding == 0), sem="relaxed")
