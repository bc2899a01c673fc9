"""Profiles: what precision each piece of KV travels in, and what is done to it before, as small YAML files.

A profile is data, not code: a scheme such as "INT8 everywhere", "keys INT8, values INT4" or "first layer stays native"
is a file (see ``shipped/``). Adding one is adding a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError, model_validator

from spectrumkv_sglang.kernels.precision import CHANNEL_BLOCK_ROWS, Precision, labels_by_bits
from spectrumkv_sglang.kernels.quantisers import quantiser_for
from spectrumkv_sglang.kernels.transforms import Transform
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.profiles.errors import ProfileError
from spectrumkv_sglang.profiles.tier import TIER_COUNT, Tier
from spectrumkv_sglang.strict_yaml import load_yaml, read_text

_SHIPPED = "spectrumkv_sglang.profiles.shipped"
_OTHER_NAMES = {"spectrum": "spectrum-paper"}
"""Names that configurations may use for shipped profiles beside their own."""
_PRECISION_LABELS = {precision.name.lower(): precision for precision in Precision} | {"fp8": Precision.FP8_E4M3}
_KEYS, _VALUES = 0, 1


def _precision_from_label(value: Any) -> Any:
    if isinstance(value, Precision):
        return value
    if isinstance(value, str) and value in _PRECISION_LABELS:
        return _PRECISION_LABELS[value]
    raise ValueError(f"unknown precision {value!r}: choose from {', '.join(labels_by_bits())}")


def _transform_from_label(value: Any) -> Any:
    if isinstance(value, Transform):
        return value
    labels = {transform.name.lower(): transform for transform in Transform}
    if isinstance(value, str) and value in labels:
        return labels[value]
    raise ValueError(f"unknown transform {value!r}: choose from {', '.join(labels)}")


def _tier_from_label(value: Any) -> Any:
    return value if isinstance(value, Tier) else Tier.from_label(str(value))


def _label(value: Precision | Tier | Transform) -> str:
    return value.name.lower()


# Dumped as profile files spell them, so that a profile made by a program can be written as one.
ProfilePrecision = Annotated[Precision, BeforeValidator(_precision_from_label), PlainSerializer(_label)]
ProfileTransform = Annotated[Transform, BeforeValidator(_transform_from_label), PlainSerializer(_label)]
ProfileTier = Annotated[Tier, BeforeValidator(_tier_from_label), PlainSerializer(_label)]
AxisIndex = Annotated[int, Field(ge=0, strict=True)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TierPrecision(_Strict):
    """Precision of the keys and of the values of one tier."""

    keys: ProfilePrecision
    values: ProfilePrecision


class Transforms(_Strict):
    """What keys and values go through before they are quantised, and back after; native cells stay as they are.

    ``hadamard`` spreads what is large over the elements of a head, which few bits with one scale a row need.
    ``derope`` (keys only) undoes the rotary embedding, so that scales shared along the rows fit every row.
    """

    keys: ProfileTransform = Transform.IDENTITY
    values: ProfileTransform = Transform.IDENTITY

    @model_validator(mode="after")
    def _keys_alone_are_rotated(self) -> Transforms:
        if self.values is Transform.DEROPE:
            raise ValueError("derope is for keys: values carry no rotary embedding")
        return self


class LayerOverride(_Strict):
    """Another precision for some layers. ``keys`` or ``values`` left out stay as they are."""

    layers: Literal["all", "first", "last"] | Annotated[list[AxisIndex], Field(min_length=1)]
    tiers: Annotated[list[ProfileTier], Field(min_length=1)] | None = None
    """Tiers it is for; left out: every tier that the profile defines."""
    keys: ProfilePrecision | None = None
    values: ProfilePrecision | None = None

    @model_validator(mode="after")
    def _changes_something(self) -> LayerOverride:
        if self.keys is None and self.values is None:
            raise ValueError("an override states keys, values, or both")
        return self

    def layer_ids(self, layers: int) -> list[int]:
        """Layer ids of this override in a model of ``layers`` layers."""
        if isinstance(self.layers, str):
            return {"all": list(range(layers)), "first": [0], "last": [layers - 1]}[self.layers]
        return self.layers


class HeadOverride(LayerOverride):
    """Another precision for some KV heads, of all layers unless ``layers`` says otherwise (retrieval heads high,
    streaming heads low). Head ids are those of the tensor parallel rank that packs."""

    layers: Literal["all", "first", "last"] | Annotated[list[AxisIndex], Field(min_length=1)] = "all"
    heads: Annotated[list[AxisIndex], Field(min_length=1)]


class Profile(_Strict):
    """What precision each (tier, layer, K|V, KV head) travels in.

    HIGH must be defined; MID and LOW may be missing. Layer overrides apply in file order, then head overrides; a later
    one wins. At no cell may a lower tier take more bytes than a higher one. Beside lower tiers, HIGH holds precisions
    whose rows decode by themselves: rows are put there because they must not share scales with others. A profile of
    one tier, as probes judge each tier, may hold any.
    """

    name: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    description: str = ""
    budget: Annotated[float, Field(gt=0, le=1)] | None = None
    """b, wire bytes / native bytes, that the profile is made for: a configuration's default."""
    tiers: dict[ProfileTier, TierPrecision]
    layer_overrides: list[LayerOverride] = []
    head_overrides: list[HeadOverride] = []
    transform: Transforms = Transforms()

    @model_validator(mode="before")
    @classmethod
    def _codec_is_no_field(cls, document: Any) -> Any:
        if isinstance(document, dict) and "codec" in document:
            raise ValueError(
                "codec belongs in the launch config (codec: none or zstd), not in a profile: remove it here"
            )
        return document

    @model_validator(mode="after")
    def _tiers_are_consistent(self) -> Profile:
        if Tier.HIGH not in self.tiers:
            raise ValueError("tier high must be defined: sink tokens always travel in it")
        for override in [*self.layer_overrides, *self.head_overrides]:
            for tier in override.tiers or ():
                if tier not in self.tiers:
                    raise ValueError(f"an override names tier {tier.label}, which the profile does not define")
        self._refuse_high_in_blocks()
        self._refuse_costlier_lower_tier()
        return self

    @property
    def tiers_defined(self) -> tuple[Tier, ...]:
        """Tiers that the profile states, HIGH first."""
        return tuple(sorted(self.tiers))

    def usable_tiers(self, allowed_tiers: Iterable[Tier] | None = None) -> tuple[Tier, ...]:
        """Tiers both defined and allowed (None: all), HIGH first. ``ProfileError`` if ``allowed_tiers`` lacks HIGH."""
        if allowed_tiers is None:
            return self.tiers_defined
        allowed = frozenset(allowed_tiers)
        if Tier.HIGH not in allowed:
            raise ProfileError("allowed tiers must contain high: sink tokens always travel in it")
        return tuple(tier for tier in self.tiers_defined if tier in allowed)

    def table(self, geometry: KVGeometry, allowed_tiers: Iterable[Tier] | None = None) -> PrecisionTable:
        """Precision table of this profile for a model's KV.

        The table has rows for all three tiers. A tier that the profile does not define, or that is not allowed, gets
        the precisions of the next higher tier that is, so a token marked with it loses no accuracy.

        Raises:
            ProfileError: an override names a layer or head that the geometry does not have.
        """
        usable = self.usable_tiers(allowed_tiers)
        cells = self._cells(geometry.layers, geometry.kv_heads)
        for tier in Tier:
            cells[tier] = cells[max(candidate for candidate in usable if candidate <= tier)]
        transforms = np.array([[self.transform.keys, self.transform.values]] * geometry.layers, dtype=np.uint8)
        return PrecisionTable(cells, transforms)

    def nominal_geometry(self) -> KVGeometry:
        """A usual model to state costs on: 32 layers, 8 KV heads of 128, bfloat16; more if an override names more."""
        layers, heads = self._extent()
        return KVGeometry(
            layers=max(32, layers), kv_heads=max(8, heads), head_dim=128, v_head_dim=128, page_size=1, dtype="bfloat16"
        )

    def _extent(self) -> tuple[int, int]:
        """Least number of layers and KV heads that every override fits."""
        layer_ids = [
            layer
            for override in [*self.layer_overrides, *self.head_overrides]
            if not isinstance(override.layers, str)
            for layer in override.layers
        ]
        head_ids = [head for override in self.head_overrides for head in override.heads]
        return max(layer_ids, default=0) + 1, max(head_ids, default=0) + 1

    def _cells(self, layers: int, kv_heads: int) -> NDArray[np.uint8]:
        """Precisions uint8 [tiers, layers, K|V, kv_heads]; tiers that are not defined hold NATIVE."""
        cells = np.full((TIER_COUNT, layers, 2, kv_heads), Precision.NATIVE, dtype=np.uint8)
        for tier, precision in self.tiers.items():
            cells[tier, :, _KEYS] = precision.keys
            cells[tier, :, _VALUES] = precision.values
        for override in [*self.layer_overrides, *self.head_overrides]:
            layer_ids = override.layer_ids(layers)
            head_ids = override.heads if isinstance(override, HeadOverride) else list(range(kv_heads))
            self._refuse_outside("layer", layer_ids, layers)
            self._refuse_outside("KV head", head_ids, kv_heads)
            tier_ids = [int(tier) for tier in override.tiers or self.tiers_defined]
            for kv, changed in ((_KEYS, override.keys), (_VALUES, override.values)):
                if changed is not None:
                    cells[np.ix_(tier_ids, layer_ids, [kv], head_ids)] = changed
        return cells

    def _refuse_outside(self, axis: str, ids: Sequence[int], extent: int) -> None:
        outside = [index for index in ids if index >= extent]
        if outside:
            raise ProfileError(
                f"profile {self.name!r} overrides {axis} {outside[0]}, but this model has {extent} ({axis}s 0 to "
                f"{extent - 1} on this rank): use a profile made for this model"
            )

    def _any_model_cells(self) -> NDArray[np.uint8]:
        """Cells with room for a first, a last and an ordinary layer and head."""
        layers, heads = self._extent()
        return self._cells(layers + 2, heads + 1)

    def _refuse_high_in_blocks(self) -> None:
        if len(self.tiers) == 1:
            return
        for value in np.unique(self._any_model_cells()[Tier.HIGH]):
            precision = Precision(int(value))
            rows = quantiser_for(precision).block_rows
            if rows > 1:
                raise ValueError(
                    f"tier high travels in {_label(precision)}, where {rows} rows share scales: sink tokens, and the "
                    "unused slots of a last page, would spoil the rows beside them; give high native, int8, fp8 or int4"
                )

    def _refuse_costlier_lower_tier(self) -> None:
        cells = self._any_model_cells()
        cost = np.zeros(max(Precision) + 1, dtype=np.int64)
        for precision in Precision:
            quantiser = quantiser_for(precision)
            rows = CHANNEL_BLOCK_ROWS  # so that shared parameters count with a row's share
            cost[precision] = quantiser.code_bytes(rows, 1, 128, 2) + quantiser.param_bytes(rows, 1, 128)
        for higher, lower in zip(self.tiers_defined, self.tiers_defined[1:], strict=False):
            if (cost[cells[lower]] > cost[cells[higher]]).any():
                raise ValueError(f"tier {lower.label} takes more bytes than {higher.label}: lower tiers save bytes")


def shipped_profiles() -> tuple[str, ...]:
    """Names of the profiles that come with the package, sorted."""
    files = (entry.name for entry in resources.files(_SHIPPED).iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml")))


def is_profile_path(name_or_path: str) -> bool:
    """Whether ``load_profile`` takes the string for a file: it has a directory part or ends in .yaml or .yml."""
    return "/" in name_or_path or name_or_path.endswith((".yaml", ".yml"))


def load_profile(name_or_path: str | Path) -> Profile:
    """A shipped profile by name, or one from a YAML file.

    Raises:
        ProfileError: no such profile or file, or a file that is not a profile; says which file, field and choices.
    """
    source = str(name_or_path)
    if isinstance(name_or_path, Path) or is_profile_path(source):
        try:
            text = read_text(Path(source))
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(f"cannot read profile file {source}: {error}") from error
    elif (name := _OTHER_NAMES.get(source, source)) in shipped_profiles():
        text = resources.files(_SHIPPED).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    else:
        raise ProfileError(
            f"unknown profile {source!r}: choose from {', '.join(shipped_profiles())}, or give the path of a .yaml file"
        )
    return _parse_profile(text, source)


def _parse_profile(text: str, source: str) -> Profile:
    try:
        document = load_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ProfileError(f"profile {source} is not valid YAML: {error}") from error
    if not isinstance(document, dict):
        raise ProfileError(f"profile {source} must be a mapping with name and tiers, got {type(document).__name__}")
    try:
        return Profile.model_validate(document)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'profile'}: {item['msg']}" for item in error.errors()
        )
        raise ProfileError(f"profile {source} is not valid: {problems}") from error
