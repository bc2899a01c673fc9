"""What names on the command line come to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.evaluation.baselines.registry import baseline_names
from spectrumkv_sglang.evaluation.methods import MethodSpec, make_methods, observations, parse_spec
from spectrumkv_sglang.evaluation.prefix import Method
from spectrumkv_sglang.evaluation.scorers import evaluated_scorers


def methods(tmp_path: Path, profiles: list[str], baselines: list[str] | None = None, **more: Any) -> dict[str, Method]:
    options = {"budget": None, "scorer": "window", "seed": 0, **more}
    return make_methods(profiles, baselines or [], folder=tmp_path, **options)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("int8", ("int8", None, None)),
        ("spectrum@0.35", ("spectrum", 0.35, None)),
        ("spectrum:exact", ("spectrum", None, "exact")),
        ("./a/b.yaml@.3:random", ("./a/b.yaml", 0.3, "random")),
    ],
)
def test_a_spec_has_up_to_three_parts(text: str, spec: tuple[str, float | None, str | None]) -> None:
    assert parse_spec(text, "--profile") == MethodSpec(text, *spec)


def test_native_comes_first_and_labels_are_what_was_given(tmp_path: Path) -> None:
    made = methods(tmp_path, ["spectrum@0.35", "int8"], ["kivi-4"])
    assert list(made) == ["native", "spectrum@0.35", "int8", "kivi-4"]
    assert [method.budget for method in made.values()] == [None, 0.35, None, None]


def test_budget_and_scorer_of_profiles_that_state_none(tmp_path: Path) -> None:
    made = methods(tmp_path, ["spectrum", "spectrum@0.4:random", "int8"], budget=0.3, scorer="exact")
    assert [made[name].budget for name in ("spectrum", "spectrum@0.4:random", "int8")] == [0.3, 0.4, None]
    assert list(observations(made)) == ["exact"]


def test_baselines_take_the_budgets_of_the_profiles(tmp_path: Path) -> None:
    made = methods(tmp_path, ["spectrum@0.35", "spectrum@0.5", "int8"], ["pdtrim", "paper-greedy@0.4", "random-tiers"])
    assert list(made)[4:] == [
        *("pdtrim@0.35", "pdtrim@0.5", "paper-greedy@0.4"),
        *("spectrum@0.35:random", "spectrum@0.5:random"),
    ]
    assert made["spectrum@0.5:random"].budget == 0.5
    assert made["spectrum@0.5:random"].scorer is None


def test_scorers_are_a_row_for_each_at_the_profile_s_bytes(tmp_path: Path) -> None:
    made = methods(tmp_path, ["spectrum@0.35", "int8", "spectrum@0.35:exact"], ["scorers"])
    others = [name for name in evaluated_scorers() if name not in ("window", "exact")]
    assert list(made)[4:] == [f"spectrum@0.35:{name}" for name in others]
    assert {"random", "last-64", "strided", "value-norm", "exact-raw"} <= set(others)
    assert all(made[f"spectrum@0.35:{name}"].budget == 0.35 for name in others)
    rules = {"random", "position", "uniform"}
    assert set(observations(made)) == set(evaluated_scorers()) - rules


def test_every_baseline_can_be_named(tmp_path: Path) -> None:
    made = methods(tmp_path, ["spectrum@0.35"], list(baseline_names()))
    scorers_without_rows = set(evaluated_scorers()) - {"window", "random", "position"}
    assert len(made) == 2 + len(baseline_names()) - len({"scorers"}) + len(scorers_without_rows)
    assert all(method.description for method in made.values())


@pytest.mark.parametrize(
    ("profiles", "baselines", "message"),
    [
        ([], [], "nothing to evaluate: give --profile"),
        (["int9"], [], "unknown profile 'int9'"),
        (["spectrum@0.2"], [], r"below 0\.266.*--profile spectrum@0\.2"),
        (["spectrum@2"], [], "'2' is no budget"),
        (["spectrum@"], [], "'' is no budget"),
        (["spectrum:best"], [], "unknown scorer 'best'; choose from window"),
        (["int8@0.5"], [], "a profile of one tier has one size; leave @0.5 out"),
        (["int8"], ["nothing"], r"--baseline nothing: unknown; choose from affine-row-2.*pdtrim"),
        (["int8"], ["pdtrim"], r"without a budget \(pdtrim@0.35\) is compared with a profile of several tiers"),
        (["int8"], ["kivi-2@0.3"], "leave @ and : out"),
        (["spectrum"], ["random-tiers@0.3"], "it takes budget and profile from --profile"),
    ],
)
def test_refusals(tmp_path: Path, profiles: list[str], baselines: list[str], message: str) -> None:
    with pytest.raises(SpectrumKVError, match=message):
        methods(tmp_path, profiles, baselines)
