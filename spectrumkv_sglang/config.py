"""Configuration of a SpectrumKV server: one YAML file and ``SPECTRUMKV_*`` environment variables.

The file is named by ``--spectrumkv-config`` or ``SPECTRUMKV_CONFIG``. It holds the fields of ``SpectrumKVConfig`` at
its top level, or, as launch configs do, under ``spectrumkv:``. A variable ``SPECTRUMKV_<FIELD>`` beats the file,
except for ``probe``, which only a file can hold; the fields of ``controller:`` are ``SPECTRUMKV_CONTROLLER_<FIELD>``.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    ByteSize,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from spectrumkv_sglang.config_file import (
    CONFIG_PATH_VARIABLE,
    LAUNCH_CONFIG_KEYS,
    ConfigError,
    read_config_file,
    suggestion,
)
from spectrumkv_sglang.importance.scorers import Scorer, make_scorer, scorer_names
from spectrumkv_sglang.lossless.codec import CodecName
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.layout import bytes_per_row
from spectrumkv_sglang.profiles.profile import Profile, is_profile_path, load_profile
from spectrumkv_sglang.profiles.tier import Tier, require_high
from spectrumkv_sglang.tuning.settings import ControllerSettings, ProfileName, none_from_empty, true_is_no_number
from spectrumkv_sglang.verification.enforcement import TierDecision, decide_tiers
from spectrumkv_sglang.verification.fingerprint import ModelFingerprint
from spectrumkv_sglang.verification.record import ProbedPolicy, ProbeRecord, profile_digest

__all__ = [
    "CONFIG_PATH_VARIABLE",
    "ENV_PREFIX",
    "LAUNCH_CONFIG_KEYS",
    "ConfigError",
    "SpectrumKVConfig",
    "load_config",
]

ENV_PREFIX = "SPECTRUMKV_"
PROBE_FIELD = "probe"
CONTROLLER_FIELD = "controller"
_CONTROLLER_PREFIX = f"{ENV_PREFIX}{CONTROLLER_FIELD.upper()}_"
_NOT_FIELDS = (CONFIG_PATH_VARIABLE, "SPECTRUMKV_ACTIVE", "SPECTRUMKV_LOOPBACK")
_TEST_PREFIX = "SPECTRUMKV_TEST_"
_JUDGED_FROM_A_FILE = ("scorer", "scorer_window", "scorer_stride_samples", "sink_tokens", "recent_tokens")

MIN_SLOT_BYTES = 64 * 1024
MAX_SLOT_BYTES = 1024 * 1024 * 1024
SLOT_ALIGNMENT = 4096


def _bytes_from_text(value: Any) -> Any:
    return int(TypeAdapter(ByteSize).validate_python(value)) if isinstance(value, str) else value


def _tiers_from_text(value: Any) -> Any:
    labels = value.strip("[] ").split(",") if isinstance(value, str) else value
    if not isinstance(labels, (list, tuple)):
        raise ValueError("expected a list of tiers such as [high, mid, low]")
    tiers = [label if isinstance(label, Tier) else Tier.from_label(str(label).strip(" '\"")) for label in labels]
    return tuple(sorted(set(tiers)))


def _ports_from_value(value: Any) -> Any:
    text = str(value).strip() if isinstance(value, (int, str)) else value
    if text == "" or text is None:
        return None
    first, dash, last = text.partition("-") if isinstance(text, str) else ("", "", "")
    ends = (first.strip(), last.strip() if dash else first.strip())
    if not all(end.isascii() and end.isdigit() and len(end) <= 5 for end in ends):
        raise ValueError("expected a port or a range of ports such as 18000 or 18000-18015")
    low, high = int(ends[0]), int(ends[1])
    if not 1 <= low <= high <= 65535:
        raise ValueError("expected ports from 1 to 65535, the lower one first")
    return f"{low}-{high}"


Bytes = Annotated[int, BeforeValidator(_bytes_from_text)]
OptionalText = Annotated[str | None, BeforeValidator(none_from_empty)]
OptionalPath = Annotated[Path | None, BeforeValidator(none_from_empty)]


class SpectrumKVConfig(BaseSettings):
    """All settings. Build it with :func:`load_config`; constructing it directly reads neither file nor environment."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, validate_default=True)

    enabled: bool = Field(default=True, description="false: every chunk takes SGLang's own path")
    budget: float = Field(
        default=0.55,
        gt=0,
        le=1,
        description="b, wire bytes / native bytes, all counted; unset: the profile's, or its least if more",
    )
    allowed_tiers: Annotated[tuple[Tier, ...], BeforeValidator(_tiers_from_text)] = Field(
        default=(Tier.HIGH, Tier.MID, Tier.LOW), description="token tiers that may be used; high is always among them"
    )
    profile: ProfileName = Field(
        default="balanced", description="name of a shipped precision profile, or path of a .yaml file"
    )
    codec: CodecName = Field(
        default=CodecName.none,
        description="lossless compression of payloads, where a link is slow enough for it to pay: none or zstd",
    )
    sink_tokens: int = Field(
        default=4, ge=0, le=65536, description="first tokens of a prompt that are always HIGH; tokens"
    )
    recent_tokens: int = Field(
        default=64, ge=0, le=1048576, description="last tokens of a prompt, the first to leave the lowest tier; tokens"
    )
    min_tokens: int = Field(default=64, ge=0, le=1048576, description="shorter prompts travel native, packed; tokens")
    scorer: str = Field(default="window", description="where token importance comes from: " + ", ".join(scorer_names()))
    scorer_window: int = Field(
        default=32, ge=0, le=65536, description="last queries of a chunk that are observed; queries"
    )
    scorer_stride_samples: int = Field(
        default=32, ge=0, le=65536, description="further queries observed, evenly spread over the chunk; queries"
    )
    slot_bytes: Bytes = Field(
        default=16 * 1024 * 1024,
        ge=MIN_SLOT_BYTES,
        le=MAX_SLOT_BYTES,
        multiple_of=SLOT_ALIGNMENT,
        description="size of a landing and of a staging slot; bytes, or text such as 16MiB",
    )
    landing_slots: int = Field(
        default=16, ge=1, le=4096, description="decode: slots that payloads land in; slots a process"
    )
    staging_slots: int = Field(
        default=8, ge=1, le=4096, description="prefill: slots that payloads are packed in; slots"
    )
    slots_per_chunk: int = Field(
        default=6, ge=1, le=4096, description="landing slots that one chunk may hold at once; slots"
    )
    open_timeout_s: float = Field(default=5.0, gt=0, le=3600, description="prefill waits this long for slots; seconds")
    slot_wait_s: float = Field(
        default=1.0, ge=0, le=3600, description="decode waits this long for a free slot; seconds"
    )
    write_timeout_s: float = Field(default=60.0, gt=0, le=3600, description="longest write of one payload; seconds")
    unpack_timeout_s: float = Field(
        default=30.0, gt=0, le=3600, description="longest wait for an unpacked payload; seconds"
    )
    quarantine_s: float = Field(
        default=90.0, ge=0, le=86400, description="rest of a slot after a failed write; seconds"
    )
    lease_s: float = Field(
        default=120.0, gt=0, le=86400, description="decode takes back slots that prefill left; seconds"
    )
    control_host: OptionalText = Field(default=None, description="address that decode's control channel binds to; host")
    control_port: Annotated[str | None, BeforeValidator(_ports_from_value)] = Field(
        default=None,
        description="port, or range of ports with one for each rank, of decode's control channel: 18000-18015; random",
    )
    control_secret_file: OptionalPath = Field(
        default=None, description="file with the secret that prefill and decode share, the same on both; path"
    )
    tune_tcp: bool = Field(
        default=True, description="over TCP, set Mooncake's variables that are not set; `spectrumkv doctor` lists them"
    )
    transfer_log: OptionalPath = Field(default=None, description="file that gets one JSON line a chunk; path")
    seed: int = Field(default=0, ge=0, le=2**63 - 1, description="of the random scorer")
    strict: bool = Field(
        default=False, description="true: a server whose probe record does not fit its model refuses to start"
    )
    require_probe: bool = Field(
        default=True, description="false: for experiments, use the allowed tiers whether or not the model was probed"
    )
    probe_max_kl: float = Field(
        default=0.03, ge=0, le=10, description="limit of a probe on text: KL divergence from native; nats a token"
    )
    probe_max_dppl_pct: float = Field(
        default=5.0, ge=0, le=1000, description="limit of a probe on text: rise of the perplexity; %"
    )
    probe_min_top1: float = Field(
        default=0.9, ge=0, le=1, description="limit of a probe on text: share of equal most likely tokens"
    )
    controller: ControllerSettings = Field(
        default=ControllerSettings(), description="how profile and budget are chosen for each request; a section"
    )
    probe: ProbeRecord | None = Field(
        default=None, description="record of `spectrumkv probe`, which writes it; not for editing"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Keyword arguments only: ``load_config`` merges file and environment, and knows each value's source."""
        return (init_settings,)

    _true_is_no_number = field_validator("*", mode="before")(true_is_no_number)

    @field_validator("allowed_tiers")
    @classmethod
    def _high_is_allowed(cls, tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
        return require_high(tiers)

    @field_validator("scorer")
    @classmethod
    def _scorer_is_known(cls, name: str) -> str:
        make_scorer(name)
        return name

    @model_validator(mode="after")
    def _no_contradictions(self) -> SpectrumKVConfig:
        if self.scorer_window + self.scorer_stride_samples == 0:
            raise ValueError("scorer_window and scorer_stride_samples must not both be 0: no query would be observed")
        if self.lease_s <= self.write_timeout_s:
            raise ValueError(
                f"lease_s ({self.lease_s:g}) must exceed write_timeout_s ({self.write_timeout_s:g}): decode would take "
                "back a slot that prefill may still be writing"
            )
        if self.slots_per_chunk > self.landing_slots:
            raise ValueError(
                f"slots_per_chunk ({self.slots_per_chunk}) must not exceed landing_slots ({self.landing_slots}): lower "
                "the one or raise the other"
            )
        if self.codec is not CodecName.none and self.controller.enabled:
            raise ValueError(
                f"codec ({self.codec.value}) and controller.enabled cannot go together: the controller expects each "
                "candidate to take its b on the wire, and would not learn what a codec takes off; set codec: none, or "
                "controller: {enabled: false}"
            )
        if self.strict and not self.require_probe:
            raise ValueError("strict and require_probe: false contradict each other: leave one of them out")
        if "budget" not in self.model_fields_set:
            # Nobody asked for the default: what the profile is made for, and at least what its tiers reach.
            wanted = self.loaded_profile.budget or self.budget
            object.__setattr__(self, "budget", max(wanted, float(_rounded_up(self.reachable_budget))))
        if self.budget < self.reachable_budget:
            tiers = ", ".join(tier.label for tier in self.loaded_profile.usable_tiers(self.allowed_tiers))
            raise ValueError(
                f"budget {self.budget:g} is below {_rounded_up(self.reachable_budget)}, the least that tiers {tiers} "
                f"of profile {self.profile!r} reach on a usual model (heads of 128, bfloat16, scales counted; "
                "`spectrumkv profiles` tells others): raise budget or leave it out, allow lower tiers, or use a "
                "profile with lower precisions"
            )
        return self

    @cached_property
    def loaded_profile(self) -> Profile:
        """The profile that ``profile`` names."""
        return load_profile(self.profile)

    @cached_property
    def reachable_budget(self) -> float:
        """`least_budget` for 2-byte heads of 128 (``Profile.nominal_geometry``)."""
        return self.least_budget(self.loaded_profile.nominal_geometry())

    def least_budget(self, geometry: KVGeometry) -> float:
        """Least b that the allowed tiers of the profile reach: their cheapest tier's bytes, scales included and
        headers left out, over native bytes."""
        table = self.loaded_profile.table(geometry, self.allowed_tiers)
        return float(bytes_per_row(geometry, table).min()) / geometry.native_bytes_per_token

    @property
    def control_ports(self) -> range:
        """Ports that ``control_port`` allows; empty: any."""
        if self.control_port is None:
            return range(0)
        low, high = self.control_port.split("-")
        return range(int(low), int(high) + 1)

    def decide_tiers(self, fingerprint: Callable[[], ModelFingerprint]) -> TierDecision:
        """Tiers that a server with this configuration may use. ``fingerprint`` gives the served model's and is called
        only when it matters; its FingerprintError counts as a changed model."""
        decision = decide_tiers(
            profile=self.loaded_profile,
            allowed_tiers=self.allowed_tiers,
            policy=self.probed_policy(),
            record=self.probe,
            require_probe=self.require_probe,
            fingerprint=fingerprint,
        )
        return replace(decision, probe_flags=self._probe_flags())

    def _probe_flags(self) -> str:
        """Options with which ``spectrumkv probe`` judges this policy, quoted for a shell. Only a file can tell it of
        the fields other than profile and budget."""
        profile = str(Path(self.profile).resolve()) if is_profile_path(self.profile) else self.profile
        options = ["--profile", profile, "--budget", str(self.budget)]
        fields = type(self).model_fields
        if any(getattr(self, name) != fields[name].default for name in _JUDGED_FROM_A_FILE):
            options += ["--config", "FILE_WITH_YOUR_SETTINGS"]
        return shlex.join(options)

    def restricted_to(self, tiers: tuple[Tier, ...]) -> SpectrumKVConfig:
        """This configuration with ``tiers`` in place of ``allowed_tiers``.

        The budget stays, even below what ``tiers`` reach: then chunks are sent at the smallest size they do reach.
        """
        return self._changed(allowed_tiers=tiers)

    def with_policy(self, profile: str, budget: float) -> SpectrumKVConfig:
        """This configuration with another profile and budget; the budget may be below what the profile reaches."""
        return self._changed(profile=profile, budget=budget)

    def _changed(self, **changes: Any) -> SpectrumKVConfig:
        # A copy, which is not validated again; properties that were computed from other fields must not come along.
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_construct(self.model_fields_set, **{**fields, **changes})

    def probed_policy(self) -> ProbedPolicy:
        """The settings that decide what is lost, as a probe records them."""
        return ProbedPolicy(
            profile=self.loaded_profile.name,
            profile_digest=profile_digest(self.loaded_profile),
            budget=self.budget,
            scorer=self.scorer,
            scorer_window=self.scorer_window,
            scorer_stride_samples=self.scorer_stride_samples,
            sink_tokens=self.sink_tokens,
            recent_tokens=self.recent_tokens,
        )

    def make_scorer(self) -> Scorer:
        """The scorer that the ``scorer*`` fields and ``seed`` describe."""
        return make_scorer(
            self.scorer, window=self.scorer_window, stride_samples=self.scorer_stride_samples, seed=self.seed
        )


def load_config(
    path: str | Path | None = None,
    environ: Mapping[str, str] = os.environ,
    options: Mapping[str, tuple[str, Any]] = MappingProxyType({}),
) -> SpectrumKVConfig:
    """Configuration from a file and the environment.

    Args:
        path: YAML file; None: the one that ``SPECTRUMKV_CONFIG`` names, if any.
        environ: environment variables; an empty value counts as not set, except that it clears ``control_host``,
            ``control_port``, ``control_secret_file`` and ``transfer_log``.
        options: field -> (command line option that gave it, value); they beat both.

    Raises:
        ConfigError: names the file, variable or option, the field, the value and what is allowed.
    """
    path = Path(path) if path is not None else _path_from(environ)
    from_file = read_config_file(path, SpectrumKVConfig.model_fields) if path is not None else {}
    from_environ = _read_environ(environ)
    from_options = {field: value for field, (_, value) in options.items()}
    controller = _read_controller_environ(environ)
    section = from_file.get(CONTROLLER_FIELD)
    if controller and (section is None or isinstance(section, dict)):
        from_file = {**from_file, CONTROLLER_FIELD: {**(section or {}), **controller}}
    try:
        return SpectrumKVConfig(**{**from_file, **from_environ, **from_options})
    except ValidationError as error:
        sources = {field: f"{ENV_PREFIX}{field.upper()}" for field in sorted(from_environ)}
        sources |= {f"{CONTROLLER_FIELD}.{field}": f"{_CONTROLLER_PREFIX}{field.upper()}" for field in controller}
        sources |= {field: option for field, (option, _) in options.items()}
        problems = [_describe(problem, sources, path) for problem in error.errors()]
        raise ConfigError("SpectrumKV configuration: " + "; ".join(problems)) from error


class _UndecodedEnvironment(EnvSettingsSource):
    """Values of a given environment as the strings they are; the fields' validators read them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__(SpectrumKVConfig)
        self.env_vars = {name.lower(): value for name, value in environ.items()}

    def prepare_field_value(self, field_name: str, field: FieldInfo, value: Any, value_is_complex: bool) -> Any:
        return value


def _path_from(environ: Mapping[str, str]) -> Path | None:
    value = environ.get(CONFIG_PATH_VARIABLE)
    return Path(value) if value else None


def _read_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    sections = (PROBE_FIELD, CONTROLLER_FIELD)
    fields = {f"{ENV_PREFIX}{name.upper()}" for name in SpectrumKVConfig.model_fields if name not in sections}
    of_controller = {f"{_CONTROLLER_PREFIX}{name.upper()}" for name in ControllerSettings.model_fields}
    probe_variable = f"{ENV_PREFIX}{PROBE_FIELD.upper()}"
    if probe_variable in environ:
        raise ConfigError(
            f"environment variable {probe_variable}: a probe record cannot come from the environment; unset it and "
            f"name the file that `spectrumkv probe` wrote with --spectrumkv-config or {CONFIG_PATH_VARIABLE}"
        )
    for variable in environ:
        known = variable in (fields | of_controller) or variable in _NOT_FIELDS or variable.startswith(_TEST_PREFIX)
        if variable.startswith(ENV_PREFIX) and not known:
            meant = suggestion(variable, fields | of_controller)
            raise ConfigError(f"environment variable {variable} is no SpectrumKV setting{meant}: unset it")
    ours = {variable: environ[variable] for variable in environ if variable in fields}
    names = ("CONTROL_HOST", "CONTROL_PORT", "CONTROL_SECRET_FILE", "TRANSFER_LOG")
    clearable = {f"{ENV_PREFIX}{name}" for name in names}
    return _UndecodedEnvironment({name: value for name, value in ours.items() if value.strip() or name in clearable})()


def _read_controller_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Fields of ``controller:`` that the environment states, as the strings they are; an empty one clears a limit."""
    named = {name: environ.get(f"{_CONTROLLER_PREFIX}{name.upper()}") for name in ControllerSettings.model_fields}
    clearable = ("safe", "safe_kl", "ttft_target_s", "max_kl")
    return {name: text for name, text in named.items() if text is not None and (text.strip() or name in clearable)}


def _describe(problem: Any, given: Mapping[str, str], path: Path | None) -> str:
    """One validation problem, told to an operator. ``given``: variable or option of each field not from the file."""
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        sources = ([str(path)] if path else []) + list(dict.fromkeys(given.values()))
        return f"{message} (from {', '.join(sources) or 'the defaults'})"
    field = str(problem["loc"][0])
    if field == PROBE_FIELD:
        place = ".".join(str(part) for part in problem["loc"])
        return f"{path}: {place}: {message} ({_shown(problem['input'])}): run `spectrumkv probe` again, it writes this"
    if field == CONTROLLER_FIELD:
        return _describe_in_controller(problem["loc"][1:], problem["input"], message, given, path)
    source = given.get(field, f"{path}: {field}")
    source = f"environment variable {source}" if source.startswith(ENV_PREFIX) else source
    about = SpectrumKVConfig.model_fields[field].description
    return f"{source} = {problem['input']!r}: {message} ({field}: {about}{_allowed_range(field)})"


def _describe_in_controller(
    place: tuple[Any, ...], value: Any, message: str, given: Mapping[str, str], path: Path | None
) -> str:
    if not place and isinstance(value, Mapping):  # fields that contradict each other, wherever each comes from
        sources = [text for field, text in given.items() if field.startswith(f"{CONTROLLER_FIELD}.")]
        sources = ([str(path)] if path else []) + sources
        return f"{CONTROLLER_FIELD}: {message} (from {', '.join(sources) or 'the defaults'})"
    name, fields = str(place[0]) if place else "", ControllerSettings.model_fields
    where = ".".join(str(part) for part in (CONTROLLER_FIELD, *place))
    variable = given.get(f"{CONTROLLER_FIELD}.{name}")
    source = f"environment variable {variable}" if variable else f"{path}: {where}"
    about = f"{name}: {fields[name].description}" if name in fields else f"the section holds {', '.join(fields)}"
    return f"{source} = {value!r}: {message} ({about})"


def _shown(value: Any) -> str:
    text = repr(value)
    return f"got {text}" if len(text) <= 80 else f"got {text[:77]}..."


def _allowed_range(field: str) -> str:
    words = {"gt": "above", "ge": "at least", "le": "at most", "multiple_of": "a multiple of"}
    limits = [
        f"{word} {getattr(constraint, name)}"
        for constraint in SpectrumKVConfig.model_fields[field].metadata
        for name, word in words.items()
        if hasattr(constraint, name)
    ]
    return f"; {', '.join(limits)}" if limits else ""


def _rounded_up(ratio: float) -> str:
    return f"{math.ceil(ratio * 1000 - 1e-9) / 1000:g}"
