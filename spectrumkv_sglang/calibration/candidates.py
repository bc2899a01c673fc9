"""Precisions that an allocation chooses from, for keys and for values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from spectrumkv_sglang.calibration.errors import CalibrationError
from spectrumkv_sglang.kernels.precision import CHANNEL_BLOCK_ROWS, Precision, labels_by_bits
from spectrumkv_sglang.kernels.quantisers import quantiser_for
from spectrumkv_sglang.kernels.transforms import Transform, transform_for
from spectrumkv_sglang.payload.geometry import KVGeometry

_COARSE = 2

PART_NAMES = ("keys", "values")
"""Names of the parts of a layer, by the K|V axis of a precision table."""


@dataclass(frozen=True)
class PartCandidates:
    """What the keys, or the values, may travel in.

    Attributes:
        precisions: cheapest first, no two alike.
        coarse: those of them that single layers are measured at, cheapest first. At 2 bits other layers suffer than
            at 3 or 4, which agree; finer ones are left out, since a single layer's cost no longer stands out there.
        transform: what they go through before they are quantised.
    """

    precisions: tuple[Precision, ...]
    coarse: tuple[Precision, ...]
    transform: Transform

    def step_up(self, precision: Precision) -> Precision:
        """The next dearer one; the dearest stays."""
        place = self.precisions.index(precision)
        return self.precisions[min(place + 1, len(self.precisions) - 1)]


@dataclass(frozen=True)
class Candidates:
    """What keys and values may travel in. ``of(0)`` are the keys, ``of(1)`` the values, as in a precision table."""

    keys: PartCandidates
    values: PartCandidates

    def of(self, kv: int) -> PartCandidates:
        """Candidates of the keys (0) or values (1)."""
        return self.values if kv else self.keys

    def check_geometry(self, geometry: KVGeometry) -> None:
        """Raise CalibrationError unless every precision and transform takes the model's head dimensions."""
        for kv, name in enumerate(PART_NAMES):
            part, dim = self.of(kv), geometry.dim_of(kv)
            try:
                transform_for(part.transform).check_dim(dim)
                for precision in part.precisions:
                    quantiser_for(precision).check_dim(dim)
            except ValueError as error:
                raise CalibrationError(f"--{name}: {error}") from error


# Keys have channels that are large in every token and want a scale of their own (KIVI, arXiv 2402.02750); values have
# none, and a Hadamard transform takes what outliers their rows have.
DEFAULT = Candidates(
    keys=PartCandidates(
        (
            *(Precision.INT2_CHANNEL, Precision.INT3_CHANNEL, Precision.INT4_CHANNEL),
            *(Precision.INT5_CHANNEL, Precision.INT6_CHANNEL, Precision.INT8_CHANNEL),
        ),
        (Precision.INT2_CHANNEL, Precision.INT3_CHANNEL),
        Transform.IDENTITY,
    ),
    values=PartCandidates(
        (Precision.INT2, Precision.INT3, Precision.INT4, Precision.INT5, Precision.INT6, Precision.INT8),
        (Precision.INT2, Precision.INT3),
        Transform.HADAMARD,
    ),
)


def choose(
    keys: Sequence[str] | None, values: Sequence[str] | None, key_transform: str, value_transform: str
) -> Candidates:
    """Candidates from the command line's names; None for the default precisions.

    Raises:
        CalibrationError: an unknown or repeated name, or a transform that values do not take.
    """
    chosen = Candidates(
        _part("keys", keys, key_transform, DEFAULT.keys), _part("values", values, value_transform, DEFAULT.values)
    )
    if chosen.values.transform is Transform.DEROPE:
        raise CalibrationError("--value-transform derope: values carry no rotary embedding; give hadamard or identity")
    return chosen


def row_cost(precision: Precision) -> float:
    """Bytes a row of one head of 128 elements, scales included: orders precisions by what they cost."""
    quantiser = quantiser_for(precision)
    rows = CHANNEL_BLOCK_ROWS
    return (quantiser.code_bytes(rows, 1, 128, 2) + quantiser.param_bytes(rows, 1, 128)) / rows


def _part(name: str, labels: Sequence[str] | None, transform: str, default: PartCandidates) -> PartCandidates:
    transforms = {known.name.lower(): known for known in Transform}
    if transform not in transforms:
        option = f"--{name.removesuffix('s')}-transform"
        raise CalibrationError(f"{option} {transform}: unknown; choose from {', '.join(transforms)}")
    part = replace(default, transform=transforms[transform])
    if labels is None:
        return part
    known = {precision.name.lower(): precision for precision in Precision}
    if unknown := [label for label in labels if label not in known]:
        raise CalibrationError(f"--{name}: unknown precision {unknown[0]!r}; choose from {', '.join(labels_by_bits())}")
    precisions = sorted((known[label] for label in labels), key=row_cost)
    if not precisions or len(set(precisions)) < len(precisions):
        raise CalibrationError(f"--{name} {','.join(labels)}: expected different precisions, at least one")
    if any(np.diff([row_cost(precision) for precision in precisions]) == 0):
        raise CalibrationError(f"--{name} {','.join(labels)}: two of them cost the same; keep one")
    quantised = [precision for precision in precisions if precision is not Precision.NATIVE]
    if not quantised:
        raise CalibrationError(f"--{name} native: there is nothing to measure; add a quantised precision")
    return replace(part, precisions=tuple(precisions), coarse=tuple(quantised[:_COARSE]))
