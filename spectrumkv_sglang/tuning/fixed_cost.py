"""What a pipelined transfer costs beyond the model of its stages, fitted to measured transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from spectrumkv_sglang.tuning.link_model import Codec, FixedCost, LinkModelError, Transfer, pipelined_seconds


@dataclass(frozen=True)
class MeasuredTransfer:
    """One measured transfer.

    Attributes:
        transfer: what was moved.
        bandwidth: goodput of the link, bytes per second.
        codec: speeds; its b is the measured one.
        seconds: time that it took.
    """

    transfer: Transfer
    bandwidth: float
    codec: Codec
    seconds: float

    def predicted(self, fixed: FixedCost) -> float:
        """Seconds that the model says."""
        return pipelined_seconds(self.transfer, self.bandwidth, self.codec, fixed)


def fit_fixed_cost(points: Sequence[MeasuredTransfer]) -> FixedCost:
    """Costs of a chunk and of a payload, neither below 0, that leave the smallest squared relative errors.

    Raises:
        LinkModelError: no points.
    """
    if not points:
        raise LinkModelError("no measured transfer to fit to: expected at least one")
    weights = np.array([1.0 / point.seconds for point in points])
    counts = np.array([[point.transfer.chunks, point.transfer.payloads] for point in points], dtype=float)
    left = np.array([point.seconds - point.predicted(FixedCost()) for point in points])
    best, smallest = np.zeros(2), float(np.sum((left * weights) ** 2))
    for used in ([0], [1], [0, 1]):  # with two unknowns: the best of all choices of which one is zero
        solution, *_ = np.linalg.lstsq(counts[:, used] * weights[:, None], left * weights, rcond=None)
        cost = np.zeros(2)
        cost[used] = solution
        error = float(np.sum(((left - counts @ cost) * weights) ** 2))
        if bool(np.all(cost >= 0)) and error < smallest:
            best, smallest = cost, error
    return FixedCost(chunk_seconds=float(best[0]), payload_seconds=float(best[1]))


def without_host_time(codec: Codec) -> Codec:
    """The codec's kernels alone: what remains if planning and launching cost nothing."""
    return replace(codec, pack_host_seconds=0.0, unpack_host_seconds=0.0)
