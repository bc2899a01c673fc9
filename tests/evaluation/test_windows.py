"""Windows of text: one continuation for all lengths, no overlap, and refusals that say what to do."""

from __future__ import annotations

from typing import Any

import pytest

from spectrumkv_sglang.evaluation.errors import EvaluationError
from spectrumkv_sglang.evaluation.windows import TextWindow, cut_windows


class NumberTokenizer:
    """A text is numbers; each is its own token. Token 1 stands in front of every text."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [1] * add_special_tokens + [int(word) for word in text.split()]


TEXT = " ".join(map(str, range(100, 200)))


def cut(**changes: Any) -> list[TextWindow]:
    options = {
        "prefix_tokens": (8,),
        "continuation_tokens": 4,
        "texts": None,
        "seed": 0,
        "context_tokens": None,
    }
    return cut_windows(NumberTokenizer(), TEXT, **{**options, **changes})


def test_a_prefix_leads_up_to_its_continuation() -> None:
    for window in cut():
        prefix = window.prefix(8)
        assert prefix[0] == 1
        run = [*prefix[1:], window.first, *window.continuation]
        assert run == list(range(run[0], run[0] + 7 + 1 + 4))


def test_every_length_has_the_same_continuation() -> None:
    (window,) = cut(prefix_tokens=(4, 8, 20), texts=1)
    prefixes = [window.prefix(length) for length in (4, 8, 20)]
    assert [len(prefix) for prefix in prefixes] == [4, 8, 20]
    assert all(prefix[0] == 1 and prefix[-1] == window.first - 1 for prefix in prefixes)


def test_windows_do_not_overlap_and_the_seed_draws_them() -> None:
    windows = cut(texts=8, seed=3)
    tokens = [token for window in windows for token in (*window.lead, window.first, *window.continuation)]
    assert len(set(tokens)) == len(tokens) == 8 * 12
    assert cut(texts=2, seed=3) == cut(texts=2, seed=3)
    assert len({tuple(window.name for window in cut(texts=2, seed=seed)) for seed in range(9)}) > 1


def test_unless_told_it_takes_four() -> None:
    assert len(cut()) == 4
    assert len(cut(prefix_tokens=(40,))) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"texts": 9}, r"100 tokens, 9 windows of 12 need 108: give a longer --text, fewer --texts"),
        ({"prefix_tokens": (120,)}, r"1 windows of 124 need 124"),
        ({"prefix_tokens": (1, 8)}, r"--prefix-tokens 1: expected at least 2"),
        ({"context_tokens": 12}, r"make 13 tokens with the one between them, but the model's context has 12"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        cut(**changes)
