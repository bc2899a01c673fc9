"""Decides, per chunk, which precision each token travels in (prefill side)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.importance.scorers import RuleScorer, Scorer
from spectrumkv_sglang.importance.scores import SlotScores
from spectrumkv_sglang.kernels.quantisers import quantiser_for
from spectrumkv_sglang.observability.reasons import Reason
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.profiles.chunk_plan import ChunkPlan, last_page_rows, plan_chunk, protected_rows
from spectrumkv_sglang.profiles.profile import Profile, load_profile
from spectrumkv_sglang.profiles.tier import Tier
from spectrumkv_sglang.transfer.outgoing_request import NOTHING_SENT, BytesSent
from spectrumkv_sglang.transfer.pool_view import PoolView
from spectrumkv_sglang.transfer.sending_policy import SendingPolicy
from spectrumkv_sglang.transfer.unpacking import pool_slots_of_pages
from spectrumkv_sglang.tuning.own_candidate import NATIVE_PACKED

# Size on the wire of one sub-chunk's COMMIT and DONE without tier map, encrypted: an upper bound (checked by a test).
SUBCHUNK_MESSAGE_BYTES = 384
# The same of one chunk's OPEN, GRANTED and CLOSE without the precision table.
CHUNK_MESSAGE_BYTES = 960


@dataclass(frozen=True)
class PlannedChunk:
    """A plan with the table it was made for and the reason that the metrics count."""

    plan: ChunkPlan
    table: PrecisionTable
    profile: str
    policy: SendingPolicy
    reason: Reason
    budget_missed: bool  # there were tiers to choose from, and even the smallest choice exceeds the budget


@dataclass(frozen=True)
class _TieredTable:
    """What a profile comes to with some of its tiers."""

    profile: Profile
    table: PrecisionTable
    usable_tiers: tuple[Tier, ...]

    @property
    def rows_share_parameters(self) -> bool:
        """Whether some precision of the table has scales that several rows share."""
        return any(quantiser_for(precision).block_rows > 1 for precision in self.table.precisions)


class ChunkPlanner:
    """Plans chunks of one prefill rank. Thread-safe: it only reads, but for tables that it may compute twice.

    Args:
        scores: attention scores by pool slot; None when the scorer is a rule, or there is one tier only.
    """

    def __init__(self, view: PoolView, config: SpectrumKVConfig, scorer: Scorer, scores: SlotScores | None) -> None:
        self._view, self._config, self._scorer, self._scores = view, config, scorer, scores
        self._configured = SendingPolicy.of(config)
        self._tables: dict[tuple[int, tuple[Tier, ...]], _TieredTable] = {}
        self._table(self._configured.profile, config.allowed_tiers)
        self._native_profile: Profile = load_profile(NATIVE_PACKED)
        self._native_table = view.table(self._native_profile)

    def plan(
        self,
        *,
        room: int,
        pages: np.ndarray,
        first_position: int,
        prompt_tokens: int,
        slot_bytes: int,
        sent_before: BytesSent = NOTHING_SENT,
        peer_allowed_tiers: Collection[int] = tuple(Tier),
        policy: SendingPolicy | None = None,
    ) -> PlannedChunk:
        """Plan the chunk that lies in prefill's ``pages`` and starts at ``first_position`` of the prompt.

        Scores on a GPU are read in the order of the calling thread's current stream, which must be behind the forward
        that wrote the chunk; the thread sleeps until they are there.

        Args:
            prompt_tokens: length of the whole prompt, or an upper bound of it rounded up to a page.
            slot_bytes: largest payload, bytes.
            sent_before: the room's earlier chunks; the budget holds for the room as a whole, so a chunk that was
                too short for it is made up for by the next.
            peer_allowed_tiers: tiers that decode accepts; only those that both sides allow are used.
            policy: profile, budget and tiers of the room; None: the configured ones.

        Raises:
            PayloadError: one page does not fit a slot.
        """
        policy = policy or self._configured
        rows = len(pages) * self._view.geometry.page_size
        if prompt_tokens < self._config.min_tokens:
            everything = np.ones(rows, dtype=bool)
            plan = self._plan(np.ones(rows, np.float32), self._native_table, 1.0, slot_bytes, everything, (Tier.HIGH,))
            return PlannedChunk(plan, self._native_table, NATIVE_PACKED, policy, Reason.BELOW_MIN_TOKENS, False)
        sinks, recent = protected_rows(
            first_position, rows, prompt_tokens, self._config.sink_tokens, self._config.recent_tokens
        )
        budget = sent_before.budget_of_next(rows * self._view.geometry.native_bytes_per_token, policy.budget)
        ours = self._table(policy.profile, policy.allowed_tiers)
        both = self._table(policy.profile, tuple(t for t in policy.allowed_tiers if t in peer_allowed_tiers))
        forced = sinks
        page_size = self._view.geometry.page_size
        if page_size > 1 and both.rows_share_parameters:
            # Unused slots of the last page hold garbage, which would spoil the scales of the rows beside them.
            forced = sinks | last_page_rows(first_position, rows, prompt_tokens, page_size)
        nothing_to_choose = len(both.usable_tiers) == 1
        importance = (
            np.ones(rows, np.float32) if nothing_to_choose else self._importance(room, pages, first_position, rows)
        )
        plan = self._plan(importance, both.table, budget, slot_bytes, forced, both.usable_tiers, preferred=recent)
        missed = len(both.usable_tiers) > 1 and not plan.reachable
        reason = Reason.TIERED if both.usable_tiers == ours.usable_tiers else Reason.PEER_FORBIDS_TIER
        return PlannedChunk(plan, both.table, policy.profile.name, policy, reason, missed)

    def _table(self, profile: Profile, allowed_tiers: tuple[Tier, ...]) -> _TieredTable:
        key = (id(profile), allowed_tiers)  # the table keeps the profile, so that no other gets its id
        found = self._tables.get(key)
        if found is None:
            found = self._tables[key] = _TieredTable(
                profile, self._view.table(profile, allowed_tiers), profile.usable_tiers(allowed_tiers)
            )
        return found

    def _plan(
        self,
        importance: np.ndarray,
        table: PrecisionTable,
        budget: float,
        slot_bytes: int,
        forced_high: np.ndarray,
        usable_tiers: tuple[Tier, ...],
        preferred: np.ndarray | None = None,
    ) -> ChunkPlan:
        return plan_chunk(
            importance,
            self._view.geometry,
            table,
            budget,
            slot_bytes,
            forced_high,
            usable_tiers,
            message_bytes_per_subchunk=SUBCHUNK_MESSAGE_BYTES + CHUNK_MESSAGE_BYTES + len(table.to_bytes()),
            preferred=preferred,
        )

    def _importance(self, room: int, pages: np.ndarray, first_position: int, rows: int) -> np.ndarray:
        if isinstance(self._scorer, RuleScorer):
            return self._scorer.scores(first_position, rows, room)
        if self._scores is None:
            raise ValueError(f"scorer {self._scorer.name} needs observed attention, but no scores are kept")
        slots = pool_slots_of_pages(pages, self._view.geometry.page_size)
        return self._scores.fetch(slots.numpy())
