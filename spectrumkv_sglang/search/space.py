"""The space that is searched: what a profile may be, as a few axes of few choices each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.transforms import Transform
from spectrumkv_sglang.profiles.profile import LayerOverride, Profile, TierPrecision, Transforms
from spectrumkv_sglang.profiles.tier import Tier
from spectrumkv_sglang.search.errors import TuneError

BITS = (2, 3, 4, 5, 6, 8)
"""Widths of codes, of keys and of values."""
SCALES = ("channel", "row")
KEY_TRANSFORMS = ("identity", "derope", "hadamard")
VALUE_TRANSFORMS = ("identity", "hadamard")
EDGES = (0, 1, 2)
UPGRADES = (0.0, 0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Point:
    """One profile of the space.

    Attributes:
        key_bits, value_bits: of the lowest tier.
        key_scales, value_scales: "row", a scale a token and head, or "channel", one a channel over 128 tokens.
        key_transform, value_transform: before quantising.
        edges: so many first and last layers travel in 8 bits.
        upgrade: share of the bytes from the lowest tier to the next (one step of bits more, keys and values) that
            the budget grants, for the tokens that are attended to most.
    """

    key_bits: int
    value_bits: int
    key_scales: str
    value_scales: str
    key_transform: str
    value_transform: str
    edges: int
    upgrade: float

    @property
    def name(self) -> str:
        """Name of its profile, such as ``k4c-v3h-e1-u25``: keys of 4 bits by channel, values of 3 after Hadamard."""
        keys = f"k{self.key_bits}{_SHORT[self.key_scales]}{_SHORT[self.key_transform]}"
        values = f"v{self.value_bits}{_SHORT[self.value_scales]}{_SHORT[self.value_transform]}"
        return f"{keys}-{values}-e{self.edges}-u{self.upgrade * 100:.0f}"

    def profile(self, layers: int, budget: float | None = None) -> Profile:
        """The profile for a model of ``layers`` layers; ``budget``: the one that it states."""
        tiers = {
            Tier.HIGH: TierPrecision(keys=Precision.NATIVE, values=Precision.NATIVE),
            Tier.LOW: self._tier(self.key_bits, self.value_bits),
        }
        if self.upgrade:
            tiers[Tier.MID] = self._tier(_step_up(self.key_bits), _step_up(self.value_bits))
        overrides = []
        if self.edges:
            eight = self._tier(8, 8)
            protected = sorted({*range(self.edges), *range(layers - self.edges, layers)})
            overrides.append(
                LayerOverride(
                    layers=protected,
                    tiers=[tier for tier in sorted(tiers) if tier is not Tier.HIGH],
                    keys=eight.keys,
                    values=eight.values,
                )
            )
        return Profile(
            name=self.name,
            description=self.description,
            budget=budget,
            tiers=tiers,
            layer_overrides=overrides,
            transform=Transforms(
                keys=Transform[self.key_transform.upper()], values=Transform[self.value_transform.upper()]
            ),
        )

    @property
    def description(self) -> str:
        """One line for people."""
        keys = _described(self.key_bits, self.key_scales, self.key_transform)
        values = _described(self.value_bits, self.value_scales, self.value_transform)
        edges = f"; first and last {self.edges or ''} layers in 8 bits".replace("  ", " ") if self.edges else ""
        upgrade = f"; {self.upgrade:.0%} of the way to one step more, by token" if self.upgrade else ""
        return f"Keys of {keys}, values of {values}{edges}{upgrade}"

    def _tier(self, key_bits: int, value_bits: int) -> TierPrecision:
        return TierPrecision(
            keys=precision_of(key_bits, self.key_scales), values=precision_of(value_bits, self.value_scales)
        )


_SHORT = {"channel": "c", "row": "r", "identity": "", "derope": "d", "hadamard": "h"}


def precision_of(bits: int, scales: str) -> Precision:
    """The precision of ``bits`` bits with scales by "row" or by "channel"."""
    return Precision[f"INT{bits}{'_CHANNEL' if scales == 'channel' else ''}"]


@dataclass(frozen=True)
class Space:
    """Choices of each axis, in the order of a `Point`'s attributes; those of numbers from the least on.

    Raises:
        TuneError: an axis without a choice, with a choice twice, or with one that is none.
    """

    key_bits: tuple[int, ...] = BITS
    value_bits: tuple[int, ...] = BITS
    key_scales: tuple[str, ...] = SCALES
    value_scales: tuple[str, ...] = ("row",)
    key_transform: tuple[str, ...] = KEY_TRANSFORMS
    value_transform: tuple[str, ...] = VALUE_TRANSFORMS
    edges: tuple[int, ...] = EDGES
    upgrade: tuple[float, ...] = UPGRADES

    def __post_init__(self) -> None:
        known: dict[str, tuple[object, ...]] = {
            "key_bits": BITS,
            "value_bits": BITS,
            "key_scales": SCALES,
            "value_scales": SCALES,
            "key_transform": KEY_TRANSFORMS,
            "value_transform": VALUE_TRANSFORMS,
        }
        for axis in fields(self):
            choices = getattr(self, axis.name)
            option = f"--{axis.name.replace('_', '-')}"
            shown = ",".join(map(str, choices))
            if not choices or len(set(choices)) < len(choices):
                raise TuneError(f"{option} {shown}: expected different choices, at least one")
            for choice in choices:
                if axis.name in known and choice not in known[axis.name]:
                    raise TuneError(f"{option} {shown}: {choice} is none of {', '.join(map(str, known[axis.name]))}")
            if not isinstance(choices[0], str) and list(choices) != sorted(choices):
                raise TuneError(f"{option} {shown}: expected numbers from the least to the largest")
        if self.edges[0] < 0:
            raise TuneError(f"--edges {','.join(map(str, self.edges))}: numbers of layers are at least 0")
        if not 0 <= self.upgrade[0] <= self.upgrade[-1] <= 1:
            raise TuneError(f"--upgrade {','.join(map(str, self.upgrade))}: shares are from 0 to 1")

    @property
    def size(self) -> int:
        """Combinations of choices, profiles that are alike counted each."""
        total = 1
        for axis in fields(self):
            total *= len(getattr(self, axis.name))
        return total

    def __iter__(self) -> Iterator[Point]:
        """All profiles, each once."""
        choices = [getattr(self, axis.name) for axis in fields(self)]
        yield from dict.fromkeys(self.canonical(Point(*chosen)) for chosen in product(*choices))

    def canonical(self, point: Point) -> Point:
        """The one of all points with the same profile that stands for them.

        8 bits have no step above them, and edges of 8 bits no meaning beside them.
        """
        if point.key_bits == point.value_bits == 8:
            return replace(point, edges=self.edges[0], upgrade=self.upgrade[0])
        return point

    def check_layers(self, layers: int) -> None:
        """Raise TuneError if the edges leave none of the model's layers."""
        if 2 * self.edges[-1] >= layers:
            raise TuneError(f"--edges {','.join(map(str, self.edges))}: this model has {layers} layers; give fewer")


def space_from(**choices: str) -> Space:
    """A space from the command line's lists, by axis: ``key_bits="2,4"``.

    Raises:
        TuneError: what is no number where one is expected, and as `Space`.
    """
    kinds = {"upgrade": float, "key_bits": int, "value_bits": int, "edges": int}
    read: dict[str, tuple[object, ...]] = {}
    for axis, listed in choices.items():
        try:
            read[axis] = tuple(kinds.get(axis, str)(choice.strip()) for choice in listed.split(","))
        except ValueError as error:
            raise TuneError(f"--{axis.replace('_', '-')} {listed}: expected numbers with commas") from error
    return Space(**read)  # type: ignore[arg-type]


def _step_up(bits: int) -> int:
    return BITS[min(BITS.index(bits) + 1, len(BITS) - 1)]


def _described(bits: int, scales: str, transform: str) -> str:
    return f"{bits} bits by {scales}" + ("" if transform == "identity" else f" after {transform}")
