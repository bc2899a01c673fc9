"""Heads of a pool in registers, so cut that what is done once a head is repeated by few threads.

A few threads (lanes) share a head; each holds twice sixteen neighbouring elements, so that the codes of a payload's
words meet without crossing threads. The two are neighbours themselves for INT4, whose two words are 16 bytes, and a
lane's pair of INT8 or FP8 words lies beside the next lane's: either way a warp writes whole sectors of memory.

A *run* is 16 bytes of each lane, int32 [pairs, lanes, 4]; ``runs`` is the tuple of a lane's runs, 4 or (float32) 8.
"""

# Triton reads the annotations of kernels, so only what it knows can stand there; its tuples grow by concatenation only.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from spectrumkv_sglang.kernels.triton_arithmetic import larger, smaller

ELEMENTS_PER_LANE = 32
"""Elements of a head that a thread holds."""


@triton.jit
def sixteen_of(lane, i: tl.constexpr, LANES: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """Which sixteen elements of a head are a lane's ``i``-th."""
    return lane * 2 + i if NEIGHBOURS else lane + i * LANES


@triton.jit
def load_runs(
    heads,
    PAIRS: tl.constexpr,
    LANES: tl.constexpr,
    DIM: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
):
    """Runs of the heads at int32 addresses [pairs]; elements beyond a head repeat its last sixteen."""
    unit = tl.arange(0, 4 * LANES)
    runs = ()
    for i in tl.static_range(2):
        sixteen = sixteen_of(unit // 4, i, LANES, NEIGHBOURS)
        if LANES * 32 > DIM:
            sixteen = tl.minimum(sixteen, DIM // 16 - 1)
        source = heads[:, None] + (sixteen * (4 * ITEMSIZE) + unit % 4)[None, :]
        for part in tl.static_range(ITEMSIZE):
            runs = runs + (tl.reshape(tl.load(source + part * 4), (PAIRS, LANES, 4)),)
    return runs


@triton.jit
def elements_of(run, BFLOAT16: tl.constexpr, FLOAT16: tl.constexpr):
    """The even and the odd elements of a run, float32 [pairs, lanes, 4], or 2 of a float32 pool."""
    if BFLOAT16:
        return (run << 16).to(tl.float32, bitcast=True), (run & -65536).to(tl.float32, bitcast=True)
    elif FLOAT16:
        even, odd = run.to(tl.int16), (run >> 16).to(tl.int16)
        return even.to(tl.float16, bitcast=True).to(tl.float32), odd.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return tl.split(tl.reshape(run.to(tl.float32, bitcast=True), (run.shape[0], run.shape[1], 2, 2)))


@triton.jit
def packed(a, b, LARGER: tl.constexpr, BFLOAT16: tl.constexpr):
    """Minima or maxima of both 16-bit halves of int32, NaN kept; by an instruction of NVIDIA's."""
    OPERATION: tl.constexpr = ("max" if LARGER else "min") + (".NaN.bf16x2" if BFLOAT16 else ".NaN.f16x2")
    return tl.inline_asm_elementwise(OPERATION + " $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _packed_extreme(runs, LARGER: tl.constexpr, BFLOAT16: tl.constexpr, FLOAT16: tl.constexpr):
    """Least or largest element of each lane, float32 [pairs, lanes], two at a time."""
    run = packed(
        packed(runs[0], runs[1], LARGER, BFLOAT16), packed(runs[2], runs[3], LARGER, BFLOAT16), LARGER, BFLOAT16
    )
    even, odd = tl.split(tl.reshape(run, (run.shape[0], run.shape[1], 2, 2)))
    first, second = tl.split(packed(even, odd, LARGER, BFLOAT16))
    even, odd = elements_of(packed(first, second, LARGER, BFLOAT16), BFLOAT16, FLOAT16)
    return larger(even, odd) if LARGER else smaller(even, odd)


@triton.jit
def extremes(runs, BFLOAT16: tl.constexpr, FLOAT16: tl.constexpr, PACKED: tl.constexpr, CLEAN: tl.constexpr):
    """Least and largest element of each head, float32 [pairs]; of the finite ones and 0 if CLEAN, else NaN is kept."""
    if PACKED and not CLEAN:
        low = _packed_extreme(runs, False, BFLOAT16, FLOAT16)
        high = _packed_extreme(runs, True, BFLOAT16, FLOAT16)
    else:
        low, high = float("inf"), float("-inf")
        for i in tl.static_range(len(runs)):
            even, odd = elements_of(runs[i], BFLOAT16, FLOAT16)
            if CLEAN:
                even = tl.where(tl.abs(even) < float("inf"), even, 0.0)
                odd = tl.where(tl.abs(odd) < float("inf"), odd, 0.0)
            low = tl.minimum(
                tl.minimum(low, even, propagate_nan=tl.PropagateNan.ALL), odd, propagate_nan=tl.PropagateNan.ALL
            )
            high = tl.maximum(
                tl.maximum(high, even, propagate_nan=tl.PropagateNan.ALL), odd, propagate_nan=tl.PropagateNan.ALL
            )
        low = tl.reshape(low, (low.shape[0], low.shape[1] * low.shape[2]))
        high = tl.reshape(high, (high.shape[0], high.shape[1] * high.shape[2]))
    return tl.reduce(low, 1, smaller), tl.reduce(high, 1, larger)
