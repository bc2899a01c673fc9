"""Settings of the online controller: section ``controller:`` of the configuration."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from spectrumkv_sglang.profiles.errors import ProfileError
from spectrumkv_sglang.profiles.profile import load_profile

MOST_CANDIDATES = 16
MOST_KL = 100.0


def _known_profile(name: str) -> str:
    try:
        load_profile(name)
    except ProfileError as error:
        raise ValueError(str(error)) from error
    return name


ProfileName = Annotated[str, AfterValidator(_known_profile)]
"""Of a shipped profile, or the path of a .yaml file that can be read."""


def true_is_no_number(cls: type[BaseModel], value: Any, info: ValidationInfo) -> Any:
    """Before-validator of every field of a settings class: pydantic would read ``true`` as the number 1."""
    if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
        raise ValueError("this field is no switch: expected a value, not true or false")
    return value


def none_from_empty(value: Any) -> Any:
    """Before-validator of optional fields: an empty environment variable clears the setting."""
    return None if isinstance(value, str) and not value.strip() else value


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    _true_is_no_number = field_validator("*", mode="before")(true_is_no_number)


def candidate_label(profile: str, budget: float) -> str:
    """Name of a candidate in metrics, logs and ``safe``: the profile's own name and the budget."""
    return f"{profile}@{budget:g}"


class CandidateSettings(_Strict):
    """A profile at a budget, and what it costs in accuracy."""

    profile: ProfileName = Field(description="name of a shipped precision profile, or path of a .yaml file")
    budget: float = Field(gt=0, le=1, description="b, wire bytes / native bytes")
    kl: float = Field(ge=0, le=MOST_KL, description="expected KL divergence from native; nats a token")
    speed: float | None = Field(
        default=None,
        gt=0,
        le=1e15,
        description="native bytes a second through pack and unpack, until some were measured",
    )

    @property
    def label(self) -> str:
        """`candidate_label` of this one."""
        return candidate_label(load_profile(self.profile).name, self.budget)


SHIPPED_CANDIDATES = (
    CandidateSettings(profile="native-packed", budget=1.0, kl=0.0),
    CandidateSettings(profile="near-lossless", budget=0.5, kl=0.0001),
    CandidateSettings(profile="int8", budget=0.52, kl=0.002),
    CandidateSettings(profile="balanced", budget=0.3, kl=0.005),
    CandidateSettings(profile="aggressive", budget=0.2, kl=0.05),
)
"""Their KL is the worst of the three models in docs/results/quality.md, rounded up."""


def _from_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, object_pairs_hook=_without_twins)
    except RecursionError as error:
        raise ValueError("expected a list of {profile, budget, kl}, got brackets within brackets") from error


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError(f"a field stands twice in {{{', '.join(name for name, _ in pairs)}}}")
    return fields


OptionalNumber = Annotated[float | None, BeforeValidator(none_from_empty)]


class ControllerSettings(_Strict):
    """How profile and budget are chosen for each request, instead of one for all."""

    enabled: bool = Field(default=False, description="true: profile and budget are chosen for each request")
    dry_run: bool = Field(default=False, description="true: decide, log and count, and send natively")
    candidates: Annotated[tuple[CandidateSettings, ...], BeforeValidator(_from_json)] = Field(
        default=SHIPPED_CANDIDATES,
        min_length=1,
        max_length=MOST_CANDIDATES,
        description="what is chosen from: a list of {profile, budget, kl}",
    )
    safe: str = Field(
        default="",
        description="candidate, as profile@budget, where nothing is known of the link; empty: the server's own profile",
    )
    safe_kl: OptionalNumber = Field(
        default=None,
        ge=0,
        le=MOST_KL,
        description="expected KL of the server's own profile, where no candidate states it; nats a token",
    )
    ttft_target_s: OptionalNumber = Field(
        default=None, gt=0, le=3600, description="from a request's arrival on prefill to its KV on decode; seconds"
    )
    max_kl: OptionalNumber = Field(
        default=None, ge=0, le=MOST_KL, description="candidates that lose more are not used; nats a token"
    )
    explore: float = Field(
        default=0.02, ge=0, le=0.5, description="share of decisions that try a neighbour of the best candidate"
    )
    switch_gain: float = Field(
        default=0.03, ge=0, le=1, description="another candidate must be this much faster than the one in use"
    )
    sample_max_age_s: float = Field(
        default=600.0, gt=0, le=86400, description="a link not written to for this long is unknown again; seconds"
    )
    seed: int = Field(default=0, ge=0, le=2**63 - 1, description="of the exploration")

    @model_validator(mode="after")
    def _names_fit(self) -> ControllerSettings:
        labels = [candidate.label for candidate in self.candidates]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"candidates holds {', '.join(twice)} twice: keep one of each profile and budget")
        if self.safe and self.safe not in labels:
            raise ValueError(f"safe is {self.safe!r}, expected one of the candidates {', '.join(labels)}, or nothing")
        return self
