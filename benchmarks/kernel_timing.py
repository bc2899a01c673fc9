"""Timing on one GPU, and the floor that a kernel is held against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

RUNS = 25
"""Timed runs of each measurement; the median is taken."""


def gpu_seconds(work: Callable[[], object], runs: int = RUNS) -> float:
    """Median GPU time of ``work`` by replays of a CUDA graph, so that launches cost the host nothing."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
        for _ in range(3):
            graph.replay()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
        for start, end in events:
            start.record(stream)
            graph.replay()
            end.record(stream)
        stream.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def wall_seconds(work: Callable[[], object], runs: int = RUNS) -> float:
    """Median wall time of ``work``, which waits for its result."""
    taken = []
    for run in range(runs + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if run >= 3:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def copy_bandwidth(device: torch.device, size: int = 2 << 30) -> float:
    """Bytes per second, read plus written, of a large copy within device memory, without a graph."""
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(RUNS + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return 2 * size / statistics.median(seconds[3:])
