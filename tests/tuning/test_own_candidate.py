"""The server's own profile among the candidates: found by what it does, never by its name alone."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from spectrumkv_sglang.profiles.profile import load_profile
from spectrumkv_sglang.tuning.own_candidate import own_candidate
from spectrumkv_sglang.tuning.settings import ControllerSettings

IMPOSTOR = """
name: int8
tiers:
  high: {keys: int4, values: int2}
"""


def settings(*candidates: dict[str, object], **fields: object) -> ControllerSettings:
    return ControllerSettings(candidates=candidates, **fields)  # type: ignore[arg-type]


def test_a_configured_candidate_is_the_servers_own_profile() -> None:
    configured = settings({"profile": "int8", "budget": 0.6, "kl": 0.002, "speed": 1e9})
    own = own_candidate(configured, load_profile("int8"), 0.6, 0.51)
    assert (own.name, own.b, own.kl, own.speed) == ("int8@0.6", 0.51, 0.002, 1e9)


def test_a_file_with_a_shipped_profiles_name_is_not_that_profile(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(IMPOSTOR)
    configured = settings({"profile": str(path), "budget": 0.6, "kl": 3.0})
    own = own_candidate(configured, load_profile("int8"), 0.6, 0.51)
    assert (own.name, own.kl) == ("own:int8@0.6", math.inf)
    itself = own_candidate(configured, load_profile(str(path)), 0.6, 0.2)
    assert (itself.name, itself.kl) == ("int8@0.6", 3.0)


@pytest.mark.parametrize(
    ("profile", "budget", "fields", "kl"),
    [
        ("int8", 0.7, {}, 0.002),
        ("int8", 0.5, {}, math.inf),
        ("balanced", 0.7, {}, math.inf),
        ("balanced", 0.7, {"safe_kl": 0.2}, 0.2),
        ("native-packed", 1.0, {}, 0.0),
    ],
)
def test_what_its_loss_is_known_from(profile: str, budget: float, fields: dict[str, object], kl: float) -> None:
    configured = settings({"profile": "int8", "budget": 0.6, "kl": 0.002}, **fields)
    assert own_candidate(configured, load_profile(profile), budget, 0.5).kl == kl
