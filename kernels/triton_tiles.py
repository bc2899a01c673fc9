"""What the pack and unpack kernels share: tiles, exact arithmetic and the running checksum.

A launch works on a `SegmentGroup`: segments that differ only in where they lie. Its tile is ``BLOCK_PAIRS`` (row, head)
pairs of one segment by the elements of a head; payloads are read and written as 64-bit words, which the checksum is
defined on. Rounding to integers and to bfloat16 is spelled out in integer and float32 arithmetic, so that compiled and
interpreted kernels and the torch reference give the same bits; launches switch multiply-add fusion off for the same
reason.
"""

# Triton reads the annotations of kernels, so only what it knows can stand there.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from spectrumkv_sglang.kernels.checksum import (
    FIRST_FACTOR,
    FIRST_SHIFT,
    POSITION_STEP,
    SECOND_FACTOR,
    SECOND_SHIFT,
    THIRD_SHIFT,
    WORDS_PER_BLOCK,
)
from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.segment_group import SegmentGroup, TileShape

# Constants as signed 64-bit numbers: the same bits as unsigned arithmetic.
STEP = tl.constexpr(POSITION_STEP - 2**64)
FIRST = tl.constexpr(FIRST_FACTOR - 2**64)
SECOND = tl.constexpr(SECOND_FACTOR - 2**64)
SHIFT_1, SHIFT_2, SHIFT_3 = tl.constexpr(FIRST_SHIFT), tl.constexpr(SECOND_SHIFT), tl.constexpr(THIRD_SHIFT)
# Shifts of signed numbers repeat the sign: these clear it.
MASK_1, MASK_2, MASK_3 = (tl.constexpr(2 ** (64 - shift) - 1) for shift in (FIRST_SHIFT, SECOND_SHIFT, THIRD_SHIFT))
BLOCK_WORDS = tl.constexpr(WORDS_PER_BLOCK)
BLOCK_BITS = tl.constexpr(WORDS_PER_BLOCK.bit_length() - 1)


@triton.jit
def scramble(x):
    """Bijection of 64-bit words of `payload_checksum`."""
    x ^= (x >> SHIFT_1) & MASK_1
    x *= FIRST
    x ^= (x >> SHIFT_2) & MASK_2
    x *= SECOND
    x ^= (x >> SHIFT_3) & MASK_3
    return x


@triton.jit
def mix(words, first, offset, valid):
    """Scrambled words at ``first + offset`` of the payload, int64; 0 where not valid. Offsets are int32."""
    position = ((first & (BLOCK_WORDS - 1)).to(tl.int32) + offset) & (BLOCK_WORDS - 1)
    return tl.where(valid, scramble(words + (position + 1).to(tl.int64) * STEP), 0)


@triton.jit
def beyond_block(mixed, first, offset):
    """What belongs to the checksum block after that of ``first``, 0 for the rest."""
    return tl.where((first & (BLOCK_WORDS - 1)).to(tl.int32) + offset >= BLOCK_WORDS, mixed, 0)


@triton.jit
def crosses_block(first, SPAN: tl.constexpr):
    """Whether ``SPAN`` words from ``first`` on, one block at most, reach into the next checksum block."""
    return (first & (BLOCK_WORDS - 1)) + SPAN > BLOCK_WORDS


@triton.jit
def add_to_block_sums(sums_ptr, sums, first):
    """Add scrambled words to the sum of the checksum block of ``first``."""
    tl.atomic_add(sums_ptr + (first >> BLOCK_BITS), tl.sum(sums), sem="relaxed")


@triton.jit
def move_to_next_block(sums_ptr, beyond, first):
    """Take what belongs to the next block out of the sum of the checksum block of ``first``."""
    total = tl.sum(beyond)
    tl.atomic_add(sums_ptr + (first >> BLOCK_BITS), -total, sem="relaxed")
    tl.atomic_add(sums_ptr + (first >> BLOCK_BITS) + 1, total, sem="relaxed")


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
def is_finite(values):
    """False for NaN and infinities."""
    return tl.abs(values) < float("inf")


@triton.jit
def divisor_of(scale):
    """float32 number to divide by for a float16 scale: the scale, or 1 where it is 0."""
    wide = scale.to(tl.float32)
    return tl.where(wide == 0.0, 1.0, wide)


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


_INTERPRETED = TileShape(512, 1)


def shape_for(device: torch.device, fastest: TileShape) -> TileShape:
    """How to cut a launch: as was fastest on a GPU, into small tiles where the interpreter works through them."""
    return fastest if device.type == "cuda" else _INTERPRETED


def tile_arguments(group: SegmentGroup, shape: TileShape) -> dict[str, int]:
    """Block sizes of a group's tiles, as launch arguments."""
    block_dim = max(32, triton.next_power_of_2(group.dim))
    block_pairs = max(4, shape.elements // block_dim)
    # A tile of native rows has the most words; it must not be longer than a block of the checksum.
    limit = WORDS_PER_BLOCK * 8 // (block_dim * group.dtype.itemsize)
    return {"BLOCK_PAIRS": min(block_pairs, limit), "BLOCK_DIM": block_dim}


def kernel_pool(group: SegmentGroup, pool: torch.Tensor) -> torch.Tensor:
    """First key buffer in the element type that the kernels take: 64-bit words for native rows, int16 for bfloat16."""
    if group.precision is Precision.NATIVE:
        return pool.view(torch.int64)
    return pool.view(torch.int16) if group.dtype == torch.bfloat16 else pool


def pool_format(group: SegmentGroup) -> dict[str, bool]:
    """Element type of the pool, as launch arguments."""
    return {"BFLOAT16": group.dtype == torch.bfloat16, "FLOAT16": group.dtype == torch.float16}


def launch(
    kernel: Any,
    programs: int,
    device: torch.device,
    shape: TileShape,
    arguments: tuple[Any, ...],
    constants: Mapping[str, Any],
) -> None:
    """Launch ``programs`` programs on the current stream of ``device``, or interpret them on the CPU."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            kernel[(programs,)](
                *arguments, **constants, num_warps=shape.warps, maxnreg=shape.registers, enable_fp_fusion=False
            )
    else:
        kernel[(programs,)](*arguments, **constants)


def launch_over_tiles(
    kernel: Any,
    group: SegmentGroup,
    shape: TileShape,
    pool: torch.Tensor,
    payload: torch.Tensor,
    sums: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    constants: Mapping[str, Any],
) -> None:
    """Launch a kernel that packs or unpacks every segment of a group, tile by tile, on the device of ``sums``.

    The kernel takes pool, payload, sums, slots, table, pairs, tiles, slot stride and head stride, and ``constants``
    beside what group and shape say.
    """
    pairs = group.rows * group.heads
    blocks = tile_arguments(group, shape)
    tiles = triton.cdiv(pairs, blocks["BLOCK_PAIRS"])
    launch(
        kernel,
        tiles * group.segments,
        sums.device,
        shape,
        (
            kernel_pool(group, pool),
            payload,
            sums,
            slots,
            table,
            pairs,
            tiles,
            group.slot_stride,
            group.head_stride,
        ),
        {
            "PRECISION": int(group.precision),
            "HEADS": group.heads,
            "DIM": group.dim,
            "ITEMSIZE": group.dtype.itemsize,
            **constants,
            **pool_format(group),
            **blocks,
        },
    )


def has_capability(device: torch.device, major: int, minor: int) -> bool:
    """Whether kernels are compiled for an NVIDIA GPU of at least this compute capability."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (major, minor)
