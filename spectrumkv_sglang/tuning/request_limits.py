"""What one request asks of the controller: ``sampling_params.custom_params["spectrumkv"]``.

    {"spectrumkv": {"ttft_target_s": 0.5, "max_kl": 0.01}}

A request can only ask for more accuracy than the server's configuration, and for any TTFT target.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

CUSTOM_PARAMETER = "spectrumkv"
_NAMES = ("ttft_target_s", "max_kl")
_MOST = 1e6


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request; None: the server's own.

    Attributes:
        ttft_target_s: seconds from the request's arrival on prefill to the end of its transfer.
        max_kl: most expected KL divergence from native, nats a token.
        problem: what could not be understood, or ""; such a request gets the safe candidate.
    """

    ttft_target_s: float | None = None
    max_kl: float | None = None
    problem: str = ""


NO_LIMITS = RequestLimits()
MOST_NAMES, MOST_PROBLEMS = 8, 3
"""Names of a request that are looked at, and problems that are said."""


def read_limits(value: Any) -> RequestLimits:
    """Limits from what a request carries under ``spectrumkv``. Never raises; what is well formed holds in any case."""
    if value is None:
        return NO_LIMITS
    if not isinstance(value, dict):
        return RequestLimits(problem=f"expected an object with {' and '.join(_NAMES)}, got {type(value).__name__}")
    unknown = [name for name in itertools.islice(value, MOST_NAMES) if name not in _NAMES]
    problems = [f"unknown name {_shown(name)}, expected {' or '.join(_NAMES)}" for name in unknown[:MOST_PROBLEMS]]
    if len(value) > MOST_NAMES:
        problems.append(f"{len(value)} names, expected {' and '.join(_NAMES)}")
    target = _number(value, "ttft_target_s", problems)
    if target == 0:
        problems.append("ttft_target_s is 0, expected seconds above 0")
        target = None
    return RequestLimits(target, _number(value, "max_kl", problems), "; ".join(problems))


def _number(value: dict[Any, Any], name: str, problems: list[str]) -> float | None:
    found = value.get(name)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 <= found <= _MOST:
        problems.append(f"{name} is {_shown(found)}, expected a number from 0 to {_MOST:g}")
        return None
    return float(found)


def _shown(value: Any) -> str:
    """A client's value in an error; only its type where printing it could cost much, or fail."""
    if isinstance(value, str):
        return repr(value[:40])
    small = isinstance(value, float) or (isinstance(value, int) and abs(value) < 10**18)
    return repr(value) if small else f"a {type(value).__name__}"
