"""Teacher-forced scores against their definitions."""

import math

import pytest
import torch

from spectrumkv_sglang.loopback.judging import ContinuationJudge
from spectrumkv_sglang.loopback.plan import LoopbackError


def _judge(judge: ContinuationJudge, logits: torch.Tensor, tokens: list[int], *, reference: bool, parts: int = 1):
    judge.begin()
    for part in logits.chunk(parts):
        judge.collect(part)
    return judge.finish(tokens, reference=reference)


def test_scores_are_those_of_their_definitions() -> None:
    generator = torch.Generator().manual_seed(3)
    native = torch.randn(9, 50, generator=generator)
    other = native + 0.3 * torch.randn(9, 50, generator=generator)
    tokens = torch.randint(0, 50, (9,), generator=generator).tolist()
    judge = ContinuationJudge()
    reference = _judge(judge, native, tokens, reference=True)
    judged = _judge(judge, other, tokens, reference=False, parts=3)

    p, q = native[:-1].double().log_softmax(-1), other[:-1].double().log_softmax(-1)
    assert reference.kl == 0.0
    assert reference.top1 == 1.0
    assert reference.nll == pytest.approx(-p[range(8), tokens[1:]].mean().item(), rel=1e-5)
    assert judged.tokens == 8
    assert judged.nll == pytest.approx(-q[range(8), tokens[1:]].mean().item(), rel=1e-5)
    assert judged.kl == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-4)
    assert judged.top1 == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
    assert judged.kl > 0


def test_impossible_tokens_of_a_padded_vocabulary_do_not_count() -> None:
    logits = torch.randn(5, 10, generator=torch.Generator().manual_seed(1))
    logits[:, 7:] = -math.inf
    judge = ContinuationJudge()
    _judge(judge, logits, [1, 2, 3, 4, 5], reference=True)
    judged = _judge(judge, logits + 0.1 * torch.arange(10), [1, 2, 3, 4, 5], reference=False)
    assert math.isfinite(judged.kl)
    assert judged.kl > 0


def test_broken_logits_give_scores_that_pass_no_limit() -> None:
    logits = torch.randn(5, 10, generator=torch.Generator().manual_seed(1))
    judge = ContinuationJudge()
    _judge(judge, logits, [1, 2, 3, 4, 5], reference=True)
    judged = _judge(judge, torch.full((5, 10), math.nan), [1, 2, 3, 4, 5], reference=False)
    assert math.isnan(judged.nll)
    assert math.isnan(judged.kl)


def test_a_forward_of_another_length_is_refused() -> None:
    judge = ContinuationJudge()
    with pytest.raises(LoopbackError, match=r"4 tokens: SGLang computed logits of 9 positions"):
        _judge(judge, torch.zeros(9, 10), [1, 2, 3, 4], reference=True)
    assert not judge.collecting


def test_a_comparison_needs_a_reference_of_the_same_length() -> None:
    judge = ContinuationJudge()
    with pytest.raises(LoopbackError, match="no native reference"):
        _judge(judge, torch.zeros(4, 10), [1, 2, 3, 4], reference=False)
    _judge(judge, torch.zeros(5, 10), [1, 2, 3, 4, 5], reference=True)
    with pytest.raises(LoopbackError, match="no native reference"):
        _judge(judge, torch.zeros(4, 10), [1, 2, 3, 4], reference=False)


def test_logits_outside_a_judged_forward_are_not_kept() -> None:
    judge = ContinuationJudge()
    judge.collect(torch.zeros(4, 10))
    judge.begin()
    judge.collect(torch.zeros(4, 10))
    judge.abandon()
    judge.collect(torch.zeros(4, 10))
    with pytest.raises(LoopbackError, match="logits of 0 positions"):
        judge.finish([1, 2, 3, 4], reference=True)
