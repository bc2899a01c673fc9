"""Asymmetric integers of n bits in registers: parameters and codes as `quantisers.affine` and `cut_ranges` have them.

Results are equal bit for bit, but that sums in float64 are made in another order; rounded to float32, or compared, that
does not show unless they lie within 2^-40 of a tie.
"""

# Triton reads the annotations of kernels, so only what it knows can stand there.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from spectrumkv_sglang.kernels.quantisers.cut_ranges import SHRINK_FACTORS
from spectrumkv_sglang.kernels.triton_arithmetic import (
    LARGEST,
    ROUNDER,
    ROUNDER_BITS,
    divisor_of,
    finite_or_zero,
    negated_quotient,
    negated_reciprocal,
)

_SHRINK_1, _SHRINK_2, _SHRINK_3 = (tl.constexpr(factor) for factor in SHRINK_FACTORS[1:])


@triton.jit
def rounded_zero(zero):
    """float16 of a float32 zero, saturated; adding 0 turns -0 into +0."""
    return (tl.minimum(tl.maximum(zero, -LARGEST), LARGEST) + 0.0).to(tl.float16)


@triton.jit
def rounded_scale(step):
    """float16 of a float32 step >= 0, saturated."""
    return (tl.minimum(step, LARGEST) + 0.0).to(tl.float16)


@triton.jit
def full_step(zero, high, LAST: tl.constexpr):
    """float32 step that takes the last code from a float16 zero to ``high``."""
    last = tl.zeros_like(high) + LAST
    return tl.maximum(negated_quotient(zero.to(tl.float32) - high, last, -1.0 / last), 0.0)


@triton.jit
def full_range(low, high, LAST: tl.constexpr):
    """float16 scale and zero of what lies between float32 ``low`` and ``high``; ``LAST`` is the last code."""
    zero = rounded_zero(low)
    return rounded_scale(full_step(zero, high, LAST)), zero


@triton.jit
def code_bits(x, origin, divisor, reciprocal, LAST: tl.constexpr, CLEAN: tl.constexpr):
    """ROUNDER_BITS plus the codes of float32 elements, int32; ``origin`` is the zero, ``reciprocal`` minus one over
    ``divisor``. CLEAN where codes could be beyond the ends or elements NaN, which becomes 0."""
    rounder = tl.zeros_like(x) + ROUNDER
    if CLEAN:
        distance = origin - tl.where(x == x, x, 0.0)
        distance = tl.minimum(tl.maximum(distance, divisor * -(LAST + 1.0)), divisor)
        bits = tl.fma(distance, reciprocal, rounder).to(tl.int32, bitcast=True)
        bits = tl.minimum(tl.maximum(bits, ROUNDER_BITS), ROUNDER_BITS + LAST)
    else:
        bits = tl.fma(origin - x, reciprocal, rounder).to(tl.int32, bitcast=True)
    return bits


@triton.jit
def affine_codes(x, scale, zero, LAST: tl.constexpr):
    """Codes 0 to ``LAST`` of any float32 elements, int32; float16 ``scale`` and ``zero`` are broadcast."""
    divisor = divisor_of(scale)
    return code_bits(x, zero.to(tl.float32), divisor, negated_reciprocal(divisor), LAST, True) - ROUNDER_BITS


@triton.jit
def _squared_error(x, counted, scale, zero, LAST: tl.constexpr):
    """Over the rows, float64 [1, dim]."""
    decoded = affine_codes(x, scale, zero, LAST).to(tl.float64) * scale.to(tl.float64) + zero.to(tl.float64)
    error = decoded - x.to(tl.float64)
    return tl.sum(tl.where(counted, error * error, 0.0), axis=0, keep_dims=True)


@triton.jit
def _shrunk_if_better(x, counted, middle, full, scale, zero, least, FACTOR: tl.constexpr, LAST: tl.constexpr):
    shrunk = rounded_scale(full * FACTOR)
    moved = rounded_zero(middle - shrunk.to(tl.float32) * LAST * 0.5)
    error = _squared_error(x, counted, shrunk, moved, LAST)
    better = error < least
    return tl.where(better, shrunk, scale), tl.where(better, moved, zero), tl.where(better, error, least)


@triton.jit
def _least_error_range(x, counted, low, high, LAST: tl.constexpr):
    """`cut_ranges.least_error_range` of finite elements along the rows, of the ``counted`` ones."""
    scale, zero = full_range(low, high, LAST)
    full = full_step(zero, high, LAST)
    middle = low * 0.5 + high * 0.5
    least = _squared_error(x, counted, scale, zero, LAST)
    scale, zero, least = _shrunk_if_better(x, counted, middle, full, scale, zero, least, _SHRINK_1, LAST)
    scale, zero, least = _shrunk_if_better(x, counted, middle, full, scale, zero, least, _SHRINK_2, LAST)
    scale, zero, least = _shrunk_if_better(x, counted, middle, full, scale, zero, least, _SHRINK_3, LAST)
    return scale, zero


@triton.jit
def encode_affine(x, counted, BITS: tl.constexpr):
    """Codes of a block whose channels share parameters, and these.

    Args:
        x: float32 [rows, dim], whatever bits they are.
        counted: [rows, 1], the rows that are there; the others repeat one of them.
        BITS: of a code.

    Returns:
        int32 codes, and float16 scale and zero [1, dim].
    """
    LAST: tl.constexpr = (1 << BITS) - 1
    finite = finite_or_zero(x)
    low, high = tl.min(finite, axis=0, keep_dims=True), tl.max(finite, axis=0, keep_dims=True)
    if BITS == 2:
        scale, zero = _least_error_range(finite, counted, low, high, LAST)
    else:
        scale, zero = full_range(low, high, LAST)
    return affine_codes(x, scale, zero, LAST), scale, zero
