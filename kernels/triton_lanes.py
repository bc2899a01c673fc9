"""Heads with each of a lane's 32 elements in a register of its own, a tuple of tensors [pairs, lanes].

Operations between elements of a lane are operations between tensors then, which stay in registers; those between lanes
go through the few threads that share a head. `triton_runs` says which elements a lane holds; a third way, *strided*,
is runs of eight: a lane's ``i``-th lies ``lanes`` runs behind the one before, so that neighbouring lanes write
neighbouring 16 bytes.
"""

# Triton reads the annotations of kernels, so only what it knows can stand there; its tuples grow by concatenation only.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from spectrumkv_sglang.kernels.transforms.hadamard import signs
from spectrumkv_sglang.kernels.triton_arithmetic import larger, smaller
from spectrumkv_sglang.kernels.triton_runs import ELEMENTS_PER_LANE, elements_of

CONSECUTIVE, HALVES, STRIDED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Which elements a lane holds: 32 neighbours, twice sixteen (`sixteen_of` without NEIGHBOURS), four times eight."""


def _element(lane: int, j: int, lanes: int, arrangement: int) -> int:
    size = {0: 32, 1: 16, 2: 8}[arrangement]
    return (j // size * lanes + lane) * size + j % size


def _sign_words(lanes: int, arrangement: int) -> int:
    """32 bits of each lane, the first lane lowest; bit 15 - i says whether its element 2 i is negated, bit 31 - i
    whether 2 i + 1 is: moved up by i they are the signs of a packed pair."""
    of_elements = signs(lanes * ELEMENTS_PER_LANE)
    words = 0
    for lane in range(lanes):
        for j in range(ELEMENTS_PER_LANE):
            if of_elements[_element(lane, j, lanes, arrangement)] < 0:
                words |= 1 << (32 * lane + (31 if j % 2 else 15) - j // 2)
    return words


_OF_2_LANES, _OF_4_LANES, _OF_8_LANES = (
    tl.constexpr(sum(_sign_words(lanes, arrangement) << (256 * arrangement) for arrangement in range(3)))
    for lanes in (2, 4, 8)
)


@triton.jit
def sign_words(PAIRS: tl.constexpr, LANES: tl.constexpr, ARRANGEMENT: tl.constexpr):
    """Signs of the transform for a lane's elements, int32 [PAIRS, LANES]; moved up by i, bits 15 and 31 are those of
    elements 2 i and 2 i + 1."""
    ALL: tl.constexpr = _OF_2_LANES if LANES == 2 else (_OF_4_LANES if LANES == 4 else _OF_8_LANES)
    lane = tl.arange(0, LANES)
    words = tl.zeros((LANES,), dtype=tl.int32)
    for i in tl.static_range(LANES):
        words = tl.where(
            lane == i, (((ALL >> (256 * ARRANGEMENT + 32 * i)) & 0xFFFFFFFF) + 2**31) % 2**32 - 2**31, words
        )
    return tl.broadcast_to(words[None, :], (PAIRS, LANES))


@triton.jit
def registers_of(runs):
    """The 16 (float32: 32) int32 of a lane one by one, a tuple of [pairs, lanes]."""
    registers = ()
    for i in tl.static_range(len(runs)):
        even, odd = tl.split(tl.reshape(runs[i], (runs[i].shape[0], runs[i].shape[1], 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        registers = registers + (first, second, third, fourth)
    return registers


@triton.jit
def elements_in(registers, BFLOAT16: tl.constexpr, FLOAT16: tl.constexpr):
    """The 32 elements of a lane, a tuple of float32 [pairs, lanes]."""
    elements = ()
    for i in tl.static_range(len(registers)):
        if BFLOAT16 or FLOAT16:
            even, odd = elements_of(registers[i], BFLOAT16, FLOAT16)
            elements = elements + (even, odd)
        else:
            elements = elements + (registers[i].to(tl.float32, bitcast=True),)
    return elements


@triton.jit
def least_and_largest(x):
    """Of all elements of each head, NaN kept: float32 [pairs]."""
    low, high = x[0], x[0]
    for j in tl.static_range(1, len(x)):
        low, high = smaller(low, x[j]), larger(high, x[j])
    return tl.reduce(low, 1, smaller), tl.reduce(high, 1, larger)


@triton.jit
def sum_of(x):
    """Of all elements of each head, [pairs], in the elements' own type."""
    total = x[0]
    for j in tl.static_range(1, len(x)):
        total += x[j]
    return tl.sum(total, axis=1)


@triton.jit
def permuted(a, b, SELECTOR: tl.constexpr, HARDWARE: tl.constexpr):
    """int32 of four bytes of two: each hexadecimal digit of SELECTOR, the lowest first, names a byte of ``a`` (0 to 3)
    or ``b`` (4 to 7)."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [a, b, tl.zeros_like(a) + SELECTOR],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        result = tl.zeros_like(a)
        for i in tl.static_range(4):
            source = b if (SELECTOR >> (4 * i)) & 4 else a
            result |= ((source >> (8 * ((SELECTOR >> (4 * i)) & 3))) & 0xFF) << (8 * i)
        return result
