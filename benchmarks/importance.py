"""What token importance and the choice of tiers cost beside the prefill that they belong to: table, JSON and plot.

    python benchmarks/importance.py --out DIR [--quick]

Llama-3.1-8B's shape in bfloat16 on a pool of shuffled slots: one prompt of 8,192 tokens, one of 32,768 in four chunks,
a batch of 32 prompts of 256, and one of 256 alone. *gpu* is the time on the GPU of everything that the observer queues
in a forward, *host* what queueing takes the scheduler's thread, *torch* the wall time of the reference observer.
*selection* is the worker thread's time from scores on the GPU to sub-chunks on the host.

The prefill is a stand-in, measured here: the projections of one decoder layer and its causal attention (PyTorch's, over
all earlier keys) times the number of layers. It leaves out norms, rotations and launch gaps, so a real prefill takes
longer and the shares are upper bounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernels import environment
from spectrumkv_sglang.importance.attention_hook import AttentionObserver
from spectrumkv_sglang.importance.scorers import WindowScorer
from spectrumkv_sglang.importance.scores import SlotScores
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.profiles.chunk_plan import plan_chunk, protected_rows
from spectrumkv_sglang.profiles.profile import load_profile

LAYERS, Q_HEADS, KV_HEADS, DIM, HIDDEN, INNER = 32, 32, 8, 128, 4096, 14336
POOL_SLOTS = 40_000
SLOT_BYTES = 16 * 1024 * 1024
MESSAGE_BYTES = 2048
BUDGETS = (0.28, 0.35, 0.5)
TARGET = 0.02
RUNS = 9

Forwards = tuple[tuple[tuple[int, int], ...], ...]
"""Forwards of a case; each is a batch of (tokens before, new tokens), one entry a request."""
CASES: dict[str, Forwards] = {
    "8K": (((0, 8192),),),
    "32K in 4 chunks": tuple(((8192 * i, 8192),) for i in range(4)),
    "32 x 256": (tuple((0, 256) for _ in range(32)),),
    "256": (((0, 256),),),
}


class ExtendMode:
    """What the observer asks of SGLang's ForwardMode."""

    def is_extend_without_speculative(self) -> bool:
        """Prefill, always."""
        return True


@dataclass(eq=False)
class Batch:
    """What the observer reads of SGLang's ForwardBatch."""

    req_pool_indices: torch.Tensor
    extend_prefix_lens_cpu: list[int]
    extend_seq_lens_cpu: list[int]
    out_cache_loc: torch.Tensor
    rids: list[str] | None = None
    forward_mode: ExtendMode = field(default_factory=ExtendMode)


@dataclass(frozen=True)
class Layer:
    """What the observer reads of SGLang's RadixAttention."""

    layer_id: int
    tp_q_head_num: int = Q_HEADS
    head_dim: int = DIM
    scaling: float = DIM**-0.5
    sliding_window_size: int = -1
    logit_cap: float = 0.0


class Server:
    """A pool, and observers on it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        shape = (POOL_SLOTS, KV_HEADS, DIM)
        self.keys = [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(LAYERS)]
        self.scores = SlotScores(POOL_SLOTS, device)
        slots = torch.randperm(POOL_SLOTS - 1, device=device).to(torch.int32) + 1
        self.req_to_token = torch.zeros((64, 32_768), dtype=torch.int32, device=device)
        self.req_to_token[0] = slots[:32_768]
        for request in range(1, 64):
            self.req_to_token[request, :512] = slots[512 * request : 512 * (request + 1)]
        # Like a layer's own: a view into the output of the fused projection.
        qkv = torch.randn((8192, (Q_HEADS + 2 * KV_HEADS) * DIM), dtype=torch.bfloat16, device=device)
        self.q = qkv[:, : Q_HEADS * DIM]
        self.observers = {backend: self._observer(backend) for backend in ("triton", "torch")}
        self.layers = [Layer(index) for index in range(LAYERS)]

    def _observer(self, backend: Any) -> AttentionObserver:
        def failed() -> None:
            raise SystemExit("an observation failed; the log says why")

        return AttentionObserver(
            k_buffers=self.keys,
            req_to_token=self.req_to_token,
            scores=self.scores,
            scorer=WindowScorer(),
            on_error=failed,
            backend=backend,
        )

    def batches(self, forwards: Forwards) -> list[Batch]:
        """Batches of a case."""
        made = []
        for requests in forwards:
            rows = torch.arange(len(requests), device=self.device)
            slots = [self.req_to_token[i, p : p + n].long() for i, (p, n) in enumerate(requests)]
            made.append(Batch(rows, [p for p, _ in requests], [n for _, n in requests], torch.cat(slots)))
        return made

    def observe(self, backend: str, batches: list[Batch]) -> None:
        """Everything that the observer does in these forwards, which are new ones to it."""
        observer = self.observers[backend]
        for batch in map(replace, batches):
            q = self.q[: sum(batch.extend_seq_lens_cpu)]
            for layer in self.layers:
                observer.observe(q, layer, batch)


def queued_gpu_seconds(queue: Callable[[], object], runs: int = RUNS) -> tuple[float, float]:
    """Median GPU time of what ``queue`` queues, behind a pause that hides the host's part; and the host's time."""
    gpu, host = [], []
    for run in range(runs + 2):
        torch.cuda.synchronize()
        torch.cuda._sleep(40_000_000)  # about 20 ms
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        began = time.perf_counter()
        queue()
        took = time.perf_counter() - began
        end.record()
        end.synchronize()
        if run >= 2:
            gpu.append(start.elapsed_time(end) / 1e3)
            host.append(took)
    return statistics.median(gpu), statistics.median(host)


def wall_seconds(work: Callable[[], object], runs: int = RUNS) -> float:
    """Median wall time until the GPU is done."""
    taken = []
    for run in range(runs + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if run:
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


class StandInPrefill:
    """The matrix products and the attention of one decoder layer."""

    def __init__(self, device: torch.device) -> None:
        def weight(rows: int, columns: int) -> torch.Tensor:
            return torch.randn((rows, columns), dtype=torch.bfloat16, device=device) * rows**-0.5

        self.qkv = weight(HIDDEN, (Q_HEADS + 2 * KV_HEADS) * DIM)
        self.o = weight(Q_HEADS * DIM, HIDDEN)
        self.up, self.down = weight(HIDDEN, 2 * INNER), weight(INNER, HIDDEN)
        self.device = device

    def _layer(self, x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, bias: Any) -> None:
        torch.mm(x, self.qkv)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=bias)
        torch.mm(attended.transpose(1, 2).reshape(len(x), -1)[: len(x)], self.o)
        gate, up = torch.mm(x, self.up).chunk(2, dim=1)
        torch.mm(torch.nn.functional.silu(gate) * up, self.down)

    def seconds(self, forwards: Forwards) -> float:
        """Time of all layers of the case's forwards."""
        from torch.nn.attention.bias import causal_lower_right

        total = 0.0
        for requests in forwards:
            prefix, new = requests[0]
            x = torch.randn((new * len(requests), HIDDEN), dtype=torch.bfloat16, device=self.device)
            shape = (len(requests), Q_HEADS, new, DIM)
            q = torch.randn(shape, dtype=torch.bfloat16, device=self.device)
            k = torch.randn((*shape[:2], prefix + new, DIM), dtype=torch.bfloat16, device=self.device)
            bias = causal_lower_right(new, prefix + new)
            total += LAYERS * queued_gpu_seconds(lambda x=x, q=q, k=k, bias=bias: self._layer(x, q, k, bias))[0]
        return total


def selection(server: Server, rows: int, budget: float) -> dict[str, float]:
    """Worker thread's seconds from published scores to sub-chunks, for a chunk of ``rows`` tokens of the 8K prompt."""
    geometry = KVGeometry(LAYERS, KV_HEADS, DIM, DIM, 1, "bfloat16")
    profile = load_profile("spectrum")
    table, tiers = profile.table(geometry), profile.usable_tiers()
    slots = server.req_to_token[0, :rows].cpu().numpy().astype(np.int64)
    sinks, recent = protected_rows(0, rows, rows, 4, 64)
    stream = torch.cuda.Stream()
    fetch, plan, achieved, subchunks = [], [], 0.0, 0
    for run in range(RUNS + 2):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            began = time.perf_counter()
            importance = server.scores.fetch(slots)
            fetched = time.perf_counter()
            made = plan_chunk(
                importance, geometry, table, budget, SLOT_BYTES, sinks, tiers, MESSAGE_BYTES, preferred=recent
            )
            planned = time.perf_counter()
        if run >= 2:
            fetch.append(fetched - began)
            plan.append(planned - fetched)
        achieved, subchunks = made.achieved, len(made.subchunks)
    return {
        "rows": rows,
        "budget": budget,
        "fetch_seconds": statistics.median(fetch),
        "plan_seconds": statistics.median(plan),
        "achieved": achieved,
        "subchunks": subchunks,
    }


def measure(server: Server, prefill: StandInPrefill, name: str, forwards: Forwards) -> dict[str, Any]:
    """One case."""
    batches = server.batches(forwards)
    gpu, host = queued_gpu_seconds(lambda: server.observe("triton", batches))
    prefill_seconds = prefill.seconds(forwards)
    return {
        "case": name,
        "forwards": len(forwards),
        "requests": len(forwards[0]),
        "prefill_seconds": prefill_seconds,
        "gpu_seconds": gpu,
        "gpu_seconds_per_layer": gpu / LAYERS / len(forwards),
        "host_seconds": host,
        "torch_wall_seconds": wall_seconds(lambda: server.observe("torch", batches), runs=2),
        "share": gpu / prefill_seconds,
    }


def show(cases: list[dict[str, Any]], selections: list[dict[str, float]]) -> None:
    """Print the tables."""
    print(f"{'case':18}{'prefill ms':>11}{'gpu ms':>8}{'us/layer':>9}{'host ms':>9}{'torch ms':>10}{'share':>8}")
    for case in cases:
        print(
            f"{case['case']:18}{case['prefill_seconds'] * 1e3:11.1f}{case['gpu_seconds'] * 1e3:8.2f}"
            f"{case['gpu_seconds_per_layer'] * 1e6:9.1f}{case['host_seconds'] * 1e3:9.2f}"
            f"{case['torch_wall_seconds'] * 1e3:10.1f}{case['share']:8.2%}"
        )
    print(f"\n{'selection rows':>15}{'budget':>8}{'fetch ms':>10}{'plan ms':>9}{'achieved':>10}{'sub-chunks':>12}")
    for row in selections:
        print(
            f"{row['rows']:15}{row['budget']:8.2f}{row['fetch_seconds'] * 1e3:10.3f}{row['plan_seconds'] * 1e3:9.3f}"
            f"{row['achieved']:10.4f}{row['subchunks']:12}"
        )


def plot(cases: list[dict[str, Any]], path: Path) -> None:
    """Shares of prefill, kernels and torch; nothing without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4))
    for shift, (key, label) in enumerate((("gpu_seconds", "kernels"), ("torch_wall_seconds", "torch"))):
        at = [i + 0.36 * shift - 0.18 for i in range(len(cases))]
        axis.bar(at, [case[key] / case["prefill_seconds"] for case in cases], 0.34, label=label)
    axis.axhline(TARGET, color="black", linewidth=0.8, linestyle="--")
    axis.set_yscale("log")
    axis.set_xticks(range(len(cases)), [case["case"] for case in cases])
    axis.set_ylabel("importance / prefill time")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure everything and write ``importance.json`` and ``importance.png``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"), help="folder for JSON and plot")
    parser.add_argument("--quick", action="store_true", help="8K only")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA GPU is needed")
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    server, prefill = Server(device), StandInPrefill(device)
    chosen = list(CASES.items())[: 1 if arguments.quick else None]
    cases = [measure(server, prefill, name, forwards) for name, forwards in chosen]
    selections = [selection(server, rows, budget) for rows in (8192, 32_768) for budget in BUDGETS]
    show(cases, selections)
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = {"machine": environment(), "target": TARGET, "cases": cases, "selection": selections}
    (arguments.out / "importance.json").write_text(json.dumps(report, indent=1) + "\n")
    plot(cases, arguments.out / "importance.png")


if __name__ == "__main__":
    main()
