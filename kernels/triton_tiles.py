"""Cutting the work of groups of segments into tiles, and launching kernels over them.

A tile is ``BLOCK_PAIRS`` (row, head) pairs of one segment by the elements of a head; payloads are read and written as
64-bit words, which the checksum is defined on.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton

from spectrumkv_sglang.kernels.checksum import WORDS_PER_BLOCK
from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.quantisers.code_planes import plane_widths
from spectrumkv_sglang.kernels.segment_group import GROUPS_PER_LAUNCH, SegmentGroup, TileShape
from spectrumkv_sglang.kernels.transforms.base import Transform
from spectrumkv_sglang.kernels.triton_runs import ELEMENTS_PER_LANE

GROUP_SCALARS = tuple(
    f"{what}_{group}" for what in ("pairs", "segments", "first_row") for group in range(GROUPS_PER_LAUNCH)
)
"""Arguments of a kernel that say how large its groups are; no reason to compile it anew."""

INTERPRETED = TileShape(1024, 1)
LANES_INTERPRETED = TileShape(4096, 1)
"""Larger: an operation on each of 32 registers costs the interpreter as much as one on all of them."""


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


class _Cut(NamedTuple):
    """A launch over groups, apart from the memory that it works on."""

    programs: int
    shape: TileShape
    scalars: tuple[int, ...]
    constants: dict[str, Any]


def launch_groups(
    kernel: Any,
    groups: tuple[SegmentGroup, ...],
    shapes: Mapping[Precision, TileShape],
    pointers: tuple[torch.Tensor, ...],
    device: torch.device,
    constants: Mapping[str, Any],
    interpreted: TileShape = INTERPRETED,
) -> None:
    """Launch a kernel that packs or unpacks every segment of some groups, tile by tile.

    The kernel takes ``pointers``, the `GROUP_SCALARS`, slot stride and head stride, and ``constants`` beside what
    groups and shapes say. Triton's interpreter gets tiles of the shape ``interpreted``.
    """
    compiled = device.type == "cuda"
    cut = _cut(groups, tuple(shapes[group.precision] if compiled else interpreted for group in groups))
    if cut.programs:
        launch(kernel, cut.programs, device, cut.shape, (*pointers, *cut.scalars), {**cut.constants, **constants})


def group_constants(group: SegmentGroup) -> dict[str, Any]:
    """What kernels are compiled for: heads and elements of a group, and the pool's type. A block of elements is a power
    of two, as Triton's are."""
    return {
        "HEADS": group.heads,
        "DIM": group.dim,
        "BLOCK_DIM": max(32, triton.next_power_of_2(group.dim)),
        "ITEMSIZE": group.dtype.itemsize,
        "BFLOAT16": group.dtype == torch.bfloat16,
        "FLOAT16": group.dtype == torch.float16,
    }


def code_constants(group: SegmentGroup) -> dict[str, int]:
    """Bits of both planes of a group's codes; HIGH is 0 if there is one."""
    low, high = (*plane_widths(group.precision.bits), 0)[:2]
    return {"LOW": low, "HIGH": high}


def plane_constants(group: SegmentGroup) -> dict[str, Any]:
    """What kernels for codes in planes are compiled for: how the group travels, and its `group_constants` without a
    block of elements, which a head is here."""
    constants = group_constants(group)
    del constants["BLOCK_DIM"]
    return constants | code_constants(group) | {"HADAMARD": group.transform is Transform.HADAMARD}


def lane_constants(groups: tuple[SegmentGroup, ...], device: torch.device, shape: TileShape) -> dict[str, Any]:
    """What kernels of `KernelFamily.LANES` are compiled for beside the rest: how groups travel, and the turns that a
    warp takes at a tile. Interpreted, turns are halves of the usual tile."""
    return {
        "BITS": tuple(group.precision.bits for group in groups),
        "HADAMARD": tuple(group.transform is Transform.HADAMARD for group in groups),
        "TURNS": shape.elements // (32 * ELEMENTS_PER_LANE) if device.type == "cuda" else 2,
    }


@lru_cache(maxsize=256)
def _cut(groups: tuple[SegmentGroup, ...], shapes: tuple[TileShape, ...]) -> _Cut:
    head = groups[0]
    of_groups = group_constants(head)
    block_dim = of_groups["BLOCK_DIM"]
    # A tile of native rows has the most words; it must not be longer than a block of the checksum.
    limit = WORDS_PER_BLOCK * 8 // (block_dim * head.dtype.itemsize)
    block_pairs = tuple(min(max(4, shape.elements // block_dim), limit) for shape in shapes)
    pairs = [group.rows * group.heads for group in groups]
    tiles = [triton.cdiv(count, block) for count, block in zip(pairs, block_pairs, strict=True)]
    absent = [0] * (GROUPS_PER_LAUNCH - len(groups))
    scalars = (
        pairs + absent,
        [group.segments for group in groups] + absent,
        [group.first_row for group in groups] + absent,
        [head.slot_stride, head.head_stride],
    )
    registers = [shape.registers for shape in shapes if shape.registers is not None]
    shape = TileShape(
        max(shape.elements for shape in shapes),
        min(shape.warps for shape in shapes),
        max(registers, default=None),
    )
    constants = {
        "PRECISIONS": tuple(int(group.precision) for group in groups),
        "BLOCK_PAIRS": block_pairs,
        **of_groups,
        "WARPS": shape.warps,
    }
    programs = sum(count * group.segments for count, group in zip(tiles, groups, strict=True))
    return _Cut(programs, shape, tuple(number for numbers in scalars for number in numbers), constants)


@lru_cache(maxsize=64)
def has_capability(device: torch.device, major: int, minor: int) -> bool:
    """Whether kernels are compiled for an NVIDIA GPU of at least this compute capability."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (major, minor)
