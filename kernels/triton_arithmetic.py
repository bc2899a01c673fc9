"""Exact arithmetic that the pack and unpack kernels share, and the formats of pools.

Rounding to integers and to bfloat16 is spelled out in integer and float32 arithmetic, so that compiled and interpreted
kernels and the torch reference give the same bits; launches switch multiply-add fusion off for the same reason.
"""

# Triton reads the annotations of kernels, so only what it knows can stand there.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

ROUNDER = tl.constexpr(12582912.0)
"""1.5 x 2^23: added to a float32 below 2^22 it leaves the nearest integer, ties to even, in the lowest bits."""
ROUNDER_BITS = tl.constexpr(0x4B400000)
SMALLEST_NORMAL = tl.constexpr(2.0**-14)
LARGEST = tl.constexpr(65504.0)


@triton.jit
def larger(a, b):
    """Maximum that keeps NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(a, b):
    """Minimum that keeps NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def is_finite(values):
    """False for NaN and infinities."""
    return tl.abs(values) < float("inf")


@triton.jit
def finite_or_zero(values):
    """NaN and infinities become 0."""
    return tl.where(is_finite(values), values, 0.0)


@triton.jit
def float16_bits(values):
    """Bits of float16 values as int32 0 to 65535."""
    return values.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def joined(low, high):
    """int64 of two int32."""
    return low.to(tl.uint32, bitcast=True).to(tl.int64) | (high.to(tl.int64) << 32)


@triton.jit
def to_float32(values, BFLOAT16: tl.constexpr):
    """Pool elements as float32; bfloat16 pools are read as int16."""
    if BFLOAT16:
        return (values.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return values.to(tl.float32)


@triton.jit
def from_float32(values, BFLOAT16: tl.constexpr, FLOAT16: tl.constexpr, HARDWARE_BFLOAT16: tl.constexpr):
    """Finite float32 values in the pool's format, nearest even; float16 saturates, bfloat16 goes out as int16."""
    if BFLOAT16 and HARDWARE_BFLOAT16:
        return values.to(tl.bfloat16).to(tl.int16, bitcast=True)
    elif BFLOAT16:
        bits = values.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    elif FLOAT16:
        return tl.minimum(tl.maximum(values, -65504.0), 65504.0).to(tl.float16)
    else:
        return values


@triton.jit
def divisor_of(scale):
    """float32 number to divide by for a float16 scale: the scale, or 1 where it is 0."""
    wide = scale.to(tl.float32)
    return tl.where(wide == 0.0, 1.0, wide)


@triton.jit
def negated_reciprocal(divisor):
    """``-div_rn(1, divisor)`` for a number of at most 11 significant bits.

    One step of Newton's leaves a relative error of 2^-44 before rounding, and no reciprocal of an 11-bit number that is
    not a power of two lies within 2^-36 of a tie.
    """
    rough = -1.0 / divisor
    return tl.fma(tl.fma(rough, divisor, tl.zeros_like(rough) + 1.0), rough, rough)


@triton.jit
def negated_quotient(x, divisor, reciprocal):
    """``-div_rn(x, divisor)`` of finite x by a number of at most 11 significant bits, in three operations.

    One step of Newton's on the quotient (Markstein, IBM J. Res. Dev. 1990). It leaves an error of 2^-20 units in the
    last place before rounding, and no quotient by an 11-bit number lies within 2^-12 of a tie, so the result is
    rounded right even if ``reciprocal``, *minus* one over the divisor, is off by some units in the last place. Negated,
    zeros keep their signs without further operations. Quotients below 2^-70, where the remainder can underflow, may
    lose a bit; no code and no scale depends on it.
    """
    quotient = x * reciprocal
    remainder = tl.fma(quotient, divisor, x)
    return tl.fma(remainder, reciprocal, quotient)
