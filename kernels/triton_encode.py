"""Quantising heads to INT8 and FP8 in registers: eight codes to a 64-bit word, scales as bits.

The torch references are the quantisers' `quantise` methods; results are equal bit for bit. Tiles whose numbers are all
ordinary take few operations an element; a tile with a NaN, an infinity, or a scale outside float16's normal range is
cleaned and clamped as the reference does.
"""

# Triton reads the annotations of kernels, so only what it knows can stand there; its tuples grow by concatenation only.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from spectrumkv_sglang.kernels.triton_arithmetic import (
    LARGEST,
    ROUNDER,
    SMALLEST_NORMAL,
    divisor_of,
    float16_bits,
    larger,
    negated_quotient,
)
from spectrumkv_sglang.kernels.triton_runs import elements_of, extremes

_INT8 = tl.constexpr(1)
_SIGNS = tl.constexpr(0x80808080 - 2**32)
"""The top bit of each byte of half a word."""
_FOUR_ROUNDERS = tl.constexpr((0x80808080 - 0x4B400000 * 0x01010101 + 2**31) % 2**32 - 2**31)
"""Takes the rounder's bits out of four codes that were added up eight bits apart and adds 128 to each, modulo 2^32."""
_OUT_OF_REACH = tl.constexpr(2.0**40)
"""Saturates with the largest scale, and over the smallest one is still a float32."""


@triton.jit
def symmetric_scale(peak, LARGEST_CODE: tl.constexpr):
    """float16 scale that takes ``LARGEST_CODE`` to float32 ``peak`` >= 0, as the reference computes it."""
    largest = tl.zeros_like(peak) + LARGEST_CODE
    # The maximum turns -0 into +0.
    scale = tl.maximum(negated_quotient(-peak, largest, -1.0 / largest), 0.0)
    return tl.minimum(scale, LARGEST).to(tl.float16)


@triton.jit
def rounded_bits(negated):
    """Bits of ROUNDER plus the integer nearest to ``-negated``, ties to even, as int32; for magnitudes below 2^22."""
    return (tl.zeros_like(negated) + ROUNDER - negated).to(tl.int32, bitcast=True)


@triton.jit
def negated_and_cleaned(x, divisor, reciprocal, LARGEST_CODE: tl.constexpr):
    """Minus any elements over the scale, in the range of the codes; NaN becomes 0."""
    x = tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -_OUT_OF_REACH), _OUT_OF_REACH)
    return tl.minimum(tl.maximum(negated_quotient(x, divisor, reciprocal), -LARGEST_CODE), LARGEST_CODE)


@triton.jit
def _int8_bits(x, divisor, reciprocal, BFLOAT16: tl.constexpr, CLEAN: tl.constexpr):
    """Bits of ROUNDER plus codes.

    A bfloat16 number has 8 significant bits, an ordinary scale 11: unless their quotient is a tie, it lies at least
    2^-12 from one. So it is enough to round it to multiples of 2^-13 on the way, which puts ties where they belong.
    """
    if CLEAN:
        return rounded_bits(negated_and_cleaned(x, divisor, reciprocal, 127.0))
    elif BFLOAT16:
        moved = tl.fma(x, reciprocal, tl.zeros_like(x) + 1536.0)
        return (tl.zeros_like(x) + (ROUNDER + 1536.0) - moved).to(tl.int32, bitcast=True)
    else:
        return rounded_bits(negated_quotient(x, divisor, reciprocal))


@triton.jit
def e4m3_bits(scaled):
    """E4M3 codes, nearest even, of float32 numbers up to 448 (and a little) in magnitude, int32."""
    bits = tl.minimum(tl.maximum(scaled, -448.0), 448.0).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Normal numbers: drop 20 mantissa bits, nearest even, and move the exponent bias from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the step is 2^-9, the step of float32 numbers around 2^14 = 0x46800000.
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(magnitude < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)


@triton.jit
def _codes_of_run(
    run,
    divisor,
    reciprocal,
    PRECISION: tl.constexpr,
    BFLOAT16: tl.constexpr,
    FLOAT16: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    CLEAN: tl.constexpr,
):
    """Codes of a run, four to an int32, first code lowest: [pairs, lanes, 2], or 1 of a float32 pool."""
    even, odd = elements_of(run, BFLOAT16, FLOAT16)
    if PRECISION == _INT8:
        pairs = _int8_bits(even, divisor, reciprocal, BFLOAT16, CLEAN)
        pairs += _int8_bits(odd, divisor, reciprocal, BFLOAT16, CLEAN) << 8
    else:
        if CLEAN:
            even = negated_and_cleaned(even, divisor, reciprocal, 448.0)
            odd = negated_and_cleaned(odd, divisor, reciprocal, 448.0)
        else:
            even = negated_quotient(even, divisor, reciprocal)
            odd = negated_quotient(odd, divisor, reciprocal)
        if HARDWARE_FP8:
            pairs = tl.inline_asm_elementwise(
                "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, $2, $1; cvt.u32.u16 $0, h; }",
                "=r,f,f",
                [even, odd],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )
        else:
            pairs = e4m3_bits(even) | (e4m3_bits(odd) << 8)
    pairs = tl.reshape(pairs, (pairs.shape[0], pairs.shape[1], pairs.shape[2] // 2, 2))
    fours = tl.sum(pairs << (tl.arange(0, 2) * 16)[None, None, None, :], axis=3)
    if PRECISION == _INT8:
        # Codes plus 128 are 1 to 255 and add up without borrowing; flipping their top bits makes two's complement.
        fours += _FOUR_ROUNDERS
    # FP8 codes are those of the negated numbers.
    return fours ^ _SIGNS


@triton.jit
def _words_of_codes(
    runs,
    scale,
    PRECISION: tl.constexpr,
    BFLOAT16: tl.constexpr,
    FLOAT16: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    CLEAN: tl.constexpr,
):
    """Four words of each lane, a tuple of int64 [pairs, lanes]."""
    divisor = divisor_of(scale)[:, None, None]
    reciprocal = -1.0 / divisor
    words = ()
    for i in tl.static_range(4):
        if len(runs) == 4:
            fours = _codes_of_run(runs[i], divisor, reciprocal, PRECISION, BFLOAT16, FLOAT16, HARDWARE_FP8, CLEAN)
            lower, upper = tl.split(fours)
        else:
            lower = _codes_of_run(runs[2 * i], divisor, reciprocal, PRECISION, BFLOAT16, FLOAT16, HARDWARE_FP8, CLEAN)
            upper = _codes_of_run(
                runs[2 * i + 1], divisor, reciprocal, PRECISION, BFLOAT16, FLOAT16, HARDWARE_FP8, CLEAN
            )
            lower = tl.reshape(lower, (lower.shape[0], lower.shape[1]))
            upper = tl.reshape(upper, (upper.shape[0], upper.shape[1]))
        low = lower.to(tl.uint32, bitcast=True).to(tl.int64)
        words = words + (low | (upper.to(tl.int64) << 32),)
    return words


@triton.jit
def encode_8_bits(
    runs,
    PRECISION: tl.constexpr,
    BFLOAT16: tl.constexpr,
    FLOAT16: tl.constexpr,
    PACKED: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
):
    """Codes and scales of whole heads.

    Args:
        runs: of each head.
        PRECISION: INT8 or FP8.
        BFLOAT16: element type of the pool.
        FLOAT16: element type of the pool; float32 if it is neither.
        PACKED: two elements are compared at once, by instructions of NVIDIA's.
        HARDWARE_FP8: an instruction converts to E4M3.

    Returns:
        Eight codes of each word, a tuple of four int64 [pairs, lanes], and bits of the scales, int32 [pairs].
    """
    LARGEST_CODE: tl.constexpr = 127.0 if PRECISION == _INT8 else 448.0
    low, high = extremes(runs, BFLOAT16, FLOAT16, PACKED, False)
    peak = larger(high, -low)
    scale = symmetric_scale(peak, LARGEST_CODE)
    wide = scale.to(tl.float32)
    # A row has non-finite elements, a saturated scale, or one that lost precision; NaN became 0 on the way.
    regular = ((wide >= SMALLEST_NORMAL) & (wide < LARGEST)) | (peak == 0.0)
    if tl.max((regular == 0).to(tl.int32), axis=0) > 0:
        low, high = extremes(runs, BFLOAT16, FLOAT16, PACKED, True)
        scale = symmetric_scale(larger(high, -low), LARGEST_CODE)
        words = _words_of_codes(runs, scale, PRECISION, BFLOAT16, FLOAT16, HARDWARE_FP8, True)
    else:
        words = _words_of_codes(runs, scale, PRECISION, BFLOAT16, FLOAT16, HARDWARE_FP8, False)
    return words, float16_bits(scale)
