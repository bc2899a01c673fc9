"""How fast KV is packed and unpacked on a device, by precision and transform: what a profile's speed is made of.

A profile's time is the sum of its cells': a payload is packed and unpacked cell by cell, so seconds add up. Measured
once on a device, or read from a file, the speed of every profile of a space follows without measuring it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import numpy as np
import torch
import yaml

from spectrumkv_sglang.config import load_config
from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.transforms import Transform
from spectrumkv_sglang.loopback.in_place import InPlaceTransfer
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.profiles.profile import Profile, TierPrecision, Transforms
from spectrumkv_sglang.profiles.tier import Tier
from spectrumkv_sglang.search.errors import TuneError
from spectrumkv_sglang.transfer.pool_view import PoolView

SPEEDS_FORMAT = 1
_REPEATS = 3
_LEAST_SHARE = 0.02
"""Least share of a measured time that a cell is taken to need: its own time is a difference of two."""

Cell = tuple[Precision, Transform]


class CellSpeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds that one native byte of keys, or of values, takes to be packed and unpacked."""

    precision: str
    transform: str
    seconds_per_byte: float


class SpeedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `CodecSpeeds.encode` writes."""

    format: int
    device: str
    geometry: KVGeometry
    tokens: int
    cells: list[CellSpeed]


class CodecSpeeds:
    """Seconds a native byte through pack and unpack, by (precision, transform).

    Args:
        device: that they were measured on, for people.
        seconds_per_byte: of each cell.
        geometry, tokens: of the chunk that was measured.
    """

    def __init__(self, device: str, seconds_per_byte: dict[Cell, float], geometry: KVGeometry, tokens: int) -> None:
        self.device, self.geometry, self.tokens = device, geometry, tokens
        self._seconds = seconds_per_byte

    def missing(self, cells: Iterable[Cell]) -> list[str]:
        """Names of those ``cells`` that have no speed."""
        return [label(cell) for cell in cells if cell not in self._seconds]

    def seconds_per_byte(self, profile: Profile, geometry: KVGeometry, tier_shares: tuple[float, ...]) -> float:
        """1 / S of a profile: seconds a native byte of a chunk with these shares of tokens in high, mid and low."""
        table = profile.table(geometry)
        total = 0.0
        for kv in (0, 1):
            transform = profile.transform.values if kv else profile.transform.keys
            weight = geometry.dim_of(kv) / (geometry.dim_of(0) + geometry.dim_of(1))
            for tier in Tier:
                found, counts = np.unique(table.values[tier][:, kv], return_counts=True)
                for value, count in zip(found.tolist(), counts.tolist(), strict=True):
                    share = tier_shares[tier] * weight * count / table.values[tier][:, kv].size
                    total += share * self._seconds[cell_of(Precision(value), transform)]
        return total

    def encode(self) -> bytes:
        """As a file holds them."""
        cells = [
            CellSpeed(precision.name.lower(), transform.name.lower(), seconds)
            for (precision, transform), seconds in sorted(self._seconds.items())
        ]
        content = SpeedFile(SPEEDS_FORMAT, self.device, self.geometry, self.tokens, cells)
        return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


def cell_of(precision: Precision, transform: Transform) -> Cell:
    """Native cells go through no transform."""
    return precision, Transform.IDENTITY if precision is Precision.NATIVE else transform


def label(cell: Cell) -> str:
    """For people: ``int3 after hadamard``."""
    precision, transform = cell[0].name.lower(), cell[1].name.lower()
    return precision if cell[1] is Transform.IDENTITY else f"{precision} after {transform}"


def cells_of(profiles: Iterable[Profile], geometry: KVGeometry) -> list[Cell]:
    """Every cell of some profiles, in an order of their own."""
    found: set[Cell] = set()
    for profile in profiles:
        table = profile.table(geometry)
        for kv in (0, 1):
            transform = profile.transform.values if kv else profile.transform.keys
            found |= {cell_of(Precision(value), transform) for value in np.unique(table.values[:, :, kv]).tolist()}
    return sorted(found)


def read_speeds(path: Path) -> CodecSpeeds:
    """Speeds from a file that `CodecSpeeds.encode` made.

    Raises:
        TuneError: it cannot be read, or holds what is none.
    """
    what = f"--speeds {path}"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TuneError(f"{what}: {error.strerror or error}") from error
    return decode_speeds(content, what)


def decode_speeds(encoded: bytes, what: str) -> CodecSpeeds:
    """Speeds from what `CodecSpeeds.encode` made; ``what`` names it in errors, as `read_speeds`."""
    try:
        content = msgspec.json.decode(encoded, type=SpeedFile)
    except (msgspec.DecodeError, ValueError) as error:
        raise TuneError(f"{what}: no file of spectrumkv tune --save-speeds ({error})") from error
    if content.format != SPEEDS_FORMAT:
        raise TuneError(f"{what}: format {content.format}, this build reads {SPEEDS_FORMAT}; measure anew")
    seconds: dict[Cell, float] = {}
    for cell in content.cells:
        try:
            key = Precision[cell.precision.upper()], Transform[cell.transform.upper()]
        except KeyError as error:
            raise TuneError(f"{what}: unknown precision or transform {error}; measure anew") from error
        if not (math.isfinite(cell.seconds_per_byte) and cell.seconds_per_byte > 0):
            raise TuneError(f"{what}: {label(key)} takes {cell.seconds_per_byte} seconds a byte; measure anew")
        seconds[key] = cell.seconds_per_byte
    return CodecSpeeds(content.device, seconds, content.geometry, content.tokens)


def measure_speeds(
    view: PoolView, cells: Iterable[Cell], device: str, folder: Path, advance: Callable[[], None] = lambda: None
) -> CodecSpeeds:
    """Pack and unpack a whole pool by each cell's precision, with the code that serves.

    Args:
        view: a pool with the model's geometry; its content is overwritten.
        cells: to measure; one of native bytes is always among them.
        device: named in the result.
        folder: for profiles while this runs.
        advance: called after each cell.
    """
    found: dict[Cell, float] = {}
    native = (Precision.NATIVE, Transform.IDENTITY)
    asked = list(dict.fromkeys([native, *cells]))
    # Keys alone can be rotated back: their time is what is left of a chunk whose values are rounded alike without it.
    plain = [(precision, Transform.IDENTITY) for precision, transform in asked if transform is Transform.DEROPE]
    for cell in dict.fromkeys([*(c for c in asked if c[1] is not Transform.DEROPE), *plain]):
        found[cell] = _seconds(view, cell, cell, folder)
        advance()
    for cell in asked:
        if cell[1] is Transform.DEROPE:
            both = _seconds(view, cell, (cell[0], Transform.IDENTITY), folder)
            found[cell] = max(_LEAST_SHARE * both, 2 * both - found[cell[0], Transform.IDENTITY])
            advance()
    return CodecSpeeds(device, found, view.geometry, view.pool_slots)


def _seconds(view: PoolView, keys: Cell, values: Cell, folder: Path) -> float:
    """Least seconds a native byte of some runs: whatever else the machine does only adds to them."""
    profile = Profile(
        name="measured",
        tiers={Tier.HIGH: TierPrecision(keys=keys[0], values=values[0])},
        transform=Transforms(keys=keys[1], values=values[1]),
    )
    path = folder / "measured.yaml"
    path.write_text(yaml.safe_dump(profile.model_dump(mode="json", exclude_defaults=True)))
    config = load_config(None, {}, {"profile": ("profile", str(path)), "min_tokens": ("min_tokens", 0)})
    transfer = InPlaceTransfer(view, config, None)
    pages = np.arange(view.pool_slots // view.geometry.page_size, dtype=np.int64)
    # On a CPU its own time, which other work on the machine does not lengthen: servers pack in one thread.
    clock = time.thread_time if view.device.type == "cpu" else time.perf_counter
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    runs = []
    try:
        for run in range(_REPEATS + 1):
            started = clock()
            transfer.pack(f"run-{run}", pages, len(pages))
            record = transfer.unpack(f"run-{run}")
            runs.append((clock() - started) / record.native_bytes)
    finally:
        torch.set_num_threads(threads)
    return min(runs[1:])  # the first compiles and allocates
