"""Teacher-forced scores on real text: a prefix travels as a policy says, and native predictions judge the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from spectrumkv_sglang.loopback.plan import NATIVE, JudgedRecord
from spectrumkv_sglang.probe.engine import ProbeEngine
from spectrumkv_sglang.probe.errors import ProbeError
from spectrumkv_sglang.verification.record import GateScores

PREFIX_TOKENS = 768
CONTINUATION_TOKENS = 256
WINDOWS = 2
_LEAST_PREFIX = 128
_LEAST_CONTINUATION = 64


class TextWindow:
    """A piece of text: ``token_ids`` with the first ``prefix_tokens`` to travel."""

    def __init__(self, token_ids: list[int], prefix_tokens: int) -> None:
        self.token_ids, self.prefix_tokens = token_ids, prefix_tokens


def cut_windows(
    tokenizer: Any,
    text: str,
    *,
    prefix_tokens: int,
    continuation_tokens: int,
    windows: int,
    page_size: int,
    longest: int,
) -> list[TextWindow]:
    """Windows of ``text`` that do not overlap, each with the special tokens that the tokenizer puts in front.

    Args:
        prefix_tokens: of a window, special tokens included; cut to whole pages of ``page_size``, and with the
            continuation to ``longest``, the server's limit.
        continuation_tokens: of a window.
        windows: at most so many; fewer when the text ends.

    Raises:
        ProbeError: the text or the server's context is too short for one window of at least 128 + 64 tokens.
    """
    special = tokenizer.encode("", add_special_tokens=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    continuation = min(continuation_tokens, longest // 3, (len(ids) + len(special)) // 3)
    prefix = min(prefix_tokens, longest - continuation, len(ids) + len(special) - continuation)
    prefix = prefix // page_size * page_size
    if prefix < max(_LEAST_PREFIX, page_size) or continuation < _LEAST_CONTINUATION:
        raise ProbeError(
            f"judging on text needs at least {_LEAST_PREFIX} + {_LEAST_CONTINUATION} tokens (and a page of "
            f"{page_size}), but the text has {len(ids)} and the server takes {longest}: give a longer --text, or a "
            "longer --context-length"
        )
    step = prefix + continuation - len(special)
    starts = range(0, len(ids) - step + 1, step)[:windows]
    return [TextWindow([*special, *ids[start : start + step]], prefix) for start in starts]


def run_windows(
    engine: ProbeEngine, windows: Sequence[TextWindow], policies: Sequence[str], advance: Callable[[], None]
) -> dict[str, GateScores]:
    """Scores of native and every policy, over all windows; ``advance`` is called after each judgement."""
    judged: dict[str, list[JudgedRecord]] = {name: [] for name in (NATIVE, *policies)}
    for window in windows:
        for policy, records in judged.items():
            line = engine.judge(window.token_ids, window.prefix_tokens, policy)
            if line.judged is None:
                raise ProbeError(f"policy {policy!r}: the server reported no scores")
            records.append(line.judged)
            advance()
    native = _mean(judged[NATIVE], "nll")
    return {
        policy: GateScores(
            ppl=_exp(_mean(records, "nll")),
            dppl_pct=100 * (_exp(_mean(records, "nll") - native) - 1),
            kl=_mean(records, "kl"),
            top1=_mean(records, "top1"),
        )
        for policy, records in judged.items()
    }


def _mean(records: Sequence[JudgedRecord], field: str) -> float:
    tokens = sum(record.tokens for record in records)
    return float(sum(getattr(record, field) * record.tokens for record in records) / tokens)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
