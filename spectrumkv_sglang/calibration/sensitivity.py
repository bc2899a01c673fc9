"""The record of a measurement: what rounding costs a model, by part, layer and head. A JSON file."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from spectrumkv_sglang.calibration.candidates import PART_NAMES, Candidates, PartCandidates
from spectrumkv_sglang.calibration.errors import CalibrationError
from spectrumkv_sglang.calibration.head_cost import HeadCost
from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.verification.fingerprint import ModelFingerprint

SENSITIVITY_FORMAT = 1


class MeasuredOn(msgspec.Struct, frozen=True):
    """What the measurement was made on.

    Attributes:
        text: path of the text, or "shipped".
        text_sha256: of the text.
        windows: names of the pieces.
        prefix_tokens: tokens whose KV was rounded.
        continuation_tokens: tokens that were judged after them.
        seed: that drew the windows.
        sink_tokens: first tokens, which stayed native.
    """

    text: str
    text_sha256: str
    windows: list[str]
    prefix_tokens: int
    continuation_tokens: int
    seed: int
    sink_tokens: int


class PartSensitivity(msgspec.Struct, frozen=True):
    """KL divergence of the continuation, nats a token, mean over the windows, for the keys or for the values.

    Attributes:
        transform: before quantising.
        curve: by precision, with all layers and heads rounded.
        layers: by precision, coarsest first, with one layer rounded to it, [layers].
        heads: what each KV head's share of its layer is proportional to, [layers][kv_heads]; None: not measured.
            ``HeadCost.MEASURED``: KL with that head rounded to the last precision of ``layers``.
    """

    transform: str
    curve: dict[str, float]
    layers: dict[str, list[float]]
    heads: list[list[float]] | None = None

    def additivity(self) -> dict[str, float]:
        """Sum of the single layers' KL / KL of all layers at once, by precision: 1 where costs add up."""
        return {
            precision: sum(layers) / self.curve[precision] if self.curve[precision] > 0 else 1.0
            for precision, layers in self.layers.items()
        }


class Sensitivity(msgspec.Struct, frozen=True):
    """What rounding costs one model."""

    format: int
    model: str
    fingerprint: dict[str, str]
    geometry: KVGeometry
    measured_on: MeasuredOn
    keys: PartSensitivity
    values: PartSensitivity
    versions: dict[str, str]
    date: str
    head_cost: HeadCost = HeadCost.MEASURED

    def of(self, kv: int) -> PartSensitivity:
        """Of the keys (0) or values (1)."""
        return self.values if kv else self.keys

    def require_model(self, served: ModelFingerprint, source: str) -> None:
        """Raise CalibrationError unless it was measured on this model."""
        if changed := ModelFingerprint(**self.fingerprint).differences(served):
            raise CalibrationError(
                f"{source} was measured on another model ({'; '.join(changed)}): give another --sensitivity file"
            )

    def require_candidates(self, candidates: Candidates, heads: HeadCost | None, source: str) -> None:
        """Raise CalibrationError unless it holds what an allocation among ``candidates`` needs."""
        for kv, name in enumerate(PART_NAMES):
            found, wanted = self.of(kv), candidates.of(kv)
            if found.transform != wanted.transform.name.lower():
                raise CalibrationError(
                    f"{source}: {name} were measured with transform {found.transform}, asked for is "
                    f"{wanted.transform.name.lower()}: give another --sensitivity file"
                )
            if missing := [p for p in _measured(wanted) if p.name.lower() not in found.curve]:
                raise CalibrationError(
                    f"{source}: {name} were not measured in {missing[0].name.lower()}: leave it out or give another "
                    "--sensitivity file"
                )
        if heads is None:
            return
        if self.keys.heads is None or self.values.heads is None:
            raise CalibrationError(f"{source} holds no heads: leave --heads out or give another --sensitivity file")
        if self.head_cost is not heads:
            raise CalibrationError(
                f"{source} holds heads by {self.head_cost.value}, asked for is --heads {heads.value}: give another "
                "--sensitivity file"
            )


def encode_sensitivity(sensitivity: Sensitivity) -> bytes:
    """As the file holds it."""
    return msgspec.json.format(msgspec.json.encode(sensitivity), indent=1) + b"\n"


def load_sensitivity(path: Path) -> Sensitivity:
    """Read a file that `encode_sensitivity` made.

    Raises:
        CalibrationError: it cannot be read, is of another format, or its numbers make no sense.
    """
    what = f"--sensitivity {path}"
    try:
        sensitivity = msgspec.json.decode(path.read_bytes(), type=Sensitivity)
    except OSError as error:
        raise CalibrationError(f"{what}: {error.strerror or error}") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise CalibrationError(
            f"{what}: not a sensitivity file ({error}); give another name to measure anew"
        ) from error
    if sensitivity.format != SENSITIVITY_FORMAT:
        raise CalibrationError(
            f"{what}: format {sensitivity.format}, this build reads {SENSITIVITY_FORMAT}; give another name to "
            "measure anew"
        )
    for kv, name in enumerate(PART_NAMES):
        _check_part(sensitivity.of(kv), sensitivity.geometry, f"{what}: {name}")
    return sensitivity


def _check_part(part: PartSensitivity, geometry: KVGeometry, what: str) -> None:
    known = {precision.name.lower() for precision in Precision}
    if not part.layers or not set(part.layers) <= set(part.curve) <= known:
        raise CalibrationError(
            f"{what}: expected known precisions, and layers in some of them, got {[*part.curve]} and {[*part.layers]}"
        )
    heads = part.heads or []
    lengths = {len(layers) for layers in part.layers.values()}
    if lengths != {geometry.layers} or any(len(layer) != geometry.kv_heads for layer in heads):
        raise CalibrationError(f"{what}: expected {geometry.layers} layers of {geometry.kv_heads} KV heads")
    if part.heads is not None and len(heads) != geometry.layers:
        raise CalibrationError(f"{what}: expected heads of {geometry.layers} layers, got {len(heads)}")
    numbers = [*part.curve.values(), *(kl for layers in part.layers.values() for kl in layers)]
    numbers += [kl for layer in heads for kl in layer]
    if not all(math.isfinite(number) for number in numbers):
        raise CalibrationError(f"{what}: a KL divergence that is no number; measure anew")


def _measured(part: PartCandidates) -> list[Precision]:
    return [precision for precision in part.precisions if precision is not Precision.NATIVE]
