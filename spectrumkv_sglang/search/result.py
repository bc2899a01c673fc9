"""The frontier as files: a JSON with every point, a profile for each, and the controller's section."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import yaml

from spectrumkv_sglang.calibration.allocated_profile import profile_yaml
from spectrumkv_sglang.launch_config import replace_file
from spectrumkv_sglang.search.known_costs import KnownCosts
from spectrumkv_sglang.search.pareto import Objectives, choose_spread
from spectrumkv_sglang.search.search import Search
from spectrumkv_sglang.tuning.settings import ControllerSettings

FRONTIER_FORMAT = 1


class FrontierPoint(msgspec.Struct, frozen=True):
    """One point that no measured one beats.

    Attributes:
        profile: name of its file under ``profiles``.
        description: one line for people.
        budget: b that it is served with.
        kl: mean over the texts, nats a token.
        kl_by_text: the same text by text.
        wire_ratio: wire / native bytes of a chunk, everything counted.
        compression_ratio: 1 / ``wire_ratio``.
        speed: S, native bytes a second through pack and unpack.
        tier_shares: tokens in high, mid and low.
        candidate: whether the controller's section has it.
    """

    profile: str
    description: str
    budget: float
    kl: float
    kl_by_text: list[float]
    wire_ratio: float
    compression_ratio: float
    speed: float
    tier_shares: tuple[float, float, float]
    candidate: bool


class FrontierFile(msgspec.Struct, frozen=True):
    """What ``frontier.json`` holds."""

    format: int
    model: str
    identity: dict[str, str]
    speeds_of: str
    points_of_space: int
    judged: int
    judged_in_part: int
    ruled_out_by_bytes_and_speed: int
    hypervolume: float
    stopped_by: str
    frontier: list[FrontierPoint]
    others: list[FrontierPoint]


def frontier_file(
    search: Search, costs: KnownCosts, model: str, identity: dict[str, str], device: str, most: int
) -> FrontierFile:
    """Everything about a search that came to an end.

    Args:
        most: candidates of the controller.
    """
    found = search.frontier()
    chosen = {found[place][0] for place in candidate_places(search, found, most)}
    by_place = {trial.place: trial for trial in search.trials.finished}

    def entry(place: int, one: Objectives) -> FrontierPoint:
        point, wire = costs.points[place], costs.wire[place]
        return FrontierPoint(
            profile=point.name,
            description=point.description,
            budget=math.ceil(wire.budget * 1e4 - 1e-9) / 1e4,
            kl=one.kl,
            kl_by_text=list(by_place[place].kl),
            wire_ratio=one.wire_ratio,
            compression_ratio=1 / one.wire_ratio,
            speed=1 / one.seconds_per_byte,
            tier_shares=wire.tier_shares,
            candidate=place in chosen,
        )

    on_it = {place for place, _ in found}
    return FrontierFile(
        format=FRONTIER_FORMAT,
        model=model,
        identity=identity,
        speeds_of=device,
        points_of_space=len(costs.points),
        judged=len(search.trials.finished),
        judged_in_part=sum(bool(trial.pruned) for trial in search.trials.finished),
        ruled_out_by_bytes_and_speed=search.ruled_out,
        hypervolume=search.hypervolume(),
        stopped_by=search.stopped_by,
        frontier=[entry(place, one) for place, one in found],
        others=[entry(place, one) for place, one in search.measured() if place not in on_it],
    )


def candidate_places(search: Search, found: Sequence[tuple[int, Objectives]], most: int) -> list[int]:
    """Which points of the frontier the controller gets: those that together dominate most."""
    return choose_spread([search.coordinates(one) for _, one in found], most, search.box)


def write_result(folder: Path, result: FrontierFile, costs: KnownCosts, layers: int) -> list[Path]:
    """Write ``frontier.json``, ``profiles/*.yaml`` and ``controller.yaml``; returns them.

    Raises:
        SpectrumKVError: one of them cannot be written.
    """
    points = {point.name: point for point in costs.points}
    written = []
    for entry in result.frontier:
        profile = points[entry.profile].profile(layers, entry.budget)
        comments = [
            f"Found by spectrumkv tune for {result.model}: KL {entry.kl:.2g} nats a token, b {entry.wire_ratio:.4f}, "
            f"{entry.speed / 1e9:.3g} GB/s through pack and unpack ({result.speeds_of}).",
            "Under 8 bits: probe it before use (docs/probe.md).",
        ]
        written.append(folder / "profiles" / f"{entry.profile}.yaml")
        replace_file(written[-1], profile_yaml(profile, comments).encode())
    written.append(folder / "frontier.json")
    replace_file(written[-1], msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    written.append(folder / "controller.yaml")
    replace_file(written[-1], controller_section(folder, result).encode())
    return written


def controller_section(folder: Path, result: FrontierFile) -> str:
    """A configuration whose controller chooses among the frontier's candidates; switched off until it is asked for."""
    candidates = [
        {
            "profile": os.path.abspath(folder / "profiles" / f"{entry.profile}.yaml"),
            "budget": entry.budget,
            "kl": rounded_up(entry.kl),
            "speed": float(f"{entry.speed:.3g}"),
        }
        for entry in result.frontier
        if entry.candidate
    ]
    section = {"controller": {"enabled": False, "candidates": candidates}}
    ControllerSettings.model_validate({"candidates": candidates})  # what is written is what servers read
    comment = (
        f"# Found by spectrumkv tune for {result.model}. For the spectrumkv: section of the launch config, or by\n"
        "# itself the configuration of a server. KL is rounded up; speed is that of " + result.speeds_of + ".\n"
    )
    return comment + yaml.safe_dump(section, sort_keys=False, default_flow_style=None, width=200)


def rounded_up(kl: float) -> float:
    """To two digits, never below."""
    if kl <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(kl)) - 1)
    return float(f"{math.ceil(kl / unit - 1e-9) * unit:.2g}")
