"""How long the parts of an evaluation take beside one another, for the time that is left: in tokens of prefill."""

from __future__ import annotations

_JUDGED = 2.0
"""A judged token attends to the whole prefix, and its logits are compared."""
_GENERATED = 20.0
"""A generated token is a forward of its own."""


def judged_work(tokens: int) -> float:
    """Of moving a prefix and judging ``tokens`` after it."""
    return _JUDGED * tokens


def generated_work(tokens: int) -> float:
    """Of ``tokens`` generated one by one."""
    return _GENERATED * tokens
