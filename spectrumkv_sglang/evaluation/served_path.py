"""A profile's way: planned, packed, checked and unpacked by the code that serves."""

from __future__ import annotations

import numpy as np

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.evaluation.prefix import MovedKV, PrefixKV
from spectrumkv_sglang.evaluation.scorers import observation
from spectrumkv_sglang.loopback.in_place import InPlaceTransfer


class ProfileMethod:
    """Moves KV as a server with ``config`` does: ``plan_chunk`` under the budget, sub-chunks of ``slot_bytes``,
    ``pack_with_checksum``, ``unpack_if_intact``. Wire bytes are those that serving counts: codes, scales, prologues,
    alignment, tier maps, precision tables and control messages.

    Args:
        config: profile, budget, scorer and the rest of what serving would have.
        description: one line for people.
        scorer: where importance comes from, if that is a way to observe that does not serve (``evaluation.scorers``);
            None: the scorer of ``config``.
    """

    def __init__(self, config: SpectrumKVConfig, description: str, scorer: str | None = None) -> None:
        self._config = config
        self._scorer = config.scorer if scorer is None else scorer
        self.description = description
        self._tiered = len(config.loaded_profile.usable_tiers(config.allowed_tiers)) > 1

    @property
    def budget(self) -> float | None:
        """The budget that tiers are chosen under; None for a profile of one tier."""
        return self._config.budget if self._tiered else None

    @property
    def scorer(self) -> str | None:
        """The scorer whose observed scores are needed."""
        return self._scorer if self._tiered and observation(self._scorer) is not None else None

    @property
    def named_scorer(self) -> str:
        """The scorer by name, one that observes nothing too."""
        return self._scorer

    @property
    def config(self) -> SpectrumKVConfig:
        """The configuration that would serve so."""
        return self._config

    def move(self, prefix: PrefixKV) -> MovedKV:
        """Pack the whole prefix as one chunk and unpack it into a copy of the pool."""
        view = prefix.copied_view()
        scores = prefix.scores[self.scorer] if self.scorer else None
        transfer = InPlaceTransfer(view, self._config, scores)
        pages = np.arange(prefix.tokens, dtype=np.int64)
        transfer.pack(prefix.name, pages, prefix.tokens)
        record = transfer.unpack(prefix.name)
        return MovedKV(view.buffers, record.wire_bytes, tokens_by_tier=record.tokens_by_tier)
