"""Packing and unpacking on the GPU: a few launches a payload, in the stream's order, without waiting on the host.

Everything that the kernels need beside pool and payload goes up in one copy from pinned memory: the verdict's words,
the prologue, the pool slots of the rows, and a table of the segments' addresses. What they find (the checksum, or
whether the payload was intact) comes back the same way.

An unpack sums the payload up in a launch of its own, and the launches that write the pool look at the result first and
write nothing unless it is the announced one. So a payload is read twice, once from the cache where it fits.

Packing takes one launch for all precisions of all tiers whose segments are cut alike (`device_plan`), so that the last
tiles of one run beside the first of the next. Unpacking takes one for each: together they would need more registers
than each alone.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from spectrumkv_sglang.kernels.checksum import POSITION_STEP, WORDS_PER_BLOCK, combine
from spectrumkv_sglang.kernels.segment_group import (
    DIM_MULTIPLE,
    TABLE_COLUMNS,
    UNIT_BYTES,
    GroupLaunch,
)
from spectrumkv_sglang.payload.device_plan import LaunchPlan, LaunchPlanner
from spectrumkv_sglang.payload.exchange import VERDICT_WORDS, Exchange, Pending, Result
from spectrumkv_sglang.payload.layout import PayloadLayout
from spectrumkv_sglang.payload.prologue import PROLOGUE_BYTES, Prologue, encode_prologue

_PROLOGUE_WORDS = PROLOGUE_BYTES // 8
_SLOTS_AT = VERDICT_WORDS + _PROLOGUE_WORDS


class UnpackOutcome(NamedTuple):
    """What became of a payload.

    Attributes:
        checksum: checksum of the payload as it stood.
        checksum_fits: it is the announced one.
        prologue_fits: the payload begins with the announced prologue.
    """

    checksum: int
    checksum_fits: bool
    prologue_fits: bool

    @property
    def written(self) -> bool:
        """Whether the pool was written."""
        return self.checksum_fits and self.prologue_fits


class DeviceCodec:
    """Packs from and unpacks into one KV pool. Threads may share it; work is queued on their current streams.

    Args:
        k: K buffer [pool slots, kv_heads, head_dim] of each layer, checked against the geometry that will be used.
        v: V buffer of each layer.
    """

    def __init__(self, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]) -> None:
        self._buffers = (tuple(k), tuple(v))
        self._device = k[0].device
        # One for each result that somebody still holds; it comes back when the result is dropped. No lock: a result may
        # be dropped while this object's is held.
        self._free: deque[Exchange] = deque()
        self._planner = LaunchPlanner(*self._buffers)
        self._lock = threading.Lock()

    @staticmethod
    def why_not(k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]) -> str | None:
        """Why the kernels cannot take these buffers, or None if they can."""
        for buffer in (*k, *v):
            if buffer.shape[2] % DIM_MULTIPLE:
                return f"head dimensions divisible by {DIM_MULTIPLE}, got {buffer.shape[2]}"
            strides = [stride * buffer.element_size() for stride in buffer.stride()[:2]]
            if buffer.data_ptr() % UNIT_BYTES or any(stride % UNIT_BYTES for stride in strides):
                return f"pool addresses and strides divisible by {UNIT_BYTES} bytes, got strides of {strides}"
        return None

    def pack(
        self,
        rows: npt.NDArray[np.int64],
        layout: PayloadLayout,
        out: torch.Tensor,
        prologue: Prologue | None = None,
    ) -> Pending[int]:
        """Queue the packing of ``rows`` on the current stream.

        Args:
            rows: pool slot of each row, grouped by tier, all valid.
            layout: layout of these rows.
            out: uint8 memory of at least ``layout.total_bytes`` at a 16-byte boundary.
            prologue: written to the first 256 bytes; None leaves them as they are and counts them so.

        Returns:
            The payload's checksum, once everything is written.
        """
        from spectrumkv_sglang.kernels.triton_checksum import close_payload, sum_tails
        from spectrumkv_sglang.kernels.triton_pack import pack_groups

        payload = out[: layout.total_bytes].view(torch.int64)
        plan = self._planner.plan(layout)
        with self._lock:
            exchange = self._upload(rows, plan, payload.numel(), 0, prologue)
            try:
                for launch in _launches(plan, exchange.words, rows.size):
                    pack_groups(launch, self._buffers[0][0], payload, exchange.block_sums)
                table_at = _table_at(rows.size)
                table = exchange.words[table_at : table_at + plan.table.size]
                sum_tails(table, plan.longest_tail, payload, exchange.block_sums)
                announced = payload if prologue is None else exchange.words[VERDICT_WORDS:_SLOTS_AT]
                close_payload(payload, announced, exchange.block_sums, exchange.words)
            except BaseException:
                exchange.block_sums.zero_()  # and never used again: what was queued may still read it
                raise
            exchange.fetch()
        return self._pending(exchange, lambda down: combine(int(down[0]), payload.numel()))

    def unpack(
        self,
        payload: torch.Tensor,
        rows: npt.NDArray[np.int64],
        layout: PayloadLayout,
        checksum: int | None = None,
        prologue: Prologue | None = None,
    ) -> Pending[UnpackOutcome]:
        """Queue the unpacking of a payload on the current stream; the pool is written only if the payload is intact.

        Args:
            payload: uint8 [layout.total_bytes] at a 16-byte boundary.
            rows: pool slot of each row, grouped by tier, all valid and distinct.
            layout: layout of these rows.
            checksum: announced checksum; None writes the pool without a look at checksum and prologue.
            prologue: announced prologue; None for any.
        """
        from spectrumkv_sglang.kernels.triton_checksum import sum_payload
        from spectrumkv_sglang.kernels.triton_unpack import unpack_groups

        words = payload.view(torch.int64)
        plan = self._planner.plan(layout)
        announced_sum = 0 if checksum is None else checksum - words.numel() * POSITION_STEP
        with self._lock:
            exchange = self._upload(rows, plan, words.numel(), announced_sum, prologue)
            if checksum is not None:
                announced = words if prologue is None else exchange.words[VERDICT_WORDS:_SLOTS_AT]
                sum_payload(words, announced, exchange.words)
            for launch in _launches(plan, exchange.words, rows.size):
                for one in launch.apart():
                    unpack_groups(one, self._buffers[0][0], words, exchange.words)
            exchange.fetch()

        def outcome(down: npt.NDArray[np.int64]) -> UnpackOutcome:
            return UnpackOutcome(combine(int(down[0]), words.numel()), bool(down[0] == down[1]), not down[2])

        return self._pending(exchange, outcome)

    def launches(self, rows: npt.NDArray[np.int64], layout: PayloadLayout) -> list[GroupLaunch]:
        """The launches of a payload, on memory of their own: what a benchmark times."""
        plan = self._planner.plan(layout)
        words = np.concatenate((np.zeros(_table_at(rows.size)), plan.table.reshape(-1))).astype(np.int64)
        words[_SLOTS_AT : _SLOTS_AT + rows.size] = rows
        return _launches(plan, torch.from_numpy(words).to(self._device), rows.size)

    def _upload(
        self, rows: npt.NDArray[np.int64], plan: LaunchPlan, words: int, announced_sum: int, prologue: Prologue | None
    ) -> Exchange:
        try:
            exchange = self._free.popleft()
        except IndexError:
            exchange = Exchange(self._device)
        table_at = _table_at(rows.size)
        size = table_at + plan.table.size
        up = exchange.begin(size, -(-words // WORDS_PER_BLOCK))
        up[:VERDICT_WORDS] = 0
        up[1:2].view(np.uint64)[0] = announced_sum % 2**64
        if prologue is not None:
            up[VERDICT_WORDS:_SLOTS_AT] = np.frombuffer(encode_prologue(prologue), dtype=np.int64)
        up[_SLOTS_AT : _SLOTS_AT + rows.size] = rows
        up[table_at:] = plan.table.reshape(-1)
        exchange.send(size)
        return exchange

    def _pending(self, exchange: Exchange, read: Callable[[npt.NDArray[np.int64]], Result]) -> Pending[Result]:
        """The result that ``read`` makes of the verdict's words; ``exchange`` is free again when it is dropped."""

        def finish() -> Result:
            exchange.wait()
            return read(exchange.down.numpy())

        pending = Pending(finish)
        weakref.finalize(pending, self._free.append, exchange).atexit = False
        return pending


def _table_at(rows: int) -> int:
    """Where the segment table lies: at an even word, because kernels are compiled for the alignment of an address."""
    return _SLOTS_AT + rows + rows % 2


def _launches(plan: LaunchPlan, words: torch.Tensor, rows: int) -> list[GroupLaunch]:
    """The launches of a plan on what was uploaded."""
    launches = []
    slots = words[_SLOTS_AT : _SLOTS_AT + rows]
    at = _table_at(rows)
    for groups in plan.launches:
        size = sum(group.segments for group in groups) * TABLE_COLUMNS
        launches.append(GroupLaunch(groups, words[at : at + size].view(-1, TABLE_COLUMNS), slots))
        at += size
    return launches
