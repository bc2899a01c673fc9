"""Which launches pack or unpack a payload on the GPU, and the table of its segments that they read.

Segments that differ only in where they lie form a group; groups that are cut alike share a launch. A precision table
settles the groups, a layout how many rows and segments each has: both are kept, because sub-chunks come again and again
in the same few sizes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.segment_group import GROUPS_PER_LAUNCH, TABLE_COLUMNS, UNIT_BYTES, SegmentGroup
from spectrumkv_sglang.kernels.transforms import Transform
from spectrumkv_sglang.payload.layout import PayloadLayout
from spectrumkv_sglang.payload.precision_table import PrecisionTable

_PLANS = 64


class LaunchPlan(NamedTuple):
    """Launches of a layout.

    Attributes:
        launches: groups of each.
        table: int64 [segments, 4], see `TABLE_COLUMNS`: lines of all groups, in that order.
        longest_tail: 64-bit words of the longest parameters with the padding after them.
    """

    launches: tuple[tuple[SegmentGroup, ...], ...]
    table: npt.NDArray[np.int64]
    longest_tail: int


class _Skeleton(NamedTuple):
    """Tier and group of every kind of segment that a precision table makes, and where segments belong.

    Places are keyed by tier, layer, K or V, and first head; each is the index of a kind and the address of the
    segment's first head in slot 0, in units of 16 bytes from the first key buffer.
    """

    kinds: tuple[tuple[int, SegmentGroup], ...]
    places: dict[tuple[int, int, int, int], tuple[int, int]]


class LaunchPlanner:
    """Plans the launches of one KV pool's payloads and keeps the last plans. Threads may share it.

    Args:
        k: K buffer [pool slots, kv_heads, head_dim] of each layer.
        v: V buffer of each layer.
    """

    def __init__(self, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]) -> None:
        self._buffers = (tuple(k), tuple(v))
        self._plans: OrderedDict[tuple[PrecisionTable, tuple[int, ...], int, int], LaunchPlan] = OrderedDict()
        self._skeletons: dict[PrecisionTable, _Skeleton] = {}
        self._lock = threading.Lock()

    def plan(self, layout: PayloadLayout) -> LaunchPlan:
        """The plan of a layout, new or kept."""
        # The table's hash is cached; two geometries of one table differ at most in their head dimensions here.
        key = (layout.table, layout.rows_per_tier, layout.geometry.head_dim, layout.geometry.v_head_dim)
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:
                self._plans.move_to_end(key)
                return plan
        plan = self._make(layout)
        with self._lock:
            self._plans[key] = plan
            while len(self._plans) > _PLANS:
                self._plans.popitem(last=False)
        return plan

    def _make(self, layout: PayloadLayout) -> LaunchPlan:
        skeleton = self._skeleton(layout)
        lines: list[list[tuple[int, ...]]] = [[] for _ in skeleton.kinds]
        ends = [segment.codes_offset for segment in layout.segments[1:]] + [layout.total_bytes] * bool(layout.segments)
        for segment, end in zip(layout.segments, ends, strict=True):
            kind, start = skeleton.places[segment.tier, segment.layer, segment.kv, segment.head_lo]
            codes, params = segment.codes_offset // UNIT_BYTES, segment.params_offset // UNIT_BYTES
            lines[kind].append((start, codes, params, end // UNIT_BYTES))
        first_rows = np.cumsum((0, *layout.rows_per_tier)).tolist()
        groups = [
            group._replace(first_row=first_rows[tier], rows=layout.rows_per_tier[tier], segments=len(table))
            for (tier, group), table in zip(skeleton.kinds, lines, strict=True)
        ]
        launches: list[list[SegmentGroup]] = []
        for group in groups:
            last = launches[-1] if launches else []
            if last and len(last) < GROUPS_PER_LAUNCH and _alike(last[0]) == _alike(group):
                last.append(group)
            else:
                launches.append([group])
        table_of_all = np.array([line for table in lines for line in table], dtype=np.int64)
        table_of_all = table_of_all.reshape(-1, TABLE_COLUMNS)
        tails = (table_of_all[:, 3] - table_of_all[:, 2]) * (UNIT_BYTES // 8)
        return LaunchPlan(tuple(map(tuple, launches)), table_of_all, int(tails.max(initial=0)))

    def _skeleton(self, layout: PayloadLayout) -> _Skeleton:
        """What all layouts of a precision table have in common; kinds that may share a launch come in a row."""
        table = layout.table
        skeleton = self._skeletons.get(table)
        if skeleton is not None:
            return skeleton
        base = self._buffers[0][0].data_ptr()
        found: dict[tuple[int, int, int, int], tuple[tuple[int, SegmentGroup], int]] = {}
        for tier in range(table.tiers):
            for layer in range(table.layers):
                for kv in (0, 1):
                    buffer = self._buffers[kv][layer]
                    transform = table.transform(layer, kv)
                    for lo, hi, precision in table.head_runs(tier, layer, kv):
                        group = _group_of(buffer, precision, transform, hi - lo)
                        start = (buffer.data_ptr() - base) // UNIT_BYTES + lo * group.head_stride
                        found[tier, layer, kv, lo] = (tier, group), start
        unique = dict.fromkeys(kind for kind, _ in found.values())
        kinds = sorted(unique, key=lambda kind: (_alike(kind[1]), kind[0]))
        index = {kind: i for i, kind in enumerate(kinds)}
        skeleton = _Skeleton(tuple(kinds), {place: (index[kind], start) for place, (kind, start) in found.items()})
        with self._lock:
            if len(self._skeletons) >= _PLANS:
                self._skeletons.clear()
            self._skeletons[table] = skeleton
        return skeleton


def _group_of(buffer: torch.Tensor, precision: Precision, transform: Transform, heads: int) -> SegmentGroup:
    slot_stride, head_stride = (stride * buffer.element_size() // UNIT_BYTES for stride in buffer.stride()[:2])
    undergone = Transform.IDENTITY if precision is Precision.NATIVE else transform
    return SegmentGroup(precision, buffer.dtype, heads, buffer.shape[2], slot_stride, head_stride, transform=undergone)


def _alike(group: SegmentGroup) -> tuple[int, ...]:
    """What groups of one launch agree in, beside the element type."""
    return int(group.family), group.heads, group.dim, group.slot_stride, group.head_stride
