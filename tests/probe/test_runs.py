"""Choosing needle lengths and cutting text, without a server."""

import math
import struct
from pathlib import Path
from typing import Any

import pytest

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.loopback.plan import JudgedRecord, ResultLine
from spectrumkv_sglang.probe.errors import ProbeError
from spectrumkv_sglang.probe.gate import Thresholds
from spectrumkv_sglang.probe.model_identity import fingerprint_on_disk, require_unchanged
from spectrumkv_sglang.probe.needle_runs import LENGTHS, choose_length, longest_length
from spectrumkv_sglang.probe.options import ProbeOptions
from spectrumkv_sglang.probe.outcome import kept_fields
from spectrumkv_sglang.probe.text_runs import TextWindow, cut_windows, run_windows
from spectrumkv_sglang.probe.texts import load_judged_text
from spectrumkv_sglang.verification.fingerprint import fingerprint_model


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
    assert choose_length(8000, 0.5, 9, 0, least=1100) == LENGTHS[1]
    assert choose_length(1400, 0.5, 9, 0, least=1100) == 1400


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


class ScriptedEngine:
    """Reports scores; stands in for the server, which judges."""

    def __init__(self, *nll: float) -> None:
        self.nll = iter(nll)

    def judge(self, token_ids: object, prefix_tokens: int, policy: str) -> ResultLine:
        return ResultLine(id="", judged=JudgedRecord(tokens=10, nll=next(self.nll), kl=math.nan, top1=0.0))


def test_a_perplexity_beyond_all_numbers_is_a_score_that_fails() -> None:
    scores = run_windows(ScriptedEngine(3.0, 5000.0), [TextWindow([1], 1)], ["low"], lambda: None)  # type: ignore[arg-type]
    assert scores["low"].ppl == scores["low"].dppl_pct == math.inf
    assert scores["native"].dppl_pct == 0
    assert len(Thresholds().failures(scores["low"])) == 3


def _options(tmp_path: Path, **fields: Any) -> ProbeOptions:
    plain: dict[str, Any] = {"model": "m", "config": SpectrumKVConfig(), "explicit_budget": False, "flags": {}}
    return ProbeOptions(**{**plain, "backend": "spectrumkv_tcp", "log_path": tmp_path / "log", **fields})


def test_a_model_that_was_replaced_while_it_was_loaded_is_not_judged(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}" + b"old weights")
    (model / "config.json").write_text("{}")
    before = fingerprint_on_disk(_options(tmp_path, model=str(model)))
    require_unchanged(before, fingerprint_model(model, quantization="fp8", dtype="bfloat16"))
    (model / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}" + b"new weights")
    with pytest.raises(ProbeError, match=r"changed while it was loaded \(weights\)"):
        require_unchanged(before, fingerprint_model(model, quantization="fp8", dtype="bfloat16"))
    assert fingerprint_on_disk(_options(tmp_path, model="no/such-hub-id")) is None


def test_what_the_operator_chose_stays_in_the_launch_config() -> None:
    config = SpectrumKVConfig(
        strict=False, require_probe=False, control_host="10.0.0.1", sink_tokens=8, budget=0.5, transfer_log="t.jsonl"
    )
    assert kept_fields(config) == {"control_host": "10.0.0.1", "sink_tokens": 8, "transfer_log": "t.jsonl"}
    assert kept_fields(SpectrumKVConfig(strict=True)) == {"strict": True}
