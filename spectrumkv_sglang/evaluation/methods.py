"""From names on the command line to methods: ``NAME[@BUDGET][:SCORER]``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from spectrumkv_sglang.config import load_config
from spectrumkv_sglang.evaluation.baselines.registry import BUDGETED, FIXED, OTHER_SCORERS, UNIFORM, baseline_names
from spectrumkv_sglang.evaluation.errors import EvaluationError
from spectrumkv_sglang.evaluation.prefix import Method, NativeMethod
from spectrumkv_sglang.evaluation.scorers import Observation, evaluated_scorers, observation, served_name
from spectrumkv_sglang.evaluation.served_path import ProfileMethod
from spectrumkv_sglang.loopback.plan import NATIVE

_SPEC = re.compile(r"(?P<name>.+?)(?:@(?P<budget>[^@:]*))?(?::(?P<scorer>[^@:/]*))?")


@dataclass(frozen=True)
class MethodSpec:
    """A name with what stands behind it. ``text`` is as it was given and labels the row."""

    text: str
    name: str
    budget: float | None
    scorer: str | None


def parse_spec(text: str, option: str) -> MethodSpec:
    """Read ``NAME[@BUDGET][:SCORER]``.

    Raises:
        EvaluationError: not of that form, a budget outside 0..1, or an unknown scorer.
    """
    match = _SPEC.fullmatch(text)
    if match is None:
        raise EvaluationError(f"{option} {text!r}: expected NAME, NAME@BUDGET, NAME:SCORER or NAME@BUDGET:SCORER")
    budget, scorer = match["budget"], match["scorer"]
    try:
        number = None if budget is None else float(budget)
    except ValueError:
        number = 0.0
    if number is not None and not 0 < number <= 1:
        raise EvaluationError(f"{option} {text!r}: {budget!r} is no budget; expected wire / native bytes, such as 0.35")
    if scorer is not None and scorer not in evaluated_scorers():
        raise EvaluationError(
            f"{option} {text!r}: unknown scorer {scorer!r}; choose from {', '.join(evaluated_scorers())}"
        )
    return MethodSpec(text, match["name"], number, scorer)


def make_methods(
    profiles: Sequence[str],
    baselines: Sequence[str],
    *,
    budget: float | None,
    scorer: str,
    seed: int,
    folder: Path,
) -> dict[str, Method]:
    """Methods by label, native first.

    Args:
        profiles: specs of profiles: shipped names or paths of .yaml files.
        baselines: specs of baselines. Those that need a budget and state none are made once for each budget of the
            profiles; "random-tiers", "position-tiers" and "scorers" for each profile that has tiers to choose from.
        budget: of profiles that state none.
        scorer: of profiles that state none.
        seed: of the random scorer.
        folder: where the profiles of uniform baselines are written; it must stay until the methods are used up.

    Raises:
        EvaluationError, ConfigError: a spec that names nothing, or a budget that its profile does not reach.
    """
    if not profiles and not baselines:
        raise EvaluationError(
            "nothing to evaluate: give --profile (spectrumkv profiles lists the shipped ones) or --baseline "
            f"({', '.join(baseline_names())})"
        )
    if scorer not in evaluated_scorers():
        raise EvaluationError(f"--scorer {scorer!r}: unknown; choose from {', '.join(evaluated_scorers())}")
    methods: dict[str, Method] = {NATIVE: NativeMethod()}
    tiered: dict[str, ProfileMethod] = {}
    for text in profiles:
        spec = parse_spec(text, "--profile")
        method = _profile_method(spec.name, f"--profile {text}", spec.budget or budget, spec.scorer or scorer, seed)
        if method.budget is None and spec.budget is not None:
            raise EvaluationError(f"--profile {text}: a profile of one tier has one size; leave @{spec.budget:g} out")
        methods[text] = method
        if method.budget is not None:
            tiered[text] = method
    for text in baselines:
        for label, baseline in _baseline_methods(parse_spec(text, "--baseline"), tiered, scorer, seed, folder).items():
            methods.setdefault(label, baseline)
    return methods


def observations(methods: Mapping[str, Method]) -> dict[str, Observation]:
    """What has to be observed for the scores that the methods read, by the scorer's name."""
    names = sorted({method.scorer for method in methods.values() if method.scorer is not None})
    return {name: seen for name in names if (seen := observation(name)) is not None}


def _baseline_methods(
    spec: MethodSpec, tiered: Mapping[str, ProfileMethod], scorer: str, seed: int, folder: Path
) -> dict[str, Method]:
    option = f"--baseline {spec.text}"
    if spec.name in OTHER_SCORERS:
        if spec.budget is not None or spec.scorer is not None:
            raise EvaluationError(f"{option}: it takes budget and profile from --profile; leave @ and : out")
        _require_tiered(tiered, option)
        there = {(label.partition(":")[0], method.named_scorer) for label, method in tiered.items()}
        return {
            f"{label.partition(':')[0]}:{other}": _rescored(method, other, option, seed)
            for label, method in tiered.items()
            for other in OTHER_SCORERS[spec.name]
            if (label.partition(":")[0], other) not in there
        }
    if spec.name in BUDGETED:
        if spec.scorer is not None:
            raise EvaluationError(f"{option}: leave :{spec.scorer} out")
        if spec.budget is not None:
            return {spec.text: BUDGETED[spec.name](spec.budget)}
        _require_tiered(tiered, f"{option} without a budget ({spec.name}@0.35)")
        budgets = dict.fromkeys(method.config.budget for method in tiered.values())
        return {f"{spec.name}@{budget:g}": BUDGETED[spec.name](budget) for budget in budgets}
    if spec.budget is not None or spec.scorer is not None:
        raise EvaluationError(f"{option}: its bytes follow from what it does; leave @ and : out")
    if spec.name in FIXED:
        return {spec.text: FIXED[spec.name]}
    if spec.name in UNIFORM:
        path = folder / f"{spec.name}.yaml"
        document = UNIFORM[spec.name].model_dump(mode="json", exclude_none=True)
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        return {spec.text: _profile_method(str(path), option, None, scorer, seed)}
    raise EvaluationError(f"{option}: unknown; choose from {', '.join(baseline_names())}")


def _require_tiered(tiered: Mapping[str, ProfileMethod], option: str) -> None:
    if not tiered:
        raise EvaluationError(f"{option} is compared with a profile of several tiers: give one, such as spectrum@0.35")


def _rescored(method: ProfileMethod, scorer: str, option: str, seed: int) -> ProfileMethod:
    return _profile_method(method.config.profile, option, method.config.budget, scorer, seed)


def _profile_method(profile: str, option: str, budget: float | None, scorer: str, seed: int) -> ProfileMethod:
    """``budget`` is for a profile with tiers to choose from; one of a single tier goes without."""
    options: dict[str, tuple[str, Any]] = {
        "profile": (option, profile),
        "scorer": (option, served_name(scorer)),
        "seed": ("--seed", seed),
        "min_tokens": (option, 0),
    }
    config = load_config(None, {}, options)
    if budget is not None and len(config.loaded_profile.tiers_defined) > 1:
        config = load_config(None, {}, {**options, "budget": (option, budget)})
    description = config.loaded_profile.description.strip() or config.loaded_profile.name
    return ProfileMethod(config, description, scorer)
