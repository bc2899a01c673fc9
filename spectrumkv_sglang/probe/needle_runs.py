"""Needle trials on the running server: natively first, then with every tiered policy that has to find them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from spectrumkv_sglang.loopback.plan import NATIVE
from spectrumkv_sglang.probe.engine import ProbeEngine
from spectrumkv_sglang.probe.gate import NeedleCount
from spectrumkv_sglang.probe.needles import DEFAULT_ANSWER_TOKENS, NeedleTrial

LENGTHS = (1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152, 65536, 98304, 131072)
"""Lengths that the probe chooses from, tokens."""
MIN_LENGTH = 512
CALIBRATION_TOKENS = 512
_MARGIN_TOKENS = 8


class NeedleAnswer(msgspec.Struct, frozen=True):
    """One generated answer. ``wire_ratio``: wire bytes / native bytes of the prompt's KV; 1 natively."""

    passed: bool
    text: str
    output_ids: list[int]
    wire_ratio: float
    tokens_by_tier: tuple[int, int, int] | None


class NeedleResult(msgspec.Struct, frozen=True):
    """One trial with the answers by policy, ``native`` (the control) among them."""

    length: int
    depth: float
    seed: int
    expected: str
    prompt_tokens: int
    answers: dict[str, NeedleAnswer]


def longest_length(context_tokens: int, pool_tokens: int) -> int:
    """Tokens of prompt and answer together that the server takes."""
    return min(context_tokens, pool_tokens) - _MARGIN_TOKENS


def choose_length(longest: int, seconds_for_calibration: float, prompts: int, seconds: float, least: int = 0) -> int:
    """The largest of ``LENGTHS`` from ``least`` to ``longest`` (or ``longest`` if there is none) at which ``prompts``
    prompts are expected to take at most ``seconds``, from the seconds that ``CALIBRATION_TOKENS`` took. Attention makes
    long prompts dearer than in proportion, hence the square root of the ratio on top."""
    fitting = [length for length in LENGTHS if least <= length <= longest] or [longest]
    chosen = fitting[0]
    for length in fitting[1:]:
        ratio = length / CALIBRATION_TOKENS
        if prompts * seconds_for_calibration * ratio * (ratio / 4) ** 0.5 <= seconds:
            chosen = length
    return chosen


def run_trials(
    engine: ProbeEngine, trials: Sequence[NeedleTrial], policies: Sequence[str], advance: Callable[[], None]
) -> list[NeedleResult]:
    """Answer every trial natively and with every policy; ``advance`` is called after each answer."""
    results = []
    for trial in trials:
        answers = {}
        for policy in (NATIVE, *policies):
            text, output_ids, line = engine.generate(trial.token_ids, policy, DEFAULT_ANSWER_TOKENS)
            moved = line.in_place
            answers[policy] = NeedleAnswer(
                passed=trial.passed(text),
                text=text,
                output_ids=output_ids,
                wire_ratio=moved.wire_bytes / moved.native_bytes if moved else 1.0,
                tokens_by_tier=moved.tokens_by_tier if moved else None,
            )
            advance()
        results.append(NeedleResult(trial.length, trial.depth, trial.seed, trial.answer, len(trial.token_ids), answers))
    return results


def count(results: Sequence[NeedleResult]) -> NeedleCount:
    """Passed trials by policy."""
    names = list(results[0].answers)
    return NeedleCount(len(results), {name: sum(result.answers[name].passed for result in results) for name in names})
