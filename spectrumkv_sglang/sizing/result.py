"""Everything that ``spectrumkv size`` found; what ``--json`` holds."""

from __future__ import annotations

from dataclasses import dataclass

from spectrumkv_sglang.sizing.advice import Advice
from spectrumkv_sglang.sizing.estimate import PromptEstimate
from spectrumkv_sglang.sizing.speeds import SpeedTable

SIZING_FORMAT = 1


@dataclass(frozen=True)
class PoolMemory:
    """Memory of one server beside SGLang's own, bytes: slots on every rank."""

    landing_bytes: int
    staging_bytes: int


@dataclass(frozen=True)
class SizingResult:
    """The model, the link, what was assumed, and the estimates; ``estimates`` is empty for KV that travels natively.

    ``format``: of this record. ``kv_bytes_per_token``: all ranks together; 0 where the config does not tell.
    """

    format: int
    model: str
    native_reason: str | None
    detail: str
    kv_bytes_per_token: int
    tp: int
    gbps: float
    goodput_gbps: float
    min_tokens: int
    memory: PoolMemory
    assumptions: list[str]
    speeds: SpeedTable | None
    estimates: list[PromptEstimate]
    advice: list[Advice]

    @property
    def worth_it(self) -> bool:
        """Whether any of the prompts gains."""
        return any(advice.worth_it for advice in self.advice)
