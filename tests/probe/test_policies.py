"""The policies that a probe derives from the configuration that would serve."""

from pathlib import Path

import numpy as np
import pytest

from spectrumkv_sglang.config import load_config
from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.loopback.plan import LoopbackPlan, load_policy
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.layout import bytes_per_row
from spectrumkv_sglang.probe.policies import LOWEST, one_tier_profile, probe_budget, write_policies
from spectrumkv_sglang.profiles.chunk_plan import plan_chunk, protected_rows
from spectrumkv_sglang.profiles.profile import Profile, load_profile, shipped_profiles
from spectrumkv_sglang.profiles.tier import Tier

BF16 = KVGeometry(layers=4, kv_heads=2, head_dim=64, v_head_dim=64, page_size=1, dtype="bfloat16")
PROTECTED = """
name: protected
tiers:
  high: {keys: native, values: native}
  mid: {keys: int8, values: int8}
  low: {keys: int4, values: int4}
layer_overrides:
  - {layers: first, keys: native}
  - {layers: last, tiers: [low], values: int8}
  - {layers: [1], tiers: [mid], keys: native}
head_overrides:
  - {heads: [1], tiers: [low], keys: int8}
"""


@pytest.fixture
def protected(tmp_path: Path) -> Profile:
    path = tmp_path / "protected.yaml"
    path.write_text(PROTECTED)
    return load_profile(path)


@pytest.mark.parametrize("tier", list(Tier))
def test_one_tier_is_what_the_profile_gives_to_it_overrides_included(protected: Profile, tier: Tier) -> None:
    whole = protected.table(BF16).values
    derived = one_tier_profile(protected, tier)
    assert derived.tiers_defined == ((Tier.HIGH,) if tier is Tier.HIGH else (Tier.HIGH, Tier.LOW))
    table = derived.table(BF16).values
    assert np.array_equal(table[Tier.HIGH], whole[Tier.HIGH])  # the sinks', as served
    assert np.array_equal(table[Tier.LOW], whole[tier])


@pytest.mark.parametrize(("part", "kept"), [("keys", 0), ("values", 1)])
def test_a_part_leaves_the_other_native(protected: Profile, part: str, kept: int) -> None:
    whole = protected.table(BF16).values[Tier.LOW]
    cells = one_tier_profile(protected, Tier.LOW, part).table(BF16).values[Tier.LOW]  # type: ignore[arg-type]
    assert np.array_equal(cells[:, kept], whole[:, kept])
    assert (cells[:, 1 - kept] == Precision.NATIVE).all()


@pytest.mark.parametrize("name", shipped_profiles())
def test_each_tier_is_judged_through_the_transforms_that_it_is_served_with(name: str) -> None:
    profile = load_profile(name)
    served = profile.table(BF16)
    for tier in profile.tiers_defined:
        judged = one_tier_profile(profile, tier).table(BF16)
        assert np.array_equal(judged.transforms, served.transforms)


@pytest.mark.parametrize("name", ["balanced", "aggressive", "spectrum", "k8v4", "near-lossless"])
@pytest.mark.parametrize(
    "geometry",
    [
        BF16,
        KVGeometry(layers=30, kv_heads=3, head_dim=64, v_head_dim=64, page_size=1, dtype="float32"),
        KVGeometry(layers=18, kv_heads=1, head_dim=256, v_head_dim=256, page_size=1, dtype="bfloat16"),
        KVGeometry(layers=80, kv_heads=8, head_dim=128, v_head_dim=128, page_size=1, dtype="bfloat16"),
    ],
    ids=["heads of 64", "float32", "heads of 256", "80 layers"],
)
def test_all_but_the_sinks_are_judged_in_their_tier_on_every_pool(
    tmp_path: Path, name: str, geometry: KVGeometry
) -> None:
    """Servers never send a sink in a lower tier than high; of the others those that matter most must not be spared."""
    config = load_config(None, {"SPECTRUMKV_PROFILE": name})
    assert set(LOWEST) <= set(write_policies(config, geometry, tmp_path))
    plan = LoopbackPlan(base="", policies=str(tmp_path), results="", lowest=LOWEST)
    for policy in LOWEST:
        judged = load_policy(plan, policy)
        sinks, recent = protected_rows(0, 2048, 2048, judged.sink_tokens, judged.recent_tokens)
        chunk = plan_chunk(
            np.random.default_rng(1).pareto(1, 2048),
            geometry,
            judged.loaded_profile.table(geometry),
            judged.budget,
            1 << 28,
            sinks,
            judged.loaded_profile.tiers_defined,
            400,
            preferred=recent,
        )
        assert np.flatnonzero(chunk.tiers != Tier.LOW).tolist() == [0, 1, 2, 3], policy


@pytest.mark.parametrize("profile", ["spectrum", "k8v4", "balanced"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_judged_budget_uses_the_lowest_tier_where_it_can(profile: str, dtype: str) -> None:
    geometry = KVGeometry(layers=4, kv_heads=2, head_dim=128, v_head_dim=128, page_size=1, dtype=dtype)
    config = load_config(None, {"SPECTRUMKV_PROFILE": profile})
    budget = probe_budget(config, geometry)
    cost = bytes_per_row(geometry, config.loaded_profile.table(geometry)) / geometry.native_bytes_per_token
    assert config.reachable_budget < budget <= config.budget
    if dtype == "bfloat16":
        assert cost[Tier.LOW] < budget < cost[Tier.MID]


def test_a_chosen_budget_below_the_middle_is_judged_as_it_is() -> None:
    config = load_config(None, {"SPECTRUMKV_BUDGET": "0.3"})
    assert probe_budget(config, BF16) == 0.3


@pytest.mark.parametrize(
    ("profile", "names"),
    [
        ("spectrum", ("policy", "random", "mid", "low", "low_keys", "low_values")),
        ("balanced", ("policy", "random", "mid", "low", "low_keys", "low_values")),
        ("spectrum-safe", ("policy", "random", "mid")),
        ("int8", ("policy", "high")),
        ("native-packed", ("policy",)),
    ],
)
def test_every_policy_is_a_configuration_that_loads(tmp_path: Path, profile: str, names: tuple[str, ...]) -> None:
    config = load_config(None, {"SPECTRUMKV_PROFILE": profile, "SPECTRUMKV_SINK_TOKENS": "7"})
    assert write_policies(config, BF16, tmp_path) == names
    for name in names:
        loaded = load_config(tmp_path / f"{name}.yaml", {})
        assert loaded.make_scorer() == config.make_scorer() or name == "random"
        assert loaded.min_tokens == 0
    assert load_config(tmp_path / "policy.yaml", {}).sink_tokens == 7
