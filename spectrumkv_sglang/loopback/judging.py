"""Teacher-forced scores of a continuation whose prefix has travelled: likelihood, KL divergence, top-1 agreement."""

from __future__ import annotations

import torch

from spectrumkv_sglang.loopback.plan import JudgedRecord, LoopbackError

_ROWS_AT_ONCE = 64


class ContinuationJudge:
    """Collects the logits of one judged forward and compares them with the reference. Not thread-safe.

    The reference, float32 log-probabilities [predictions, vocabulary], stays in memory until the next one.
    """

    def __init__(self) -> None:
        self._collected: list[torch.Tensor] | None = None
        self._reference: torch.Tensor | None = None

    @property
    def collecting(self) -> bool:
        """Whether a judged forward is running."""
        return self._collected is not None

    def begin(self) -> None:
        """A judged forward begins."""
        self._collected = []

    def collect(self, logits: torch.Tensor) -> None:
        """Take logits [rows, vocabulary] of further positions; they are copied."""
        if self._collected is not None:
            self._collected.append(torch.log_softmax(logits.detach().float(), dim=-1))

    def abandon(self) -> None:
        """The forward failed: forget what was collected."""
        self._collected = None

    def finish(self, continuation: list[int], *, reference: bool) -> JudgedRecord:
        """End of the forward over the ``continuation``'s token ids: position i predicts token i + 1.

        Raises:
            LoopbackError: other positions were seen than the continuation has, or there is no fitting reference.
        """
        collected, self._collected = self._collected or [], None
        predicted = len(continuation) - 1
        seen = sum(len(part) for part in collected)
        if seen not in (len(continuation), predicted) or predicted < 1:
            raise LoopbackError(
                f"judging a continuation of {len(continuation)} tokens: SGLang computed logits of {seen} positions, "
                f"expected {len(continuation)}"
            )
        logprobs = torch.cat(collected)[:predicted]
        targets = torch.tensor(continuation[1:], device=logprobs.device)
        nll = -float(logprobs.gather(1, targets[:, None]).double().mean())
        if reference:
            self._reference = logprobs
        if self._reference is None or self._reference.shape != logprobs.shape:
            raise LoopbackError("judging a continuation: no native reference of the same length was judged before")
        kl = 0.0
        for start in range(0, predicted, _ROWS_AT_ONCE):
            native = self._reference[start : start + _ROWS_AT_ONCE]
            ours = logprobs[start : start + _ROWS_AT_ONCE]
            possible = native.isfinite()  # a vocabulary may be padded with impossible tokens
            terms = torch.where(possible, native.exp() * (native - ours), 0.0)
            kl += float(terms.sum(dim=-1).double().sum())
        top1 = float((self._reference.argmax(-1) == logprobs.argmax(-1)).double().mean())
        return JudgedRecord(tokens=predicted, nll=nll, kl=kl / predicted, top1=top1)
