"""Whether it is worth turning on, in plain words."""

from __future__ import annotations

from dataclasses import dataclass

from spectrumkv_sglang.sizing.estimate import Choice, PromptEstimate

SHORT_PROMPT_TOKENS = 4096
"""Under about this the transfer is a small part of the time to the first token (docs/results/gpu.md)."""
SHORT_PROMPT_SECONDS = 0.1
LEAST_GAIN = 0.05
FASTEST_MEASURED_GBPS = 25


@dataclass(frozen=True)
class Advice:
    """For one prompt length: whether it is worth it, and why."""

    prompt_tokens: int
    worth_it: bool
    text: str


def advise(estimate: PromptEstimate, *, min_tokens: int, gbps: float) -> Advice:
    """What an operator with such prompts should do."""
    tokens, best = estimate.prompt_tokens, estimate.best
    saved = estimate.native_ttft_seconds - best.ttft_seconds
    gain = estimate.gain(best)
    if tokens < min_tokens:
        return Advice(
            tokens, False, f"no: prompts under min_tokens ({min_tokens}) travel packed, with nothing taken off them"
        )
    if all(choice.break_even_gbps <= gbps for choice in estimate.choices if choice.b < 1):
        limit = max(choice.break_even_gbps for choice in estimate.choices)
        return Advice(
            tokens,
            False,
            f"no: the link is too fast. {gbps:g} Gb/s is above every break-even here, the highest is {limit:.3g} Gb/s",
        )
    if tokens < SHORT_PROMPT_TOKENS and saved < SHORT_PROMPT_SECONDS:
        return Advice(
            tokens,
            False,
            f"no: under {SHORT_PROMPT_TOKENS:,} tokens there is little to save: {max(saved, 0) * 1e3:.0f} ms of "
            f"{estimate.native_ttft_seconds * 1e3:.0f} ms at most, with {best.profile}",
        )
    if gain < LEAST_GAIN:
        return Advice(
            tokens,
            False,
            f"no: {best.profile}, the best, saves {max(gain, 0):.0%} of the time to the first token: prefill is what "
            "it waits for",
        )
    modelled = f". Modelled: links above {FASTEST_MEASURED_GBPS:g} Gb/s were not measured"
    beyond = modelled if gbps > FASTEST_MEASURED_GBPS else ""
    return Advice(tokens, True, f"yes: {_named(best, estimate)}{_without_probe(estimate)}{beyond}")


def _named(choice: Choice, estimate: PromptEstimate) -> str:
    return (
        f"{choice.profile} takes the time to the first token from {estimate.native_ttft_seconds * 1e3:,.0f} to "
        f"{choice.ttft_seconds * 1e3:,.0f} ms ({choice.ttft_seconds / estimate.native_ttft_seconds:.2f} of native)"
    )


def _without_probe(estimate: PromptEstimate) -> str:
    if not estimate.best.needs_probe:
        return ""
    open_to_all = [choice for choice in estimate.choices if not choice.needs_probe]
    if not open_to_all:
        return ", once `spectrumkv probe` has passed this model"
    other = min(open_to_all, key=lambda choice: choice.ttft_seconds)
    share = other.ttft_seconds / estimate.native_ttft_seconds
    return f", once `spectrumkv probe` has passed this model; without a probe {other.profile}: {share:.2f} of native"
