"""Which KV heads a prefill rank and a decode rank share.

SGLang splits a model's KV heads evenly over the ranks of an attention tensor-parallel group. With equal sizes on both
sides rank r's heads are rank r's. With unequal ones a rank of the larger group holds a part of what its partner of the
smaller group holds, and that part is what travels between the two.

Where there are more ranks than heads, neighbouring ranks hold the same head. Between unequal sizes such ranks are left
to SGLang: a real pair of them (Gemma 3, one head, TP 2 to TP 1) gave wrong answers, and with SGLang's own backend too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankHeads:
    """KV heads of a model that one rank holds: ``count`` of ``total``, from ``first`` on.

    Raises:
        ValueError: they lie outside the model.
    """

    first: int
    count: int
    total: int

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.first <= self.total - self.count:
            raise ValueError(
                f"expected KV heads within 0 to {self.total - 1}, got {self.count} from head {self.first} on"
            )

    @property
    def end(self) -> int:
        """The head behind the last."""
        return self.first + self.count

    def __str__(self) -> str:
        heads = f"head {self.first}" if self.count == 1 else f"heads {self.first} to {self.end - 1}"
        return f"{heads} of {self.total}"


@dataclass(frozen=True)
class SharedHeads:
    """``count`` KV heads that two ranks hold: from ``ours`` on of our own, from ``theirs`` on of the peer's."""

    ours: int
    theirs: int
    count: int


def heads_of_rank(total: int, tp_size: int, tp_rank: int, held: int) -> RankHeads | None:
    """The heads of rank ``tp_rank`` of ``tp_size``; None where they do not follow from the numbers.

    Args:
        total: KV heads of the model; 0 where that is not known.
        tp_size: ranks of the attention tensor-parallel group.
        tp_rank: in that group.
        held: KV heads in this rank's pool.
    """
    if total < 1 or not 0 <= tp_rank < tp_size or total % tp_size:
        return None
    count = total // tp_size
    return RankHeads(tp_rank * count, count, total) if held == count else None


def shared_heads(ours: RankHeads, theirs: RankHeads) -> SharedHeads | None:
    """What both hold; None unless all heads of the one are among those of the other, in a model of as many heads.

    Anything else is no pair of ranks that SGLang makes: it would leave heads to nobody.
    """
    first, end = max(ours.first, theirs.first), min(ours.end, theirs.end)
    if ours.total != theirs.total or end - first != min(ours.count, theirs.count):
        return None
    return SharedHeads(first - ours.first, first - theirs.first, end - first)
