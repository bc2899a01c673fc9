"""What a replay is fed with: requests over time, and a link whose rate changes.

Files are CSV with a header. Requests: ``arrival_s,prompt_tokens,output_tokens``. Bandwidth: ``from_s,gbps``, each line
valid until the next; the last one for ever.
"""

from __future__ import annotations

import csv
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.tuning.link_model import bytes_per_second

Row = TypeVar("Row")

MOST_TOKENS = 10**8


class TraceError(SpectrumKVError):
    """A trace that cannot be read or makes no sense; names the file and the line."""


@dataclass(frozen=True)
class Request:
    """One request: when it comes, seconds, and its tokens."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


class BandwidthTrace:
    """A link whose rate is constant from one step to the next.

    Args:
        steps: (from which second on, bytes a second); the first rate also holds before.

    Raises:
        TraceError: no steps, seconds that do not grow, or a rate that no link has.
    """

    def __init__(self, steps: Sequence[tuple[float, float]]) -> None:
        if not steps:
            raise TraceError("a bandwidth trace has no steps: expected at least one")
        self._from = [start for start, _ in steps]
        self._rates = [rate for _, rate in steps]
        if any(not math.isfinite(n) for n in self._from) or sorted(set(self._from)) != self._from:
            raise TraceError(f"a bandwidth trace starts its steps at {self._from}, expected seconds that grow")
        if any(not (math.isfinite(rate) and rate > 0) for rate in self._rates):
            raise TraceError(f"a bandwidth trace has rates {self._rates}, expected finite ones above 0")

    def seconds(self, size: float, start: float) -> float:
        """Time that ``size`` bytes take from second ``start`` on."""
        at, now, left = max(0, bisect_right(self._from, start) - 1), start, size
        while at + 1 < len(self._from):
            moved = (self._from[at + 1] - now) * self._rates[at]
            if moved >= left:
                break
            left, now, at = left - moved, self._from[at + 1], at + 1
        return now + left / self._rates[at] - start


def poisson_requests(
    count: int, *, per_second: float, prompt_tokens: int, output_tokens: int, spread: float, seed: int
) -> list[Request]:
    """``count`` requests of a Poisson process.

    Args:
        per_second: mean rate of arrivals.
        prompt_tokens, output_tokens: medians of log-normal lengths.
        spread: standard deviation of the lengths' logarithm; 0: all alike.
        seed: of arrivals and lengths.
    """
    chance, now, requests = random.Random(seed), 0.0, []
    for _ in range(count):
        now += chance.expovariate(per_second)
        prompt = max(1, round(prompt_tokens * math.exp(chance.gauss(0, spread))))
        output = max(1, round(output_tokens * math.exp(chance.gauss(0, spread))))
        requests.append(Request(now, prompt, output))
    return requests


def read_requests(path: Path) -> list[Request]:
    """Requests from a file, in the order of their arrival. TraceError: the file and line that cannot be used."""

    def parse(row: dict[str, str]) -> Request:
        for name in ("prompt_tokens", "output_tokens"):
            if not 0 < int(row[name]) <= MOST_TOKENS:
                raise ValueError(f"{name} is {row[name][:40]}, expected 1 to {MOST_TOKENS}")
        request = Request(float(row["arrival_s"]), int(row["prompt_tokens"]), int(row["output_tokens"]))
        if not 0 <= request.arrival_s < math.inf:
            raise ValueError(f"arrival_s is {request.arrival_s}, expected seconds of at least 0")
        return request

    return sorted(_read(path, parse), key=lambda request: request.arrival_s)


def read_bandwidth(path: Path) -> BandwidthTrace:
    """A bandwidth trace from a file. TraceError: the file and line that cannot be used."""
    steps = _read(path, lambda row: (float(row["from_s"]), bytes_per_second(float(row["gbps"]))))
    try:
        return BandwidthTrace(steps)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error


def _read(path: Path, parse: Callable[[dict[str, str]], Row]) -> list[Row]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows: list[Row] = []
            for number, row in enumerate(csv.DictReader(file), 2):
                try:
                    rows.append(parse(row))
                except KeyError as error:
                    raise TraceError(f"{path} has no column {error}: see `spectrumkv simulate --help`") from error
                except TypeError as error:
                    raise TraceError(f"{path}, line {number}: it has fewer fields than the header") from error
                except (ValueError, SpectrumKVError) as error:
                    raise TraceError(f"{path}, line {number}: {str(error)[:200]}") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"cannot read trace {path}: {error}") from error
    if not rows:
        raise TraceError(f"{path} holds no lines: expected a header and at least one")
    return rows
