"""Quantising heads to INT4 in registers: sixteen codes to a 64-bit word, scale and zero as bits.

The torch reference is `AffineRowQuantiser.quantise`; results are equal bit for bit. A tile with a NaN, an infinity, a
zero beyond float16 or a scale outside its normal range is encoded a second, slower way.
"""

# Triton reads the annotations of kernels, so only what it knows can stand there; its tuples grow by concatenation only.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from spectrumkv_sglang.kernels.triton_affine import code_bits, full_range
from spectrumkv_sglang.kernels.triton_arithmetic import (
    LARGEST,
    SMALLEST_NORMAL,
    divisor_of,
    float16_bits,
    negated_reciprocal,
)
from spectrumkv_sglang.kernels.triton_runs import elements_of, extremes

MINUS_EIGHT_ROUNDERS = tl.constexpr((-0x4B400000 * 0x11111111 + 2**31) % 2**32 - 2**31)
"""Takes the rounder's bits out of eight codes that were added up four bits apart, modulo 2^32."""


@triton.jit
def int4_parameters(low, high):
    """float16 scale and zero of what lies between float32 ``low`` and ``high``, as the reference computes them."""
    return full_range(low, high, 15)


@triton.jit
def is_regular(low, high, scale, zero):
    """Whether codes need neither cleaning nor clamping; not if ``low`` or ``high`` is NaN or infinite."""
    wide = scale.to(tl.float32)
    # A NaN among the elements is one here, and no comparison with it holds.
    regular = ((wide >= SMALLEST_NORMAL) & (wide < LARGEST)) | ((high == 0.0) & (low == 0.0))
    # A zero that was rounded up by less than half a step leaves every code at 0 or above.
    return regular & (tl.abs(low) < LARGEST) & ((zero.to(tl.float32) - low) * 2.125 <= wide)


@triton.jit
def int4_bits(x, origin, divisor, reciprocal, CLEAN: tl.constexpr):
    """`code_bits` of codes of 4 bits. CLEAN where a parameter is not regular."""
    return code_bits(x, origin, divisor, reciprocal, 15, CLEAN)


@triton.jit
def _codes_of_run(run, origin, divisor, reciprocal, BFLOAT16: tl.constexpr, FLOAT16: tl.constexpr, CLEAN: tl.constexpr):
    """Four or eight codes, each with ROUNDER_BITS, added up four bits apart, int32 [pairs, lanes]."""
    elements = elements_of(run, BFLOAT16, FLOAT16)
    codes = int4_bits(elements[0], origin, divisor, reciprocal, CLEAN)
    codes += int4_bits(elements[1], origin, divisor, reciprocal, CLEAN) << 4
    return tl.sum(codes << (tl.arange(0, codes.shape[2]) * 8)[None, None, :], axis=2)


@triton.jit
def _words_of_codes(runs, scale, zero, BFLOAT16: tl.constexpr, FLOAT16: tl.constexpr, CLEAN: tl.constexpr):
    """Sixteen codes of each word, the first in the lowest bits: even and odd words, int64 [pairs, lanes]."""
    divisor = divisor_of(scale)
    reciprocal = negated_reciprocal(divisor)[:, None, None]
    origin, divisor = zero.to(tl.float32)[:, None, None], divisor[:, None, None]
    halves = ()
    for i in tl.static_range(4):
        if len(runs) == 4:
            codes = _codes_of_run(runs[i], origin, divisor, reciprocal, BFLOAT16, FLOAT16, CLEAN)
        else:
            codes = _codes_of_run(runs[2 * i], origin, divisor, reciprocal, BFLOAT16, FLOAT16, CLEAN)
            upper = _codes_of_run(runs[2 * i + 1], origin, divisor, reciprocal, BFLOAT16, FLOAT16, CLEAN)
            codes += upper << 16
        halves = halves + ((codes + MINUS_EIGHT_ROUNDERS).to(tl.uint32, bitcast=True).to(tl.int64),)
    return halves[0] | (halves[1] << 32), halves[2] | (halves[3] << 32)


@triton.jit
def encode_int4(runs, BFLOAT16: tl.constexpr, FLOAT16: tl.constexpr, PACKED: tl.constexpr):
    """Codes and parameters of whole heads.

    Args:
        runs: of each head.
        BFLOAT16: element type of the pool.
        FLOAT16: element type of the pool; float32 if it is neither.
        PACKED: two elements are compared at once, by instructions of NVIDIA's.

    Returns:
        Sixteen codes of each even and of each odd word, int64 [pairs, lanes], and int32 [pairs]: bits of the scale plus
        65536 times those of the zero.
    """
    low, high = extremes(runs, BFLOAT16, FLOAT16, PACKED, False)
    scale, zero = int4_parameters(low, high)
    if tl.max((is_regular(low, high, scale, zero) == 0).to(tl.int32), axis=0) > 0:
        low, high = extremes(runs, BFLOAT16, FLOAT16, PACKED, True)
        scale, zero = int4_parameters(low, high)
        even, odd = _words_of_codes(runs, scale, zero, BFLOAT16, FLOAT16, True)
    else:
        even, odd = _words_of_codes(runs, scale, zero, BFLOAT16, FLOAT16, False)
    return even, odd, float16_bits(scale) | (float16_bits(zero) << 16)
