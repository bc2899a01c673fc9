"""The signed Hadamard transform of heads whose elements lie in lanes, without leaving the registers of a warp.

`transforms.hadamard` is the torch reference. Sylvester's matrix is a product of one butterfly for each bit of the
element's number, in any order. Tensor cores take those of six bits at once (five where two lanes share a head): a
thread's four lanes hold a row of ``mma.m16n8k16``, whose operands and results name the same elements of the same
threads, so that nothing is moved between them. Their matrix of 16 is one register of each thread; the other bits are
signs of that register. Without tensor cores, or for float32 elements, butterflies are sums and differences.

The instruction takes it that thread t of a warp holds lane ``t % lanes`` of a head, as Triton lays out tensors
[pairs, lanes] behind a load of 16 bytes of each lane. Nothing in the language says so: `payload.kernel_check` looks at
the results before a server uses them.
"""

# Triton reads the annotations of kernels, so only what it knows can stand there; its tuples grow by concatenation only.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"
# ruff: noqa: RUF005, SIM108

from __future__ import annotations

import triton
import triton.language as tl

from spectrumkv_sglang.kernels.triton_lanes import sign_words

_RUNS, _ELEMENTS = 4, 8


def _products(kind: str, adjacent: bool) -> str:
    """PTX of the matrix products of a lane's four runs of eight elements, packed in pairs.

    Of an element's number within its run, one bit is the half of a register, one tells the operand's row of a head from
    that 8 rows below, which is not summed over, and the middle one, with the thread's number, which register. Output
    ``8 r + 4 n + 2 row + half``: of run r, middle bit n.

    Args:
        kind: bf16 or f16.
        adjacent: pairs are neighbours, so the row is bit 2; if not, pairs are 4 apart and the row is bit 0.
    """
    outputs, operands = _RUNS * _ELEMENTS, _RUNS * _ELEMENTS // 2
    matrix = f"${outputs + operands}"
    # Registers of an operand: row, row + 8, then the same with the middle bit set.
    order = (0, 2, 1, 3) if adjacent else (0, 1, 2, 3)
    lines = [".reg .b32 minus;", f"xor.b32 minus, {matrix}, 0x80008000;"]
    lines.append(f".reg .f32 d<{outputs}>;")
    for run in range(_RUNS):
        for middle in range(2):
            first = 8 * run + 4 * middle
            sums = ", ".join(f"d{first + i}" for i in range(4))
            for step in range(_RUNS):
                negative = (run & step).bit_count() & 1
                signs = (negative, negative ^ middle)
                operand = ", ".join(f"${outputs + 4 * step + q}" for q in order)
                columns = ", ".join("minus" if sign else matrix for sign in signs)
                added = sums if step else "0f00000000, 0f00000000, 0f00000000, 0f00000000"
                lines.append(
                    f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
                    f"{{{sums}}}, {{{operand}}}, {{{columns}}}, {{{added}}};"
                )
    lines += [f"mov.f32 ${i}, d{i};" for i in range(outputs)]
    return "{ " + " ".join(lines) + " }"


_OF_BFLOAT16 = tl.constexpr(_products("bf16", True))
_OF_FLOAT16 = tl.constexpr(_products("f16", True))
_OF_CODES = tl.constexpr(_products("f16", False))
_CONSTRAINTS = tl.constexpr(",".join(["=f"] * 32 + ["r"] * 17))
_FLOATS = tl.constexpr((tl.float32,) * 32)


@triton.jit
def _matrix(like, LANES: tl.constexpr, BFLOAT16: tl.constexpr):
    """A thread's part of the matrix of 16, two numbers of 1 or -1; 0 between lanes of different heads."""
    thread = tl.inline_asm_elementwise(
        "{ .reg .b32 zero; mov.b32 zero, $1; mov.u32 $0, %laneid; }",
        "=r,r",
        [tl.zeros_like(like)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    ONE: tl.constexpr = 0x3F80 if BFLOAT16 else 0x3C00
    column = thread >> 2
    row = (thread & 3) * 2
    shared = row & column & (2 if LANES == 2 else 6)
    negative = (shared ^ (shared >> 1)) >> 1 & 1
    both = (ONE * 0x10001) ^ (negative * 0x8000 | (negative ^ (column & 1)) << 31)
    return tl.where(((row ^ column) & 4) == 0, both, 0) if LANES == 2 else both


@triton.jit
def _butterfly(x, BIT: tl.constexpr):
    """Of the elements of a lane whose places differ in a bit."""
    results = ()
    for j in tl.static_range(len(x)):
        if j & BIT:
            results = results + (x[j - BIT] - x[j],)
        else:
            results = results + (x[j] + x[j + BIT],)
    return results


@triton.jit
def _butterfly_of_lanes(x, BIT: tl.constexpr):
    """Of lanes whose numbers differ in a bit."""
    PAIRS: tl.constexpr = x[0].shape[0]
    LANES: tl.constexpr = x[0].shape[1]
    lane = tl.broadcast_to(tl.arange(0, LANES)[None, :], (PAIRS, LANES))
    results = ()
    for j in tl.static_range(len(x)):
        other = tl.gather(x[j], lane ^ BIT, 1)
        results = results + (tl.where((lane & BIT) == 0, x[j] + other, other - x[j]),)
    return results


@triton.jit
def transformed(x):
    """``x @ H`` of a tuple of 32 float32 [pairs, lanes], by butterflies alone."""
    for bit in tl.static_range(5):
        x = _butterfly(x, 1 << bit)
    if x[0].shape[1] >= 2:
        x = _butterfly_of_lanes(x, 1)
    if x[0].shape[1] >= 4:
        x = _butterfly_of_lanes(x, 2)
    if x[0].shape[1] >= 8:
        x = _butterfly_of_lanes(x, 4)
    return x


@triton.jit
def _across_quads(x):
    """`_butterfly_of_lanes` of lanes four apart, eight of a head: one shuffle and one multiply-add an element."""
    LANES: tl.constexpr = x[0].shape[1]
    sign = tl.where((tl.arange(0, LANES) & 4) == 0, 1.0, -1.0)[None, :]
    results = ()
    for j in tl.static_range(len(x)):
        other = tl.inline_asm_elementwise(
            "shfl.sync.bfly.b32 $0, $1, 4, 0x1f, 0xffffffff;",
            "=r,r",
            [x[j].to(tl.int32, bitcast=True)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        results = results + (tl.fma(x[j], tl.broadcast_to(sign, x[j].shape), other.to(tl.float32, bitcast=True)),)
    return results


@triton.jit
def transformed_pairs(registers, BFLOAT16: tl.constexpr):
    """``(x * signs) @ H`` on tensor cores.

    Args:
        registers: 16 int32 [pairs, lanes], neighbouring elements in pairs, with their signs.
        BFLOAT16: bfloat16 elements, float16 if not.

    Returns:
        32 float32 [pairs, lanes].
    """
    LANES: tl.constexpr = registers[0].shape[1]
    matrix = _matrix(registers[0], LANES, BFLOAT16)
    arguments = registers + (matrix,)
    products = tl.inline_asm_elementwise(
        _OF_BFLOAT16 if BFLOAT16 else _OF_FLOAT16, _CONSTRAINTS, arguments, dtype=_FLOATS, is_pure=True, pack=1
    )
    if LANES == 8:
        products = _across_quads(products)
    results = ()
    for run in tl.static_range(4):
        # The bit that the products leave is bit 2 of an element's number.
        sums = ()
        differences = ()
        for i in tl.static_range(4):
            above, below = products[8 * run + 4 * (i // 2) + i % 2], products[8 * run + 4 * (i // 2) + i % 2 + 2]
            sums = sums + (above + below,)
            differences = differences + (above - below,)
        results = results + sums + differences
    return results


@triton.jit
def half_transformed_codes(registers):
    """What is left of ``n @ H`` of float16 numbers is the butterfly of bit 0 of an element's number.

    Args:
        registers: 16 int32 [pairs, lanes], elements 4 apart in pairs: those of run r are 8 r + i and 8 r + i + 4.

    Returns:
        32 float32 [pairs, lanes].
    """
    LANES: tl.constexpr = registers[0].shape[1]
    arguments = registers + (_matrix(registers[0], LANES, False),)
    products = tl.inline_asm_elementwise(_OF_CODES, _CONSTRAINTS, arguments, dtype=_FLOATS, is_pure=True, pack=1)
    if LANES == 8:
        products = _across_quads(products)
    results = ()
    for run in tl.static_range(4):
        for j in tl.static_range(8):
            results = results + (products[8 * run + 4 * ((j >> 1) & 1) + 2 * (j & 1) + (j >> 2)],)
    return results


@triton.jit
def with_signs(registers, PAIRS: tl.constexpr, LANES: tl.constexpr, ARRANGEMENT: tl.constexpr):
    """Pairs of 16-bit elements times the signs of the transform, a tuple of int32."""
    words = sign_words(PAIRS, LANES, ARRANGEMENT)
    results = ()
    for i in tl.static_range(len(registers)):
        results = results + (registers[i] ^ ((words << i) & -2147450880),)
    return results


@triton.jit
def floats_with_signs(x, ARRANGEMENT: tl.constexpr):
    """float32 elements times the signs of the transform, a tuple of float32."""
    words = sign_words(x[0].shape[0], x[0].shape[1], ARRANGEMENT)
    results = ()
    for j in tl.static_range(len(x)):
        sign = (words << (j // 2 + (0 if j % 2 else 16))) & -2147483648
        results = results + ((x[j].to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True),)
    return results
