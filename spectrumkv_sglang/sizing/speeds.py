"""How fast KV is packed and unpacked, by profile: assumed, measured here, or read from a benchmark's result."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spectrumkv_sglang.sizing.errors import SizingError
from spectrumkv_sglang.sizing.transport import Transport
from spectrumkv_sglang.tuning.link_model import (
    Codec,
    FixedCost,
    Transfer,
    break_even,
    bytes_per_second,
    pipelined_break_even,
    pipelined_seconds,
    sequential_seconds,
)

ASSUMED_BYTES_PER_SECOND = 40e9
"""S where nothing was measured, as `spectrumkv simulate` assumes it: below every transfer measured on the H200."""
GOODPUT_SHARE = 0.957
"""Of a link's rate that a plain TCP socket got on links of 1 to 25 Gb/s (docs/results/gpu.md)."""
_ONE_CHUNK_TOKENS = 8192


@dataclass(frozen=True)
class ProfileSpeed:
    """Native bytes a second of one profile on one rank.

    Attributes:
        pack, unpack: native bytes a second.
        pack_host_seconds, unpack_host_seconds: of a payload, beside them.
        overlapped: whether payloads are packed, written and unpacked side by side; False: the speeds are what whole
            transfers took beyond their bytes, so that nothing overlaps any more.
        chunk_seconds: of a chunk, beside everything else.
        source: where it is from.
    """

    pack: float
    unpack: float
    pack_host_seconds: float = 0.0
    unpack_host_seconds: float = 0.0
    overlapped: bool = True
    chunk_seconds: float = Transport.TCP.chunk_seconds
    source: str = "assumed"

    def _codec(self, b: float) -> Codec:
        return Codec(b, self.pack, self.unpack, self.pack_host_seconds, self.unpack_host_seconds)

    def seconds(self, transfer: Transfer, b: float, bandwidth: float) -> float:
        """Of one transfer at ``b`` over ``bandwidth`` bytes a second."""
        compute = pipelined_seconds if self.overlapped else sequential_seconds
        return compute(transfer, bandwidth, self._codec(b), FixedCost(chunk_seconds=self.chunk_seconds))

    def break_even(self, transfer: Transfer, b: float) -> float:
        """Bandwidth, bytes a second, below which the transfer is sooner than a native one; 0: never."""
        if self.overlapped:
            return pipelined_break_even(transfer, self._codec(b), FixedCost(chunk_seconds=self.chunk_seconds))
        return break_even(self._codec(b))


ASSUMED = ProfileSpeed(
    pack=2 * ASSUMED_BYTES_PER_SECOND,
    unpack=2 * ASSUMED_BYTES_PER_SECOND,
    overlapped=False,
    source="assumed",
)


@dataclass(frozen=True)
class SpeedTable:
    """Speeds by profile; ``source`` says in a line where they come from."""

    source: str
    by_profile: dict[str, ProfileSpeed] = field(default_factory=dict)
    assumed: ProfileSpeed = ASSUMED

    def of(self, profile: str) -> ProfileSpeed:
        """The profile's; where it was not measured the slowest of those that were; the assumption without any."""
        found = self.by_profile.get(profile)
        if found is not None or not self.by_profile:
            return found or self.assumed
        slowest_name = min(self.by_profile, key=lambda name: self.by_profile[name].pack)
        slowest = self.by_profile[slowest_name]
        fields = {**slowest.__dict__, "source": f"not measured: as {slowest_name}"}
        return ProfileSpeed(**fields)


def assumed_table(transport: Transport) -> SpeedTable:
    """Speeds where nothing was measured."""
    return SpeedTable(
        f"nothing was measured: {ASSUMED_BYTES_PER_SECOND / 1e9:g} GB/s of native KV through pack and unpack on each "
        f"rank, which a data-centre GPU exceeds and a CPU does not reach (use --measure there); {transport.why}",
        assumed=replace(ASSUMED, chunk_seconds=transport.chunk_seconds),
    )


def read_speeds(path: Path, *, bytes_per_token: int, transport: Transport = Transport.TCP) -> SpeedTable:
    """Speeds from a file: the result of benchmarks/kernels.py or transfer.py, docs/results/gpu.json, or what
    ``spectrumkv size --json`` wrote.

    Args:
        bytes_per_token: native KV of a token on one rank; of several measured models the nearest counts.
        transport: says what a chunk costs where kernels were measured alone.

    Raises:
        SizingError: no such file, or none of these.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SizingError(f"--speeds {path}: {error}") from error
    expected = (
        f"--speeds {path}: expected the result of benchmarks/kernels.py or benchmarks/transfer.py (kernels.json, "
        "transfer.json, gpu.json) or of spectrumkv size --measure --json"
    )
    if not isinstance(document, dict):
        raise SizingError(expected)
    try:
        for read in (_from_sizing, _from_kernels, _from_transfers):
            found = read(document, bytes_per_token)
            if found:
                source = f"measured: {path}"
                if read is _from_kernels:
                    source += f" (kernels), and {transport.why}"
                    found = {
                        name: replace(speed, chunk_seconds=transport.chunk_seconds) for name, speed in found.items()
                    }
                return SpeedTable(source, found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SizingError(f"{expected}; reading it failed with {error!r}") from error
    raise SizingError(f"{expected}, with at least one profile measured")


def _from_sizing(document: Mapping[str, Any], bytes_per_token: int) -> dict[str, ProfileSpeed]:
    speeds = document.get("speeds")
    if not isinstance(speeds, dict) or not isinstance(speeds.get("by_profile"), dict):
        return {}
    return {name: ProfileSpeed(**fields) for name, fields in speeds["by_profile"].items()}


def _from_kernels(document: Mapping[str, Any], bytes_per_token: int) -> dict[str, ProfileSpeed]:
    kernels = document["kernels"] if isinstance(document.get("kernels"), dict) else document
    entries = kernels.get("kernels")
    if not isinstance(entries, list) or not entries:
        return {}
    entries = [entry for entry in entries if entry["page_size"] == min(one["page_size"] for one in entries)]
    sizes = {entry["model"]: entry["pool_bytes"] / kernels["tokens"] for entry in entries}
    nearest = min(sizes, key=lambda model: abs(math.log(sizes[model] / bytes_per_token)))
    found: dict[str, ProfileSpeed] = {}
    for entry in entries:
        if entry["model"] != nearest:
            continue
        # "balanced 1/11/88" is the profile and its tokens by tier; of several mixes of one profile the slowest counts.
        first = str(entry["profile"]).split()[0]
        name = "spectrum-paper" if first == "spectrum" else first
        seconds, host, native = entry["seconds"], entry["steady_state"], float(entry["pool_bytes"])
        speed = ProfileSpeed(
            pack=native / seconds["pack"],
            unpack=native / seconds["verified_unpack"],
            pack_host_seconds=host["pack"]["host_seconds"],
            unpack_host_seconds=host["unpack"]["host_seconds"],
            source=f"kernels of {nearest}",
        )
        if name not in found or speed.pack < found[name].pack:
            found[name] = speed
    return found


def _from_transfers(document: Mapping[str, Any], bytes_per_token: int) -> dict[str, ProfileSpeed]:
    runs = document.get("transfer") if isinstance(document.get("transfer"), list) else [document]
    found: dict[str, ProfileSpeed] = {}
    for run in runs or ():
        if "samples" not in run or "variants" not in run:
            continue
        goodput = {float(rate): value for rate, value in run.get("goodput_gbps", {}).items()}
        profiles = {variant["name"]: variant.get("profile") for variant in run["variants"]}
        beyond: dict[str, list[float]] = {}
        for sample in run["samples"]:
            seconds = _beyond_the_bytes(sample, goodput)
            profile = profiles.get(sample["variant"])
            if profile and seconds:
                beyond.setdefault(profile, []).append(sample["native_bytes"] / seconds)
        for profile, speeds in beyond.items():
            speed = statistics.median(speeds)
            found[profile] = ProfileSpeed(2 * speed, 2 * speed, overlapped=False, chunk_seconds=0.0, source="transfers")
    return found


def _beyond_the_bytes(sample: Mapping[str, Any], goodput: Mapping[float, float]) -> float | None:
    """Seconds that a transfer in one chunk took beyond its bytes on a limited link; None where that is not known."""
    rate = sample.get("rate_gbps") or 0.0
    usable = sample.get("status", "ok") == "ok" and sample.get("repeat", 0) >= 0 and rate > 0
    one_chunk = (sample.get("chunks") or math.ceil(sample["prompt_tokens"] / _ONE_CHUNK_TOKENS)) == 1
    if not (usable and one_chunk and sample.get("transfer_seconds") and sample.get("native_bytes")):
        return None
    link = bytes_per_second(goodput.get(rate, rate * GOODPUT_SHARE))
    seconds = float(sample["transfer_seconds"]) - float(sample["wire_bytes"]) / link
    return seconds if seconds > 0 else None
