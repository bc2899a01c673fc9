"""What is known of a profile's loss, to choose between profiles of the same bytes and time."""

from __future__ import annotations

import math

from spectrumkv_sglang.tuning.settings import SHIPPED_CANDIDATES

VISIBLE_KL = 0.01
"""Above it a loss shows in perplexity and top-1: the target of `balanced` (docs/results/quality.md). Nats a token."""


def published_kl(profile: str) -> float:
    """KL from native, nats a token, that the controller's shipped candidates state for a profile: the worst of the
    models in docs/results/quality.md. Infinite for a profile that is not among them."""
    return min((one.kl for one in SHIPPED_CANDIDATES if one.profile == profile), default=math.inf)
