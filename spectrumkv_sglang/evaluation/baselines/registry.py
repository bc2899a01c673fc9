"""Baselines by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from spectrumkv_sglang.evaluation.baselines.affine_keys import AffineKeysBaseline
from spectrumkv_sglang.evaluation.baselines.channel_keys import ChannelKeysBaseline
from spectrumkv_sglang.evaluation.baselines.kivi import KiviBaseline
from spectrumkv_sglang.evaluation.baselines.paper import PaperBalancedBaseline, PaperGreedyBaseline
from spectrumkv_sglang.evaluation.baselines.pdtrim import DropTokensBaseline
from spectrumkv_sglang.evaluation.baselines.row_groups import RowGroupsBaseline
from spectrumkv_sglang.evaluation.prefix import Method
from spectrumkv_sglang.evaluation.scorers import evaluated_scorers
from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.profiles.profile import Profile, TierPrecision
from spectrumkv_sglang.profiles.tier import Tier

FIXED: Mapping[str, Method] = MappingProxyType(
    {
        "kivi-2": KiviBaseline(2, 128),
        "kivi-4": KiviBaseline(4, 128),
        "kivi-2-w32": KiviBaseline(2, 32),
        "kivi-4-w32": KiviBaseline(4, 32),
        **{f"kvquant-{bits}": ChannelKeysBaseline(bits, before_rotation=True) for bits in (2, 3, 4)},
        **{f"channel-{bits}": ChannelKeysBaseline(bits, before_rotation=False) for bits in (2, 3, 4)},
        **{f"affine-row-{bits}": AffineKeysBaseline(bits, by_deviation=False) for bits in (2, 3, 4)},
        **{f"affine-row-{bits}-sd": AffineKeysBaseline(bits, by_deviation=True) for bits in (3, 4)},
        **{f"group-{size}-{bits}": RowGroupsBaseline(bits, size) for size in (16, 32) for bits in (2, 3, 4)},
        "paper-balanced": PaperBalancedBaseline(),
    }
)
"""Whose bytes follow from what they do."""

BUDGETED: Mapping[str, Callable[[float], Method]] = MappingProxyType(
    {"paper-greedy": PaperGreedyBaseline, "pdtrim": DropTokensBaseline}
)
"""That are made for a budget, wire / native bytes."""

OTHER_SCORERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"random-tiers": ("random",), "position-tiers": ("position",), "scorers": evaluated_scorers()}
)
"""A profile under its budget, once more with tiers from each of these scorers."""


def _one_tier(name: str, keys: Precision, values: Precision) -> Profile:
    return Profile(name=name, tiers={Tier.HIGH: TierPrecision(keys=keys, values=values)})


UNIFORM: Mapping[str, Profile] = MappingProxyType(
    {
        "int8": _one_tier("int8", Precision.INT8, Precision.INT8),
        "fp8": _one_tier("fp8", Precision.FP8_E4M3, Precision.FP8_E4M3),
        "int4": _one_tier("int4", Precision.INT4, Precision.INT4),
        "int8-keys-int4-values": _one_tier("int8-keys-int4-values", Precision.INT8, Precision.INT4),
    }
)
"""Profiles of one tier, by the code that serves."""


def baseline_names() -> tuple[str, ...]:
    """Every baseline's name, sorted."""
    return tuple(sorted({*FIXED, *BUDGETED, *OTHER_SCORERS, *UNIFORM}))
