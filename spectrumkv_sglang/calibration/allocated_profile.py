"""An allocation as an ordinary profile, and as the YAML file of one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import yaml
from numpy.typing import NDArray

from spectrumkv_sglang.calibration.allocation import Allocation
from spectrumkv_sglang.calibration.candidates import PART_NAMES, row_cost
from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.profiles.profile import HeadOverride, LayerOverride, Profile, TierPrecision, Transforms
from spectrumkv_sglang.profiles.tier import Tier


def make_profile(allocation: Allocation, name: str, description: str, budget: float) -> Profile:
    """LOW travels as the allocation says, MID one candidate up everywhere, HIGH (sinks, last page) native.

    Without a cell that has a candidate above its own there is no MID.
    """
    maps = {Tier.LOW: allocation.cells}
    if not np.array_equal(allocation.stepped_up(), allocation.cells):
        maps[Tier.MID] = allocation.stepped_up()
    tiers = {Tier.HIGH: TierPrecision(keys=Precision.NATIVE, values=Precision.NATIVE)}
    layer_overrides: list[LayerOverride] = []
    head_overrides: list[HeadOverride] = []
    for tier in sorted(maps):
        base = [_cheapest(maps[tier][:, kv]) for kv in (0, 1)]
        tiers[tier] = TierPrecision(keys=base[0], values=base[1])
        for kv in (0, 1):
            by_layer, by_head = _overrides(maps[tier][:, kv], base[kv], tier, kv)
            layer_overrides += by_layer
            head_overrides += by_head
    transforms = allocation.candidates
    return Profile(
        name=name,
        description=description,
        budget=budget,
        tiers=tiers,
        layer_overrides=layer_overrides,
        head_overrides=head_overrides,
        transform=Transforms(keys=transforms.keys.transform, values=transforms.values.transform),
    )


def profile_yaml(profile: Profile, comments: Sequence[str]) -> str:
    """The profile's file, with a comment above."""
    document = profile.model_dump(mode="json", exclude_defaults=True)
    lines = [f"# {comment}".rstrip() for comment in comments]
    body = yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
    return "\n".join([*lines, body])


def _cheapest(cells: NDArray[np.uint8]) -> Precision:
    """What a tier states, and overrides raise: a budget is checked on a nominal model, which may have more layers than
    this one, and those then count least."""
    return min((Precision(int(value)) for value in np.unique(cells)), key=row_cost)


def _overrides(
    cells: NDArray[np.uint8], base: Precision, tier: Tier, kv: int
) -> tuple[list[LayerOverride], list[HeadOverride]]:
    """What differs from the base precision in ``cells`` [layers, kv_heads]: whole layers, and single heads."""
    whole: dict[int, list[int]] = defaultdict(list)
    single: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    for layer, row in enumerate(cells):
        values = np.unique(row).tolist()
        if len(values) == 1:
            if values[0] != base:
                whole[values[0]].append(layer)
            continue
        for value in values:
            if value != base:
                single[value, tuple(np.flatnonzero(row == value).tolist())].append(layer)
    field = PART_NAMES[kv]
    return (
        [
            LayerOverride(layers=layers, tiers=[tier], **{field: Precision(value)})
            for value, layers in sorted(whole.items(), key=lambda item: row_cost(Precision(item[0])))
        ],
        [
            HeadOverride(layers=layers, heads=list(heads), tiers=[tier], **{field: Precision(value)})
            for (value, heads), layers in sorted(single.items())
        ],
    )
