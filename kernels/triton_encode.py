"""Quantising a tile of a pool in registers: codes as 64-bit words, and float16 parameters as bits.

The torch references are the quantisers' `quantise` methods; results are equal bit for bit. A tile comes as the left and
the right half of its heads, so that a thread holds more elements of a head and fewer threads repeat what is done once a
head. Tiles whose numbers are all ordinary take few operations an element; a tile with a NaN, an infinity, or a scale
outside float16's normal range is cleaned and clamped as the reference does.
"""

# Triton reads the annotations of kernels, so only what it knows can stand there.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from spectrumkv_sglang.kernels.triton_tiles import divisor_of, is_finite, negated_quotient

ROUNDER = tl.constexpr(12582912.0)
"""1.5 x 2^23: added to a float32 below 2^22 it leaves the nearest integer, ties to even, in the lowest bits."""
ROUNDER_BITS = tl.constexpr(0x4B400000)
SIGNS = tl.constexpr(-0x7F7F7F7F7F7F7F80)
"""The top bit of each byte of a word."""
SMALLEST_NORMAL = tl.constexpr(2.0**-14)
LARGEST = tl.constexpr(65504.0)
OUT_OF_REACH = tl.constexpr(2.0**40)
"""Saturates with the largest scale, and over the smallest one is still a float32."""


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _rounded_bits(negated):
    """ROUNDER_BITS plus the integer nearest to ``-negated``, ties to even, as int32; for magnitudes below 2^22."""
    return (tl.zeros_like(negated) + ROUNDER - negated).to(tl.int32, bitcast=True)


@triton.jit
def _float16_bits(values):
    """Bits of float16 values as int32 0 to 65535."""
    return values.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _finite_or_saturated(values):
    """NaN becomes 0, infinities and all that saturates with any scale a finite number."""
    numbers = tl.where(values == values, values, 0.0)
    return tl.minimum(tl.maximum(numbers, -OUT_OF_REACH), OUT_OF_REACH)


@triton.jit
def _finite_or_zero(values):
    return tl.where(is_finite(values), values, 0.0)


@triton.jit
def _words_of_codes(codes, PAIRS: tl.constexpr, DIM: tl.constexpr, CODES: tl.constexpr):
    """``CODES`` int32 numbers to a 64-bit word, first number lowest: [pairs, dim] to [pairs, dim / CODES]."""
    BITS: tl.constexpr = 64 // CODES
    codes = tl.reshape(codes, (PAIRS, DIM // CODES, 2, CODES // 2))
    halves = tl.sum(codes << (tl.arange(0, CODES // 2) * BITS)[None, None, None, :], axis=3)
    wide = halves.to(tl.uint32, bitcast=True).to(tl.int64)
    return tl.sum(wide << (tl.arange(0, 2) * 32).to(tl.int64)[None, None, :], axis=2)


@triton.jit
def _symmetric_scale(peak, LARGEST_CODE: tl.constexpr):
    largest = tl.zeros_like(peak) + LARGEST_CODE
    # The maximum turns -0 into +0.
    scale = tl.maximum(negated_quotient(-peak, largest, -1.0 / largest), 0.0)
    return tl.minimum(scale, LARGEST).to(tl.float16)


@triton.jit
def _any_irregular(peak, scale):
    """Whether a row of the tile has non-finite elements, a saturated scale, or one that lost precision."""
    wide = scale.to(tl.float32)
    regular = ((wide >= SMALLEST_NORMAL) & (wide < LARGEST)) | (peak == 0.0)
    return tl.max((regular == 0).to(tl.int32), axis=0) > 0


@triton.jit
def _cleaned(left, right, LARGEST_CODE: tl.constexpr):
    """For a tile that may hold anything: float16 scales [pairs], and minus the elements over them, all in range."""
    finite = tl.maximum(tl.abs(_finite_or_zero(left)), tl.abs(_finite_or_zero(right)))
    scale = _symmetric_scale(tl.max(finite, axis=1), LARGEST_CODE)
    divisor = divisor_of(scale)[:, None]
    reciprocal = -1.0 / divisor
    left = negated_quotient(_finite_or_saturated(left), divisor, reciprocal)
    right = negated_quotient(_finite_or_saturated(right), divisor, reciprocal)
    left = tl.minimum(tl.maximum(left, -LARGEST_CODE), LARGEST_CODE)
    right = tl.minimum(tl.maximum(right, -LARGEST_CODE), LARGEST_CODE)
    return scale, left, right


@triton.jit
def _int8_bits(values, divisor, reciprocal, BFLOAT16: tl.constexpr):
    """ROUNDER_BITS plus codes of elements within the range of an ordinary scale.

    A bfloat16 number has 8 significant bits, an ordinary scale 11: unless their quotient is a tie, it lies at least
    2^-12 from one. So it is enough to round it to multiples of 2^-13 on the way, which puts ties where they belong.
    """
    if BFLOAT16:
        moved = tl.fma(values, reciprocal, tl.zeros_like(values) + 1536.0)
        return (tl.zeros_like(values) + (ROUNDER + 1536.0) - moved).to(tl.int32, bitcast=True)
    else:
        return _rounded_bits(negated_quotient(values, divisor, reciprocal))


@triton.jit
def encode_int8(left, right, PAIRS: tl.constexpr, HALF_DIM: tl.constexpr, BFLOAT16: tl.constexpr):
    """Words int64 [pairs, half / 8] of both float32 halves [pairs, half], and scale bits int32 [pairs]."""
    peak = tl.reduce(_larger(tl.abs(left), tl.abs(right)), 1, _larger)
    scale = _symmetric_scale(peak, 127.0)
    if _any_irregular(peak, scale):
        scale, clean_left, clean_right = _cleaned(left, right, 127.0)
        left_bits, right_bits = _rounded_bits(clean_left), _rounded_bits(clean_right)
    else:
        divisor = divisor_of(scale)[:, None]
        reciprocal = -1.0 / divisor
        left_bits = _int8_bits(left, divisor, reciprocal, BFLOAT16)
        right_bits = _int8_bits(right, divisor, reciprocal, BFLOAT16)
    # Codes plus 128 are 1 to 255 and add up without borrowing; flipping their top bits makes two's complement.
    left_words = _words_of_codes(left_bits - (ROUNDER_BITS - 128), PAIRS, HALF_DIM, 8) ^ SIGNS
    right_words = _words_of_codes(right_bits - (ROUNDER_BITS - 128), PAIRS, HALF_DIM, 8) ^ SIGNS
    return left_words, right_words, _float16_bits(scale)


@triton.jit
def _words_of_e4m3(scaled, PAIRS: tl.constexpr, HALF_DIM: tl.constexpr, HARDWARE_FP8: tl.constexpr):
    """E4M3 codes, nearest even, of float32 numbers up to 448 (and a little) in magnitude, eight to a 64-bit word."""
    if HARDWARE_FP8:
        even, odd = tl.split(tl.reshape(scaled, (PAIRS, HALF_DIM // 8, 2, 2, 2)))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        a0, a4 = tl.split(x0)
        a1, a5 = tl.split(x1)
        a2, a6 = tl.split(x2)
        a3, a7 = tl.split(x3)
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b16 h0, h1, h2, h3;
            cvt.rn.satfinite.e4m3x2.f32 h0, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 h1, $4, $3;
            cvt.rn.satfinite.e4m3x2.f32 h2, $6, $5;
            cvt.rn.satfinite.e4m3x2.f32 h3, $8, $7;
            mov.b64 $0, {h0, h1, h2, h3};
            }
            """,
            "=l,f,f,f,f,f,f,f,f",
            [a0, a1, a2, a3, a4, a5, a6, a7],
            dtype=tl.int64,
            is_pure=True,
            pack=1,
        )
    else:
        bits = tl.minimum(tl.maximum(scaled, -448.0), 448.0).to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # Normal numbers: drop 20 mantissa bits, nearest even, and move the exponent bias from 127 to 7.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 the step is 2^-9, the step of float32 numbers around 2^14 = 0x46800000.
        subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        codes = tl.where(magnitude < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)
        return _words_of_codes(codes, PAIRS, HALF_DIM, 8)


@triton.jit
def encode_fp8_e4m3(left, right, PAIRS: tl.constexpr, HALF_DIM: tl.constexpr, HARDWARE_FP8: tl.constexpr):
    """Words int64 [pairs, half / 8] of both float32 halves [pairs, half], and scale bits int32 [pairs]."""
    peak = tl.reduce(_larger(tl.abs(left), tl.abs(right)), 1, _larger)
    scale = _symmetric_scale(peak, 448.0)
    if _any_irregular(peak, scale):
        scale, left, right = _cleaned(left, right, 448.0)
    else:
        divisor = divisor_of(scale)[:, None]
        reciprocal = -1.0 / divisor
        left = negated_quotient(left, divisor, reciprocal)
        right = negated_quotient(right, divisor, reciprocal)
    # Codes of the negated numbers: their signs are flipped eight at a time.
    left_words = _words_of_e4m3(left, PAIRS, HALF_DIM, HARDWARE_FP8) ^ SIGNS
    right_words = _words_of_e4m3(right, PAIRS, HALF_DIM, HARDWARE_FP8) ^ SIGNS
    return left_words, right_words, _float16_bits(scale)


@triton.jit
def _asymmetric_parameters(low, high):
    # Adding 0 turns -0 into +0, as in the reference.
    zero = (tl.minimum(tl.maximum(low, -LARGEST), LARGEST) + 0.0).to(tl.float16)
    largest = tl.zeros_like(low) + 15.0
    step = tl.maximum(negated_quotient(zero.to(tl.float32) - high, largest, -1.0 / largest), 0.0)
    return (tl.minimum(step, LARGEST) + 0.0).to(tl.float16), zero


@triton.jit
def _eight_nibbles(bits, inside, PAIRS: tl.constexpr, HALF_DIM: tl.constexpr, FULL: tl.constexpr):
    """Half words int64 [pairs, half / 8] of ROUNDER_BITS plus codes int32 [pairs, half], first code lowest."""
    codes = bits - ROUNDER_BITS
    if not FULL:
        codes = tl.where(inside, codes, 0)
    codes = tl.reshape(codes, (PAIRS, HALF_DIM // 8, 8))
    return tl.sum(codes << (tl.arange(0, 8) * 4)[None, None, :], axis=2).to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def encode_int4(
    left, right, inside_left, inside_right, PAIRS: tl.constexpr, HALF_DIM: tl.constexpr, FULL: tl.constexpr
):
    """Words int64 [pairs, half / 8] and parameter bits int32 [pairs] of heads that come in alternate runs of eight.

    Args:
        left: float32 [pairs, half], elements 0 to 7, 16 to 23 and so on of each head.
        right: float32 [pairs, half], the others: a word's sixteen codes are eight of each.
        inside_left: which elements belong to the head.
        inside_right: the same of ``right``.
        PAIRS: (row, head) pairs.
        HALF_DIM: elements of a half.
        FULL: all elements belong to the head.

    Parameter bits are those of the scale plus 65536 times those of the zero.
    """
    if FULL:
        low = tl.reduce(_smaller(left, right), 1, _smaller)
        high = tl.reduce(_larger(left, right), 1, _larger)
    else:
        above = _smaller(tl.where(inside_left, left, float("inf")), tl.where(inside_right, right, float("inf")))
        below = _larger(tl.where(inside_left, left, float("-inf")), tl.where(inside_right, right, float("-inf")))
        low, high = tl.reduce(above, 1, _smaller), tl.reduce(below, 1, _larger)
    scale, zero = _asymmetric_parameters(low, high)
    wide = scale.to(tl.float32)
    regular = is_finite(low) & is_finite(high) & (tl.abs(low) < LARGEST)
    regular &= ((wide >= SMALLEST_NORMAL) & (wide < LARGEST)) | ((high == 0.0) & (low == 0.0))
    # A zero that was rounded up by less than half a step leaves every code at 0 or above.
    regular &= (zero.to(tl.float32) - low) * 2.0 <= wide
    if tl.max((regular == 0).to(tl.int32), axis=0) > 0:
        finite_left, finite_right = _finite_or_zero(left), _finite_or_zero(right)
        above = tl.where(inside_left, finite_left, float("inf"))
        low = tl.min(tl.minimum(above, tl.where(inside_right, finite_right, float("inf"))), axis=1)
        below = tl.where(inside_left, finite_left, float("-inf"))
        high = tl.max(tl.maximum(below, tl.where(inside_right, finite_right, float("-inf"))), axis=1)
        scale, zero = _asymmetric_parameters(low, high)
        origin, divisor = zero.to(tl.float32)[:, None], divisor_of(scale)[:, None]
        reciprocal = -1.0 / divisor
        left = negated_quotient(_finite_or_saturated(_finite_or_saturated(left) - origin), divisor, reciprocal)
        right = negated_quotient(_finite_or_saturated(_finite_or_saturated(right) - origin), divisor, reciprocal)
        left_bits = _rounded_bits(tl.minimum(tl.maximum(left, -15.0), 0.0))
        right_bits = _rounded_bits(tl.minimum(tl.maximum(right, -15.0), 0.0))
    else:
        origin, divisor = zero.to(tl.float32)[:, None], divisor_of(scale)[:, None]
        reciprocal = -1.0 / divisor
        left_bits = _rounded_bits(negated_quotient(left - origin, divisor, reciprocal))
        right_bits = _rounded_bits(negated_quotient(right - origin, divisor, reciprocal))
    lower = _eight_nibbles(left_bits, inside_left, PAIRS, HALF_DIM, FULL)
    upper = _eight_nibbles(right_bits, inside_right, PAIRS, HALF_DIM, FULL)
    return lower | (upper << 32), _float16_bits(scale) | (_float16_bits(zero) << 16)
