"""The importance kernels against the torch reference, through the observer that serves.

`test_triton_importance.py` runs this file in a process of its own under the Triton interpreter; on a machine with a GPU
``pytest tests/kernels/triton_importance_against_reference.py`` runs the same cases compiled.

Tolerance: products of 16-bit numbers are exact in float32 on both sides, so what differs is the order of float32 sums
and the exponential: scores agree within ``RELATIVE`` of themselves, or ``ABSOLUTE`` (probabilities are at most 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrumkv_sglang.importance.attention_hook import AttentionObserver
from spectrumkv_sglang.importance.scorers import AttentionScorer, ExactScorer, WindowScorer
from spectrumkv_sglang.importance.scores import SlotScores

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RELATIVE, ABSOLUTE = 1e-3, 1e-6
POOL_SLOTS = 700


class ExtendMode:
    """What the observer asks of SGLang's ForwardMode."""

    def is_extend_without_speculative(self) -> bool:
        return True


@dataclass(eq=False)
class Batch:
    """What the observer reads of SGLang's ForwardBatch."""

    req_pool_indices: torch.Tensor
    extend_prefix_lens_cpu: list[int]
    extend_seq_lens_cpu: list[int]
    out_cache_loc: torch.Tensor
    rids: list[str] | None
    forward_mode: ExtendMode = field(default_factory=ExtendMode)


@dataclass(frozen=True)
class Layer:
    """What the observer reads of SGLang's RadixAttention."""

    layer_id: int
    tp_q_head_num: int
    head_dim: int
    scaling: float
    sliding_window_size: int
    logit_cap: float


@dataclass(frozen=True)
class Model:
    q_heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    dtype: torch.dtype = torch.bfloat16
    layers: tuple[tuple[int, float], ...] = ((-1, 0.0), (-1, 0.0))  # sliding window and logit cap of each layer
    seed: int = 0
    sharpness: float = 3.0

    def layer(self, index: int) -> Layer:
        window, cap = self.layers[index]
        return Layer(index, self.q_heads, self.dim, self.dim**-0.5, window, cap)


class Server:
    """A pool with requests on shuffled slots, under one observer a backend."""

    def __init__(self, model: Model, scorer: AttentionScorer, requests: int = 8, tokens: int = 400) -> None:
        self.model = model
        self.random = torch.Generator().manual_seed(model.seed)
        shape = (POOL_SLOTS, model.kv_heads, model.dim)
        self.keys = [torch.randn(shape, generator=self.random).to(DEVICE, model.dtype) for _ in model.layers]
        slots = [torch.randperm(POOL_SLOTS - 1, generator=self.random)[:tokens] + 1 for _ in range(requests)]
        self.req_to_token = torch.stack(slots).to(DEVICE, torch.int32)
        self.scores = {backend: SlotScores(POOL_SLOTS, DEVICE) for backend in ("torch", "triton")}
        self.errors: list[str] = []
        self.observers = {
            backend: AttentionObserver(
                k_buffers=self.keys,
                req_to_token=self.req_to_token,
                scores=scores,
                scorer=scorer,
                on_error=lambda backend=backend: self.errors.append(backend),
                backend=backend,
            )
            for backend, scores in self.scores.items()
        }

    def batch(self, rows: Sequence[int], prefixes: Sequence[int], extends: Sequence[int], padding: int = 0) -> Batch:
        new = [self.req_to_token[r, p : p + e] for r, p, e in zip(rows, prefixes, extends, strict=True)]
        return Batch(
            torch.tensor([*rows, *[0] * padding], dtype=torch.int64, device=DEVICE),
            [*prefixes, *[0] * padding],
            [*extends, *[0] * padding],
            torch.cat([*new, torch.zeros(padding, dtype=torch.int32, device=DEVICE)]).to(torch.int64),
            [f"request-{row}" for row in rows],
        )

    def queries(self, batch: Batch) -> list[torch.Tensor]:
        """Every layer's q, a view into a wider tensor as SGLang's split of qkv is."""
        tokens, width = len(batch.out_cache_loc), self.model.q_heads * self.model.dim
        made = []
        for _ in self.model.layers:
            qkv = torch.randn(tokens, width + 64, generator=self.random) * self.model.sharpness
            made.append(qkv.to(DEVICE, self.model.dtype)[:, :width])
        return made

    def forward(self, batch: Batch) -> None:
        for index, q in enumerate(self.queries(batch)):
            for observer in self.observers.values():
                observer.observe(q, self.model.layer(index), batch)

    def check(self) -> None:
        assert self.errors == []
        ours, reference = self.scores["triton"], self.scores["torch"]
        # Slot 0 takes what pads a batch; the kernels do not touch it.
        assert torch.equal(ours.could_attend[1:], reference.could_attend[1:])
        torch.testing.assert_close(ours.published[1:], reference.published[1:], rtol=RELATIVE, atol=ABSOLUTE)
        assert bool((ours.published > 0).any())
        in_fixed_point = [scores.received[1:].double() / 2**32 for scores in (ours, reference)]
        torch.testing.assert_close(*in_fixed_point, rtol=RELATIVE, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 256])
def test_head_dimensions_and_dtypes(dtype: torch.dtype, dim: int) -> None:
    server = Server(Model(dim=dim, dtype=dtype), WindowScorer(12, 12))
    server.forward(server.batch([3], [0], [90]))
    server.check()


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(1, 1), (4, 4), (7, 1), (10, 2)])
def test_groups_of_query_heads(q_heads: int, kv_heads: int) -> None:
    server = Server(Model(q_heads, kv_heads), WindowScorer(9, 9))
    server.forward(server.batch([1, 2], [0, 40], [77, 30]))
    server.check()


@pytest.mark.parametrize("layers", [((0, 0.0),), ((5, 0.0), (-1, 0.0), (100, 0.0)), ((-1, 4.0), (17, 0.0), (17, 9.0))])
def test_windows_and_caps_differ_between_layers(layers: tuple[tuple[int, float], ...]) -> None:
    server = Server(Model(layers=layers), WindowScorer(20, 20))
    server.forward(server.batch([0, 5], [100, 0], [90, 33]))
    server.check()


def test_a_batch_of_long_and_short_requests_with_a_shared_prefix_and_padding() -> None:
    server = Server(Model(), WindowScorer(16, 16))
    shared = server.req_to_token[0, :64]
    for row in (2, 3, 4):
        server.req_to_token[row, :64] = shared
    others = torch.arange(POOL_SLOTS, device=DEVICE, dtype=torch.int32)
    others = others[~torch.isin(others, shared)][1:]
    for row, first in ((0, 0), (2, 130), (3, 260), (4, 390)):
        server.req_to_token[row, 64:194] = others[first : first + 130]
    server.forward(server.batch([0], [0], [64]))
    server.forward(server.batch([2, 0, 3, 4], [64, 64, 64, 64], [1, 130, 2, 100], padding=3))
    server.check()


def test_chunked_prefill_adds_up_and_publishes_each_chunk_once() -> None:
    server = Server(Model(), WindowScorer(8, 8))
    slots = server.req_to_token[6, :300].long()
    server.forward(server.batch([6], [0], [120]))
    first = server.scores["triton"].published[slots[:120]].clone()
    server.forward(server.batch([6], [120], [120]))
    server.forward(server.batch([6], [240], [60]))
    server.check()
    for scores in server.scores.values():
        assert int(scores.could_attend[slots[0]]) == 3 * 16 * len(server.model.layers)
    assert torch.equal(server.scores["triton"].published[slots[:120]], first)
    # Another request's prefix is published anew: it was cached, and its last reader may ask for something else.
    server.req_to_token[7] = server.req_to_token[6]
    server.forward(server.batch([7], [120], [50]))
    server.check()
    assert not torch.equal(server.scores["triton"].published[slots[:120]], first)


def test_every_query_may_be_observed() -> None:
    server = Server(Model(), ExactScorer())
    server.forward(server.batch([0, 1], [0, 50], [100, 40]))
    server.check()
    # Every layer gives every query's probability away, 1 a query.
    given = server.scores["triton"].received.double().sum().item() / 2**32
    assert given == pytest.approx(140 * len(server.model.layers), rel=1e-3)


def test_equal_prefills_score_bit_for_bit_alike() -> None:
    def score() -> torch.Tensor:
        server = Server(Model(q_heads=4), WindowScorer(16, 16))
        server.req_to_token[1, :100] = server.req_to_token[0, :100]
        server.forward(server.batch([0], [0], [100]))
        server.forward(server.batch([0, 1], [100, 100], [200, 90]))
        return torch.stack([kept.double() for kept in server.scores["triton"].tensors])

    first = score()
    for _ in range(20 if DEVICE == "cuda" else 1):
        assert torch.equal(first, score())


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_keys_that_are_not_numbers_leave_other_heads_alone(broken: float) -> None:
    server = Server(Model(), WindowScorer(8, 8))
    slots = server.req_to_token[0, :90].long()
    healthy = Server(Model(), WindowScorer(8, 8))
    for keys in server.keys:
        keys[slots[40], 0] = broken
    server.forward(server.batch([0], [0], [90]))
    healthy.forward(healthy.batch([0], [0], [90]))
    assert server.errors == []
    received, whole = (s.scores["triton"].received[slots].double() / 2**32 for s in (server, healthy))
    assert bool((received >= 0).all())
    assert bool((received <= whole.max() + 1).all())
    # Head 1 of 2 reads no broken key: what it gave is still there.
    assert received.sum().item() >= whole.sum().item() / 2 - 1e-3


def test_slots_beyond_the_request_may_hold_anything() -> None:
    server, clean = Server(Model(), WindowScorer(8, 8)), Server(Model(), WindowScorer(8, 8))
    used = server.req_to_token[0, :77].long()
    others = torch.ones(POOL_SLOTS, dtype=torch.bool, device=DEVICE)
    others[used] = False
    for keys in server.keys:
        keys[others] = float("nan")
    server.forward(server.batch([0], [0], [77]))
    clean.forward(clean.batch([0], [0], [77]))
    assert torch.equal(server.scores["triton"].received, clean.scores["triton"].received)
    assert not server.scores["triton"].received[others].any()


def test_what_the_layer_works_on_is_left_alone() -> None:
    server = Server(Model(), WindowScorer(8, 8))
    batch = server.batch([2, 4], [10, 0], [50, 60], padding=1)
    queries = server.queries(batch)
    watched = [*queries, *server.keys, server.req_to_token, batch.req_pool_indices, batch.out_cache_loc]
    before = [tensor.clone() for tensor in watched]
    for index, q in enumerate(queries):
        server.observers["triton"].observe(q, server.model.layer(index), batch)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(watched, before, strict=True))
    assert batch.extend_seq_lens_cpu == [50, 60, 0]
    assert server.errors == []
    assert bool((server.scores["triton"].published > 0).any())


def test_new_tokens_do_not_inherit_and_unfinished_forwards_publish_nothing() -> None:
    server = Server(Model(), WindowScorer(8, 8))
    server.forward(server.batch([0], [0], [100]))
    batch = server.batch([0], [0], [100])
    for observer in server.observers.values():
        observer.observe(server.queries(batch)[0], server.model.layer(0), batch)
    for scores in server.scores.values():
        assert not scores.published[server.req_to_token[0, :100].long()].any()
    server.forward(server.batch([0], [0], [100]))
    server.check()


def test_two_forwards_may_come_layer_by_layer_in_turn() -> None:
    server = Server(Model(), WindowScorer(8, 8))
    server.req_to_token[1, :80] = torch.arange(1, 81, device=DEVICE, dtype=torch.int32)
    server.req_to_token[2, :80] = torch.arange(101, 181, device=DEVICE, dtype=torch.int32)
    halves = [server.batch([1], [0], [80]), server.batch([2], [0], [70])]
    queries = [server.queries(half) for half in halves]
    for index in range(len(server.model.layers)):
        for half, q in zip(halves, queries, strict=True):
            for observer in server.observers.values():
                observer.observe(q[index], server.model.layer(index), half)
    server.check()


@given(
    data=st.data(),
    heads=st.sampled_from([(2, 1), (3, 3), (10, 2)]),
    window=st.sampled_from([-1, 0, 7, 64]),
    cap=st.sampled_from([0.0, 5.0]),
    sampled=st.sampled_from([(1, 0), (5, 9), (32, 32)]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=6 if DEVICE == "cpu" else 40, deadline=None)
def test_any_batch(
    data: st.DataObject, heads: tuple[int, int], window: int, cap: float, sampled: tuple[int, int], seed: int
) -> None:
    server = Server(Model(*heads, layers=((window, cap), (-1, cap)), seed=seed), WindowScorer(*sampled))
    requests = data.draw(st.integers(1, 4))
    own = min((POOL_SLOTS - 1) // requests, server.req_to_token.shape[1])
    lengths = [(data.draw(st.integers(0, 60)), data.draw(st.integers(1, 90))) for _ in range(requests)]
    permutation = torch.randperm(POOL_SLOTS - 1, generator=server.random) + 1
    for row in range(requests):
        server.req_to_token[row, :own] = permutation[row * own : (row + 1) * own].to(DEVICE, torch.int32)
    prefixes, extends = zip(*lengths, strict=True)
    server.forward(server.batch(range(requests), prefixes, extends, padding=data.draw(st.integers(0, 2))))
    server.check()


def test_pools_that_the_kernels_cannot_take_are_observed_by_torch() -> None:
    keys = [torch.randn(32, 2, 20, device=DEVICE).half()]  # 40 bytes: no whole units of 16
    arguments = {
        "k_buffers": keys,
        "req_to_token": torch.arange(32, device=DEVICE, dtype=torch.int32)[None],
        "scores": SlotScores(32, DEVICE),
        "scorer": WindowScorer(4, 4),
        "on_error": lambda: pytest.fail("must be observed"),
    }
    with pytest.raises(ValueError, match="head dimensions up to 256 in whole units of 16 bytes, got 20; use the torch"):
        AttentionObserver(**arguments, backend="triton")
    observer = AttentionObserver(**arguments)
    batch = Batch(torch.zeros(1, dtype=torch.int64, device=DEVICE), [0], [30], torch.arange(30, device=DEVICE), None)
    observer.observe(torch.randn(30, 40, device=DEVICE).half(), Layer(0, 2, 20, 0.2, -1, 0.0), batch)
    assert bool((arguments["scores"].published[:30] > 0).all())


def test_the_host_never_waits_and_allocates_nothing_in_steady_state() -> None:
    server = Server(Model(), WindowScorer(32, 32))
    observer = server.observers["triton"]
    batch = server.batch([0, 1], [0, 100], [150, 60])
    queries = server.queries(batch)
    on_gpu = DEVICE == "cuda"

    def forward() -> None:
        forward_batch = Batch(
            batch.req_pool_indices, [0, 100], [150, 60], batch.out_cache_loc, ["request-0", "request-1"]
        )
        for index, q in enumerate(queries):
            observer.observe(q, server.model.layer(index), forward_batch)

    def lent() -> int:
        return torch.cuda.memory_stats()["allocation.all.allocated"] if on_gpu else 0

    for _ in range(4 if on_gpu else 1):
        forward()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    before = lent()
    for _ in range(20 if on_gpu else 1):
        forward()
    if on_gpu:
        torch.cuda.set_sync_debug_mode("default")
    assert lent() == before
    assert server.errors == []


def test_scores_come_to_the_host_as_they_were_published() -> None:
    server = Server(Model(), WindowScorer(8, 8))
    server.forward(server.batch([0], [0], [100]))
    slots = server.req_to_token[0, :100].long()
    for count in (100, 3, 100):
        chosen = slots[:count].cpu().numpy()
        fetched = server.scores["triton"].fetch(chosen)
        assert fetched.dtype == np.float32
        np.testing.assert_array_equal(fetched, server.scores["triton"].read(slots[:count]).cpu().numpy())
