"""Where a KV head's share of its layer's cost comes from."""

from __future__ import annotations

from enum import Enum


class HeadCost(str, Enum):
    """``MEASURED``: KL with that head alone rounded. ``ATTENTION``: how much of its attention goes far back
    (`head_scores`), the same for keys and values."""

    MEASURED = "measured"
    ATTENTION = "attention"
