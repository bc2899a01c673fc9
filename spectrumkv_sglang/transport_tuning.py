"""Mooncake's variables for TCP: what they should be, what happens without them, and setting those that nobody set.

Seen on Mooncake 0.3.13 and 0.3.14. Mooncake reads them when its engine starts, so they are set in the launching
process, whose children inherit them.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import NamedTuple


class Variable(NamedTuple):
    """One environment variable.

    Attributes:
        name: its name.
        value: a value that served well.
        without_it: what happens at Mooncake's default.
        set_by_us: whether a server of this backend sets it where it is not set. Not the timeouts: how long a write may
            take depends on the operator's link.
    """

    name: str
    value: str
    without_it: str
    set_by_us: bool


TCP_TUNING = (
    Variable(
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER",
        "65535",
        "a native transfer of more than about 2,048 blocks fails and can block the peer for good",
        True,
    ),
    Variable("MC_TCP_LANES_PER_PEER", "8", "a link with a long round trip is not filled", True),
    Variable("MC_TCP_SLICE_SIZE", "1048576", "memory is sent 64 KiB at a time", True),
    Variable("MC_NUM_TCP_IO_THREADS", "8", "one thread carries all bytes of a fast link", True),
    Variable(
        "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS",
        "5",
        "a peer that restarted under the same address stays unreachable",
        True,
    ),
    Variable("MC_TRANSFER_TIMEOUT", "10", "a dead peer is noticed after 30 s", False),
    Variable("MC_TCP_PROGRESS_TIMEOUT_SEC", "10", "a stalled peer is noticed late", False),
)

MEASURED_GAIN = (
    "measured on an H200 with 8,192 tokens of Llama-3.1-8B's shape: tuned, plain Mooncake's time to the first token is "
    ".47 of that at its defaults without a limit on the link, .61 at 25 Gb/s, the same at 10 Gb/s and less"
)
"""What they bring: `plain` beside `plain-tuned` in docs/results/gpu.md."""


def tcp_is_forced(environ: Mapping[str, str]) -> bool:
    """Whether ``MC_FORCE_TCP`` keeps Mooncake from RDMA."""
    return environ.get("MC_FORCE_TCP", "").lower() in ("1", "true", "on")


def tune_tcp(environ: MutableMapping[str, str]) -> list[str]:
    """Set what this backend sets and nobody else has; returns ``name=value`` of each. An empty value counts as set."""
    changed = []
    for variable in TCP_TUNING:
        if variable.set_by_us and variable.name not in environ:
            environ[variable.name] = variable.value
            changed.append(f"{variable.name}={variable.value}")
    return changed


MOST_SHOWN = 32
"""Characters of a value; a label of a metric has an end."""
DEFAULT = "default"


def in_effect(environ: Mapping[str, str]) -> dict[str, str]:
    """What each variable of `TCP_TUNING` is set to, `DEFAULT` where it is not."""
    return {variable.name: environ.get(variable.name, DEFAULT)[:MOST_SHOWN] or DEFAULT for variable in TCP_TUNING}
