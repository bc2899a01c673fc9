"""The right answers of a soak: what a plain server says, alone and under load."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from soak_client import Reply, ask_plain
from soak_judging import Expected, first_difference
from soak_prompts import SoakPrompt

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.launch.servers import SGLangServer


class SoakError(SpectrumKVError):
    """The run cannot begin."""


def asked_plain(server: SGLangServer, prompts: Sequence[SoakPrompt], clients: int) -> tuple[list[list[Expected]], str]:
    """Each prompt alone, then all by ``clients`` at once, with prefix hits; how the two differ, in words."""
    alone = [expected_of(ask_plain(server, one.text, one.new_tokens)) for one in prompts]
    with ThreadPoolExecutor(clients) as pool:
        together = [
            expected_of(reply) for reply in pool.map(lambda one: ask_plain(server, one.text, one.new_tokens), prompts)
        ]
    differ = [
        (a, first_difference(b.tokens, a.tokens)) for a, b in zip(alone, together, strict=True) if a.tokens != b.tokens
    ]
    shifts = [
        abs(one - other)
        for a, b in zip(alone, together, strict=True)
        if a.tokens == b.tokens
        for one, other in zip(a.logprobs, b.logprobs, strict=True)
    ]
    gap = max((a.gaps[position] for a, position in differ), default=0.0)
    noise = (
        f"the plain server under load gave {len(differ)} of {len(prompts)} answers otherwise than alone "
        f"(first choice at most {gap:.1e} above the second there) and shifted log-probabilities by at most "
        f"{max(shifts, default=0.0):.1e}"
    )
    return [[a] if a.tokens == b.tokens else [a, b] for a, b in zip(alone, together, strict=True)], noise


def expected_of(reply: Reply) -> Expected:
    """The answer as something to compare with.

    Raises:
        SoakError: the request failed.
    """
    if reply.error:
        raise SoakError(f"a server without faults did not answer: {reply.error}; see its log")
    return Expected(reply.tokens, reply.logprobs, reply.seconds_best, reply.gaps)
