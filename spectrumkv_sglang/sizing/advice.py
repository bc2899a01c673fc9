"""Whether it is worth turning on, in plain words."""

from __future__ import annotations

from dataclasses import dataclass

from spectrumkv_sglang.sizing.estimate import Choice, PromptEstimate
from spectrumkv_sglang.sizing.loss import VISIBLE_KL, published_kl

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


def advise(
    estimate: PromptEstimate, *, min_tokens: int, gbps: float, lead: str, lead_is: str, speeds_assumed: bool
) -> Advice:
    """What an operator with such prompts should do.

    Args:
        lead: profile that servers would run, named first where it gains.
        lead_is: what it is to the operator, such as "the default".
        speeds_assumed: no packing was measured.
    """
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
    text = f"yes: {_named(estimate, lead, lead_is)}"
    if speeds_assumed:
        text += ". At a GPU's packing speed, which was assumed: a CPU is slower and may bring nothing (--measure there)"
    if gbps > FASTEST_MEASURED_GBPS:
        text += f". Modelled: links above {FASTEST_MEASURED_GBPS:g} Gb/s were not measured"
    return Advice(tokens, True, text)


def _named(estimate: PromptEstimate, lead: str, lead_is: str) -> str:
    """The profile that servers would run first, then what is faster or loses less, then what needs no probe."""
    best, unprobed = estimate.best, estimate.best_unprobed
    first = next((one for one in estimate.choices if one.profile == lead), best)
    if estimate.gain(first) < LEAST_GAIN:
        first = best
    notes = [lead_is] if first.profile == lead else []
    notes += ["after a probe"] if first.needs_probe else []
    about = f" ({', '.join(notes)})" if notes else ""
    parts = [
        f"{first.profile}{about} {estimate.share(first):.2f} of native's time to the first token, "
        f"{first.ttft_seconds * 1e3:,.0f} instead of {estimate.native_ttft_seconds * 1e3:,.0f} ms"
    ]
    if best is not first and best is not unprobed:
        parts.append(f"{best.profile} {estimate.share(best):.2f}{_against(best, first)}")
    if unprobed is not None and unprobed is not first and (first.needs_probe or best.needs_probe):
        gains = estimate.gain(unprobed) > 0
        parts.append(
            f"without a probe {unprobed.profile} {estimate.share(unprobed):.2f}"
            if gains
            else "without a probe nothing is faster than native"
        )
    return "; ".join(parts)


def _against(other: Choice, first: Choice) -> str:
    if other.b > first.b:
        loss = " with more bytes, which lose less"
    else:
        loss = " at a visible loss" if published_kl(other.profile) > VISIBLE_KL else ""
    return f"{loss}, after a probe" if other.needs_probe else loss
