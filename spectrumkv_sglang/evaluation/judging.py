"""Scores of a continuation after KV that travelled, beside the same continuation after native KV.

What of the native side every method needs again (probabilities, most likely tokens) is computed once a text. The scores
are those of ``loopback.judging.ContinuationJudge``, which takes its logits in pieces from a running server.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spectrumkv_sglang.loopback.plan import JudgedRecord

_CACHE_FLOATS = 1 << 21
"""Logits that are worked on at once: all passes over them then find them in a CPU's cache."""


class NativeReference:
    """The native model's predictions of one continuation.

    Args:
        logits: [predictions, vocabulary] after native KV, any float dtype; row i predicts ``continuation[i]``.
        continuation: the tokens that are predicted.

    Memory: two float32 copies of ``logits``.
    """

    def __init__(self, logits: torch.Tensor, continuation: Sequence[int]) -> None:
        if len(logits) != len(continuation) or len(logits) == 0:
            raise ValueError(f"{len(continuation)} tokens are predicted by as many rows of logits, got {len(logits)}")
        self._rows_at_once = max(1, _CACHE_FLOATS // logits.shape[1])
        self._targets = torch.tensor(list(continuation), device=logits.device)[:, None]
        self._logprobs = torch.cat([_logprobs(rows) for rows in logits.split(self._rows_at_once)])
        self._probabilities = self._logprobs.exp()
        self._most_likely = self._logprobs.argmax(-1)
        # A vocabulary may be padded with impossible tokens: 0 x infinity is none of the sum.
        self._all_possible = bool(self._logprobs.isfinite().all())

    def judge(self, logits: torch.Tensor) -> JudgedRecord:
        """Scores of other ``logits`` of the same continuation; the reference's own give exactly a KL of 0.

        Raises:
            ValueError: logits of another shape.
        """
        if logits.shape != self._logprobs.shape:
            raise ValueError(f"expected logits {tuple(self._logprobs.shape)}, got {tuple(logits.shape)}")
        nll = kl = 0.0
        equal = 0
        for start in range(0, len(logits), self._rows_at_once):
            rows = slice(start, start + self._rows_at_once)
            ours, native = _logprobs(logits[rows]), self._logprobs[rows]
            nll -= float(ours.gather(1, self._targets[rows]).double().sum())
            equal += int((ours.argmax(-1) == self._most_likely[rows]).sum())
            terms = torch.sub(native, ours, out=ours).mul_(self._probabilities[rows])
            if not self._all_possible:
                terms.masked_fill_(~native.isfinite(), 0.0)
            kl += float(terms.sum(dim=-1).double().sum())
        predicted = len(logits)
        return JudgedRecord(tokens=predicted, nll=nll / predicted, kl=kl / predicted, top1=equal / predicted)


def _logprobs(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits.float(), dim=-1)
