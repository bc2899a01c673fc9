"""Choosing needle lengths and cutting text, without a server."""

from typing import Any

import pytest

from spectrumkv_sglang.probe.errors import ProbeError
from spectrumkv_sglang.probe.needle_runs import LENGTHS, choose_length, longest_length
from spectrumkv_sglang.probe.text_runs import cut_windows
from spectrumkv_sglang.probe.texts import load_judged_text


def test_a_needle_prompt_fits_the_context_and_the_pool() -> None:
    assert longest_length(2048, 100_000) < 2048
    assert longest_length(32_768, 4096) < 4096


def test_more_time_gives_longer_prompts_and_no_time_the_shortest() -> None:
    chosen = [choose_length(200_000, 0.5, 9, seconds) for seconds in (0, 10, 30, 100, 300, 1000, 100_000)]
    assert chosen == sorted(chosen)
    assert chosen[0] == LENGTHS[0]
    assert chosen[-1] == LENGTHS[-1]
    assert choose_length(1500, 0.5, 9, 1e9) == LENGTHS[0]
    assert choose_length(700, 0.5, 9, 1e9) == 700


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_windows_do_not_overlap_and_their_prefixes_are_whole_pages(chat_tokenizer: Any, page_size: int) -> None:
    text = load_judged_text()
    windows = cut_windows(
        chat_tokenizer,
        text,
        prefix_tokens=700,
        continuation_tokens=256,
        windows=2,
        page_size=page_size,
        longest=8000,
    )
    assert len(windows) == 2
    ids = chat_tokenizer.encode(text, add_special_tokens=False)
    for window in windows:
        assert window.prefix_tokens % page_size == 0
        assert len(window.token_ids) == window.prefix_tokens + 256
    joined = windows[0].token_ids + windows[1].token_ids
    assert joined == ids[: len(joined)]


def test_windows_begin_with_the_tokenizers_own_token(base_tokenizer: Any) -> None:
    windows = cut_windows(
        base_tokenizer,
        load_judged_text(),
        prefix_tokens=256,
        continuation_tokens=64,
        windows=3,
        page_size=1,
        longest=1000,
    )
    assert len(windows) == 3
    bos = base_tokenizer.bos_token_id
    assert all(window.token_ids[0] == bos and bos not in window.token_ids[1:] for window in windows)
    assert all(len(window.token_ids) == 320 for window in windows)


def test_a_short_text_or_context_gives_shorter_windows_or_an_error(chat_tokenizer: Any) -> None:
    arguments = {"prefix_tokens": 768, "continuation_tokens": 256, "windows": 2, "page_size": 1}
    words = "the river and the mill " * 100
    (window,) = cut_windows(chat_tokenizer, words, longest=8000, **arguments)
    assert 300 < len(window.token_ids) < 600
    windows = cut_windows(chat_tokenizer, load_judged_text(), longest=500, **arguments)
    assert all(len(window.token_ids) <= 500 for window in windows)
    with pytest.raises(ProbeError, match="longer --text"):
        cut_windows(chat_tokenizer, "a few words", longest=8000, **arguments)
    with pytest.raises(ProbeError, match="--context-length"):
        cut_windows(chat_tokenizer, load_judged_text(), longest=150, **arguments)
