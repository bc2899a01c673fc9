"""Time to the first token with native and with tiered KV, by the link model: what ``spectrumkv size`` computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.profiles.chunk_plan import ChunkPlan, plan_chunk
from spectrumkv_sglang.profiles.tier import Tier
from spectrumkv_sglang.sizing.loss import published_kl
from spectrumkv_sglang.sizing.speeds import SpeedTable
from spectrumkv_sglang.transfer.chunk_planner import CHUNK_MESSAGE_BYTES, SUBCHUNK_MESSAGE_BYTES
from spectrumkv_sglang.tuning.link_model import Transfer, native_seconds
from spectrumkv_sglang.verification.narrow_precisions import narrow_precisions

PLANNED_TOKENS = 4096
"""Most tokens that b is planned for: longer chunks come to the same."""

AS_FAST = 0.05
"""Longer by this share is as fast: the estimates are not closer than that to what pairs took (`tests/sizing`)."""

EQUAL = 0.01
"""Profiles whose b and time differ by less than this share differ in what they lose alone."""


@dataclass(frozen=True)
class Cluster:
    """What KV travels through.

    Attributes:
        bandwidth: goodput of the link between a prefill and a decode host, bytes a second; its ranks share it.
        tp: tensor-parallel ranks of each server.
        chunk_tokens: SGLang's --chunked-prefill-size.
        slot_bytes: largest payload.
    """

    bandwidth: float
    tp: int
    chunk_tokens: int
    slot_bytes: int

    @property
    def rank_bandwidth(self) -> float:
        """Bytes a second of each rank when all of them send."""
        return self.bandwidth / self.tp


@dataclass(frozen=True)
class Choice:
    """One profile at one prompt length.

    Attributes:
        b: wire bytes over native bytes, everything counted, as planned by the code that serves.
        wire_bytes: of the prompt, all ranks together.
        transfer_seconds: of all chunks, one after the other.
        ttft_seconds: prefill and what of the transfer does not hide behind it.
        break_even_gbps: rate below which a chunk's transfer is sooner than a native one; 0: never.
        needs_probe: whether a server uses these tiers only with the record of a probe that passed.
        speed: where the speeds are from.
    """

    profile: str
    budget: float
    b: float
    wire_bytes: int
    transfer_seconds: float
    ttft_seconds: float
    break_even_gbps: float
    needs_probe: bool
    speed: str


@dataclass(frozen=True)
class PromptEstimate:
    """One prompt length: native, and every profile."""

    prompt_tokens: int
    native_bytes: int
    prefill_seconds: float
    native_transfer_seconds: float
    native_ttft_seconds: float
    choices: list[Choice]

    @property
    def best(self) -> Choice:
        """Of the choices that are nearly as fast as the fastest the one with most bytes: fewer bytes lose more."""
        limit = min(choice.ttft_seconds for choice in self.choices) * (1 + AS_FAST)
        chosen = max(
            (choice for choice in self.choices if choice.ttft_seconds <= limit),
            key=lambda choice: (choice.b, -choice.ttft_seconds),
        )
        return _least_loss(chosen, self.choices)

    @property
    def best_unprobed(self) -> Choice | None:
        """The fastest of the choices that need no probe; None where each one does."""
        unprobed = [choice for choice in self.choices if not choice.needs_probe]
        if not unprobed:
            return None
        return _least_loss(min(unprobed, key=lambda choice: choice.ttft_seconds), unprobed)

    def share(self, choice: Choice) -> float:
        """The choice's time to the first token, over native's."""
        return choice.ttft_seconds / self.native_ttft_seconds

    def gain(self, choice: Choice) -> float:
        """Share of the native time to the first token that the choice saves."""
        return 1.0 - self.share(choice)


def _least_loss(chosen: Choice, choices: Sequence[Choice]) -> Choice:
    """Of the choices with the bytes and the time of ``chosen`` the one that is known to lose least."""
    equals = [
        choice
        for choice in choices
        if abs(choice.b - chosen.b) <= EQUAL * chosen.b
        and abs(choice.ttft_seconds - chosen.ttft_seconds) <= EQUAL * chosen.ttft_seconds
    ]
    return min(equals, key=lambda choice: (published_kl(choice.profile), choice.needs_probe, choice.ttft_seconds))


def planned_share(config: SpectrumKVConfig, rank: KVGeometry, tokens: int) -> float:
    """b of a chunk of ``tokens`` under ``config``, by ``plan_chunk`` on made-up importance: codes, scales, tier maps,
    control messages and padding counted."""
    rows = min(tokens, PLANNED_TOKENS)
    profile = config.loaded_profile
    table = profile.table(rank, config.allowed_tiers)
    forced = np.zeros(rows, dtype=bool)
    forced[: config.sink_tokens] = True
    plan: ChunkPlan = plan_chunk(
        np.random.default_rng(0).random(rows, dtype=np.float32),
        rank,
        table,
        config.budget,
        config.slot_bytes,
        forced,
        profile.usable_tiers(config.allowed_tiers),
        message_bytes_per_subchunk=SUBCHUNK_MESSAGE_BYTES + CHUNK_MESSAGE_BYTES + len(table.to_bytes()),
    )
    return plan.achieved


def needs_probe(config: SpectrumKVConfig) -> bool:
    """Whether the configured tiers need a probe's record: the low tier, or a precision under 8 bits."""
    profile = config.loaded_profile
    usable = profile.usable_tiers(config.allowed_tiers)
    table = profile.table(profile.nominal_geometry(), config.allowed_tiers)
    return Tier.LOW in usable or bool(narrow_precisions(table, usable))


def estimate(
    prompt_tokens: int,
    rank: KVGeometry,
    cluster: Cluster,
    policies: Sequence[SpectrumKVConfig],
    speeds: SpeedTable,
    prefill_seconds: Callable[[int], float],
) -> PromptEstimate:
    """Native and every policy for a prompt.

    SGLang sends a chunk while the next one is prefilled: a transfer starts when its chunk is there and the one before
    has ended. Prefix caches are empty, servers idle.

    Args:
        prefill_seconds: of the first so many tokens of a prompt.
    """
    chunks = _chunks(prompt_tokens, cluster.chunk_tokens)
    ends = list(np.cumsum(chunks))
    ready = [prefill_seconds(int(end)) for end in ends]
    per_token = rank.native_bytes_per_token

    def native(tokens: int) -> float:
        return native_seconds(tokens * per_token, cluster.rank_bandwidth)

    choices = []
    for config in policies:
        speed = speeds.of(config.loaded_profile.name)
        share = planned_share(config, rank, min(prompt_tokens, cluster.chunk_tokens))

        def transfer(tokens: int, share: float = share) -> Transfer:
            return Transfer.in_slots(tokens * per_token, share, payload_bytes=cluster.slot_bytes)

        taken = [speed.seconds(transfer(tokens), share, cluster.rank_bandwidth) for tokens in chunks]
        limit = speed.break_even(transfer(chunks[0]), share) * cluster.tp
        choices.append(
            Choice(
                profile=config.loaded_profile.name,
                budget=config.budget,
                b=share,
                wire_bytes=round(prompt_tokens * per_token * cluster.tp * share),
                transfer_seconds=sum(taken),
                ttft_seconds=_last_arrival(ready, taken),
                break_even_gbps=limit * 8 / 1e9,
                needs_probe=needs_probe(config),
                speed=speed.source,
            )
        )
    taken = [native(tokens) for tokens in chunks]
    return PromptEstimate(
        prompt_tokens=prompt_tokens,
        native_bytes=prompt_tokens * per_token * cluster.tp,
        prefill_seconds=ready[-1],
        native_transfer_seconds=sum(taken),
        native_ttft_seconds=_last_arrival(ready, taken),
        choices=choices,
    )


def _chunks(tokens: int, size: int) -> list[int]:
    whole, rest = divmod(tokens, size)
    return [size] * whole + ([rest] if rest else [])


def _last_arrival(ready: Sequence[float], taken: Sequence[float]) -> float:
    end = 0.0
    for start, seconds in zip(ready, taken, strict=True):
        end = max(end, start) + seconds
    return end
