"""Scores beside native ones: the same numbers as the probe's judge, for every kind of logits."""

from __future__ import annotations

import pytest
import torch

from spectrumkv_sglang.evaluation import judging
from spectrumkv_sglang.evaluation.judging import NativeReference
from spectrumkv_sglang.loopback.judging import ContinuationJudge

ROWS, VOCABULARY = 21, 101
TOKENS = torch.randint(0, 90, (ROWS,), generator=torch.Generator().manual_seed(0)).tolist()


def _logits(seed: int, *, padded: bool) -> torch.Tensor:
    logits = 3 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    if padded:
        logits[:, 95:] = float("-inf")
    return logits


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("floats_at_once", [1, 4 * VOCABULARY, 1 << 21])
def test_scores_are_those_of_the_probe(monkeypatch: pytest.MonkeyPatch, padded: bool, floats_at_once: int) -> None:
    monkeypatch.setattr(judging, "_CACHE_FLOATS", floats_at_once)
    native, ours = _logits(1, padded=padded), _logits(2, padded=padded)
    judge = ContinuationJudge()
    judge.begin()
    judge.collect(native)
    judge.finish([0, *TOKENS], reference=True)
    judge.begin()
    judge.collect(ours)
    expected = judge.finish([0, *TOKENS], reference=False)
    found = NativeReference(native, TOKENS).judge(ours)
    assert found.tokens == expected.tokens == ROWS
    assert found.top1 == expected.top1
    assert found.kl == pytest.approx(expected.kl, rel=1e-5)
    assert found.nll == pytest.approx(expected.nll, rel=1e-6)


@pytest.mark.parametrize("padded", [False, True])
def test_native_itself_loses_nothing(padded: bool) -> None:
    native = _logits(1, padded=padded)
    record = NativeReference(native, TOKENS).judge(native.clone())
    assert (record.kl, record.top1) == (0.0, 1.0)


def test_other_shapes_are_refused() -> None:
    native = _logits(1, padded=False)
    with pytest.raises(ValueError, match="5 tokens are predicted by as many rows of logits, got 21"):
        NativeReference(native, TOKENS[:5])
    with pytest.raises(ValueError, match=r"expected logits \(21, 101\), got \(20, 101\)"):
        NativeReference(native, TOKENS).judge(native[:-1])
