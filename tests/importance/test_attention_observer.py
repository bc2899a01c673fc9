"""The observer around SGLang's attention: what it publishes, what it leaves out, and what becomes of errors."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from spectrumkv_sglang.importance.attention_hook import AttentionObserver
from spectrumkv_sglang.importance.scorers import WindowScorer
from spectrumkv_sglang.importance.scores import SlotScores

LAYERS, HEADS, DIM, SLOTS = 3, 2, 8, 64


class Mode:
    """What the observer asks of SGLang's ForwardMode."""

    def __init__(self, extend: bool = True) -> None:
        self.extend = extend

    def is_extend_without_speculative(self) -> bool:
        return self.extend


@dataclass(eq=False)
class Batch:
    req_pool_indices: torch.Tensor
    extend_prefix_lens_cpu: list[int]
    extend_seq_lens_cpu: list[int]
    out_cache_loc: torch.Tensor
    rids: list[str] | None = None
    forward_mode: Mode = field(default_factory=Mode)


@dataclass(frozen=True)
class Layer:
    layer_id: int
    tp_q_head_num: int = HEADS
    head_dim: int = DIM
    scaling: float = 0.3
    sliding_window_size: int = -1
    logit_cap: float = 0.0
    is_cross_attention: bool = False


class Rank:
    """A pool of three layers whose request 0 has the slots 1, 2, ..."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.errors = 0
        self.scores = SlotScores(SLOTS, "cpu")
        self.observer = AttentionObserver(
            k_buffers=[torch.randn(SLOTS, HEADS, DIM) for _ in range(LAYERS)],
            req_to_token=torch.arange(1, SLOTS, dtype=torch.int32).repeat(2, 1),
            scores=self.scores,
            scorer=WindowScorer(4, 4),
            on_error=self._count,
        )

    def _count(self) -> None:
        self.errors += 1

    def batch(self, prefix: int, new: int, rid: str | None = None, mode: Mode | None = None) -> Batch:
        slots = torch.arange(1 + prefix, 1 + prefix + new)
        return Batch(torch.tensor([0]), [prefix], [new], slots, [rid] if rid else None, mode or Mode())

    def layer(self, index: int, batch: Batch, width: int = HEADS * DIM) -> None:
        self.observer.observe(torch.randn(len(batch.out_cache_loc), width), Layer(index), batch)

    def forward(self, batch: Batch) -> None:
        for index in range(LAYERS):
            self.layer(index, batch)

    def published(self, tokens: int) -> torch.Tensor:
        return self.scores.read(torch.arange(1, 1 + tokens))


def test_scores_are_published_with_the_last_layer() -> None:
    rank = Rank()
    batch = rank.batch(0, 20)
    for index in range(LAYERS - 1):
        rank.layer(index, batch)
    assert not rank.published(20).any()
    rank.layer(LAYERS - 1, batch)
    assert bool((rank.published(20) > 0).all())
    assert rank.errors == 0


def test_a_later_chunk_does_not_change_what_an_earlier_one_published() -> None:
    rank = Rank()
    rank.forward(rank.batch(0, 20, "a"))
    first = rank.published(20)
    rank.forward(rank.batch(20, 10, "a"))
    assert torch.equal(rank.published(20), first)
    assert bool((rank.published(30) > 0).all())
    # The sums go on: who finds the prefix in the cache reads what all queries said.
    rank.forward(rank.batch(30, 5, "b"))
    assert not torch.equal(rank.published(20), first)


def test_a_forward_that_does_not_name_its_requests_publishes_no_prefix() -> None:
    """A replayed prefill graph carries no request ids: its prefix may be an earlier chunk that is on its way."""
    rank = Rank()
    rank.forward(rank.batch(0, 20))
    first = rank.published(20)
    rank.forward(rank.batch(20, 10))
    assert torch.equal(rank.published(20), first)
    assert bool((rank.published(30) > 0).all())


def test_slots_of_a_forward_that_was_not_observed_do_not_keep_their_last_tenants_scores() -> None:
    rank = Rank()
    rank.forward(rank.batch(0, 20))
    unreadable = rank.batch(0, 20)
    unreadable.extend_prefix_lens_cpu = None  # type: ignore[assignment]
    rank.forward(unreadable)
    assert rank.errors == 1
    assert not rank.published(20).any()


def test_forwards_that_prefill_nothing_are_not_observed() -> None:
    rank = Rank()
    rank.forward(rank.batch(0, 20, mode=Mode(extend=False)))
    batch = rank.batch(0, 20)
    for layer in (Layer(0, is_cross_attention=True), Layer(LAYERS + 5)):
        rank.observer.observe(torch.randn(20, HEADS * DIM), layer, batch)
    rank.forward(Batch(torch.tensor([0, 1]), [0, 0], [0, 0], torch.zeros(0, dtype=torch.int64)))
    assert not rank.scores.could_attend.any()
    assert rank.errors == 0


def test_an_error_is_counted_once_a_forward_and_ends_its_observation() -> None:
    rank = Rank()
    batch = rank.batch(0, 20)
    rank.layer(0, batch)
    for index in (1, 2):
        rank.layer(index, batch, width=HEADS * DIM + 1)
    assert rank.errors == 1
    assert not rank.published(20).any()
    rank.forward(rank.batch(0, 20))
    assert rank.errors == 1
    assert bool((rank.published(20) > 0).all())


def test_a_batch_that_cannot_be_read_is_counted_once() -> None:
    rank = Rank()
    broken = Batch(torch.tensor([0]), [0], [20], torch.tensor([SLOTS + 9]))
    rank.forward(broken)
    assert rank.errors == 1


def test_forwards_that_never_end_are_counted_and_forgotten() -> None:
    rank = Rank()
    batches = [rank.batch(0, 8) for _ in range(7)]
    for batch in batches:
        rank.layer(0, batch)
    assert rank.errors == 3  # four may still be open


@pytest.mark.parametrize("window", [-1, 3])
def test_what_the_layer_was_given_is_left_alone(window: int) -> None:
    rank = Rank()
    q = torch.randn(20, HEADS * DIM)
    before, batch = q.clone(), rank.batch(0, 20)
    for index in range(LAYERS):
        rank.observer.observe(q, Layer(index, sliding_window_size=window), batch)
    assert torch.equal(q, before)
    assert batch.extend_seq_lens_cpu == [20]
    assert rank.errors == 0


def test_queries_count_alike_in_every_shape_that_models_give_them() -> None:
    """Flat, by heads, and with a batch dimension, which Gemma 3's attention has; that one after a transpose, too."""
    q = torch.randn(20, HEADS, DIM)
    shapes = [q.flatten(1), q, q[None], q.transpose(0, 1).contiguous().transpose(0, 1)[None]]
    found = []
    for given in shapes:
        rank = Rank()
        batch = rank.batch(0, 20)
        for index in range(LAYERS):
            rank.observer.observe(given, Layer(index), batch)
        assert rank.errors == 0
        found.append(rank.published(20))
    assert bool((found[0] > 0).all())
    for other in found[1:]:
        assert torch.equal(other, found[0])


def test_the_kernels_are_not_for_what_they_cannot_take() -> None:
    with pytest.raises(ValueError, match=r"the importance kernels take .*; use the torch backend"):
        AttentionObserver(
            k_buffers=[torch.zeros(SLOTS, HEADS, 300)],
            req_to_token=torch.zeros((1, 4), dtype=torch.int32),
            scores=SlotScores(SLOTS, "cpu"),
            scorer=WindowScorer(4, 4),
            on_error=lambda: None,
            backend="triton",
        )
