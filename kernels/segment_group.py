"""What a launch of the pack and unpack kernels works on, free of Triton so that it can be planned without it."""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.transforms.base import Transform

DIM_MULTIPLE = 16
"""Head dimensions that the kernels take are multiples of this, so that INT4 codes of a head fill whole words."""
UNIT_BYTES = 16
"""Pool addresses and strides that the kernels take are multiples of this many bytes: a thread moves 16 at a time."""
TABLE_COLUMNS = 4
"""Columns of a segment table, int64, all in units of 16 bytes so that compiled code knows the alignment: address of the
segment's first head in slot 0 of its pool buffer, counted from the first key buffer; then, counted from the payload's
start, the first code, the first parameter, and the end of the padding that follows."""
GROUPS_PER_LAUNCH = 4
"""Groups that one launch takes at most."""

PLANE_DIMS = (64, 128, 256)
"""Head dimensions that kernels of `KernelFamily.PLANES` and `LANES` and for codes in two planes take: every plane of a
head fills whole words, and a head is one block of the Hadamard transform."""

TRANSFORMS_WITH_KERNELS = frozenset((Transform.IDENTITY, Transform.HADAMARD))
"""Transforms that there are kernels for; payloads with others go the way of torch."""
_BY_HEADS = frozenset((Precision.NATIVE, Precision.INT8, Precision.FP8_E4M3, Precision.INT4))
_BY_CHANNEL_OF_FULL_RANGE = frozenset(p for p in Precision if p.by_channel and p.bits > 2)
_OF_ONE_PLANE = frozenset((Precision.INT4_CHANNEL, Precision.INT8_CHANNEL))
"""Codes by channel that fill whole words of any head that kernels take."""


class KernelFamily(enum.IntEnum):
    """Kernels that encode and decode alike; groups of different families never share a launch."""

    HEADS = 0
    """Whole bytes or nibbles with parameters by row, several precisions a launch: `triton_pack`, `triton_unpack`."""
    CHANNELS = 1
    """Parameters by channel of the full range of a block: `triton_pack_channels`, `triton_unpack_channels`."""
    LANES = 3
    """Rows behind the Hadamard transform, and codes by row that are neither nibbles nor bytes, several precisions a
    launch: `triton_pack_lanes`, `triton_unpack_lanes`."""
    PLANES = 2
    """Everything else: `triton_pack_planes`, `triton_unpack_planes`."""


def family_of(precision: Precision, transform: Transform) -> KernelFamily:
    """Kernels that encode cells of a precision and a transform, which native cells do not go through."""
    if transform is Transform.IDENTITY or precision is Precision.NATIVE:
        if precision in _BY_HEADS:
            return KernelFamily.HEADS
        if precision in _BY_CHANNEL_OF_FULL_RANGE:
            return KernelFamily.CHANNELS
    if not precision.by_channel:
        return KernelFamily.LANES
    return KernelFamily.PLANES


def unfit_cell(precision: Precision, transform: Transform, dim: int) -> str | None:
    """What there are no kernels for, of cells of a precision and a transform with ``dim`` elements a head, or None."""
    if precision is Precision.NATIVE:
        return None
    if transform not in TRANSFORMS_WITH_KERNELS:
        return transform.name
    family = family_of(precision, transform)
    two_planes = family is KernelFamily.CHANNELS and precision not in _OF_ONE_PLANE
    if (family in (KernelFamily.PLANES, KernelFamily.LANES) or two_planes) and dim not in PLANE_DIMS:
        behind = "" if transform is Transform.IDENTITY else f" behind {transform.name}"
        return f"{precision.name}{behind} with a head dimension of {dim} (expected {', '.join(map(str, PLANE_DIMS))})"
    return None


class SegmentGroup(NamedTuple):
    """Segments that one launch works on: they differ only in where they lie.

    Groups that agree in all but precision, rows and segments may share a launch, so that one's last tiles run beside
    the next one's first. A group without segments keeps its place, so that payloads of one precision table run the same
    compiled kernels whatever tiers they have rows in.

    Attributes:
        precision: how their rows travel.
        dtype: element type of the pool.
        heads: heads of each segment.
        dim: elements of a head, a multiple of 16.
        slot_stride: units of 16 bytes from one pool slot to the next.
        head_stride: units of 16 bytes from one head to the next.
        first_row: where the rows of the group's tier begin among all rows.
        rows: rows of each segment.
        segments: number of segments, one line of the segment table each.
        transform: what their rows go through before they are quantised; IDENTITY if they travel natively.
    """

    precision: Precision
    dtype: torch.dtype
    heads: int
    dim: int
    slot_stride: int
    head_stride: int
    first_row: int = 0
    rows: int = 0
    segments: int = 0
    transform: Transform = Transform.IDENTITY

    @property
    def family(self) -> KernelFamily:
        """Kernels that it is encoded and decoded by."""
        return family_of(self.precision, self.transform)


class GroupLaunch(NamedTuple):
    """Groups that are packed or unpacked by one launch.

    Attributes:
        groups: at most `GROUPS_PER_LAUNCH`.
        table: int64 [segments of all groups, 4] on the device, see `TABLE_COLUMNS`, group by group.
        slots: int64 [rows] on the device, valid pool slots of all rows, grouped by tier.
    """

    groups: tuple[SegmentGroup, ...]
    table: torch.Tensor
    slots: torch.Tensor

    def apart(self) -> list[GroupLaunch]:
        """A launch for each group that has segments."""
        launches = []
        line = 0
        for group in self.groups:
            if group.segments:
                launches.append(GroupLaunch((group,), self.table[line:][: group.segments], self.slots))
            line += group.segments
        return launches


class TileShape(NamedTuple):
    """How a launch is cut.

    Attributes:
        elements: elements of a tile.
        warps: warps that work on it.
        registers: most registers of a thread; None for as many as it takes.
    """

    elements: int
    warps: int
    registers: int | None = None
