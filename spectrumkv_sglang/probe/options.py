"""What a probe is asked to do, and where it says how far it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.launch_flags import Flags
from spectrumkv_sglang.probe.gate import Thresholds
from spectrumkv_sglang.probe.needles import DEFAULT_DEPTHS, DEFAULT_TRIALS
from spectrumkv_sglang.probe.text_runs import CONTINUATION_TOKENS, PREFIX_TOKENS, WINDOWS


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """What a probe is asked to do.

    Attributes:
        model: directory or hub id.
        config: the SpectrumKV configuration that would serve; its allowed tiers are those to be judged.
        explicit_budget: whether the operator chose the budget.
        flags: SGLang's flags, as the operator gave them.
        backend: value of ``--disaggregation-transfer-backend`` in the launch config.
        lengths: of needle prompts, tokens; empty: chosen by ``needle_seconds``.
        needle_seconds: wall time that all needle prompts may take together, as far as the shortest length allows.
        request_seconds: longest that one request may take.
        log_path: where the server's log is copied when it fails.
    """

    model: str
    config: SpectrumKVConfig
    explicit_budget: bool
    flags: Flags
    backend: str
    trials: int = DEFAULT_TRIALS
    depths: tuple[float, ...] = DEFAULT_DEPTHS
    lengths: tuple[int, ...] = ()
    haystack: Path | None = None
    text: Path | None = None
    prefix_tokens: int = PREFIX_TOKENS
    continuation_tokens: int = CONTINUATION_TOKENS
    windows: int = WINDOWS
    seed: int = 0
    needle_seconds: float = 45.0
    request_seconds: float = 600.0
    thresholds: Thresholds = field(default_factory=Thresholds)
    log_path: Path


class ProbeProgress:
    """Where the probe says how far it is; this one says nothing."""

    def note(self, text: str) -> None:
        """One line for people."""

    def begin(self, name: str, steps: int) -> Callable[[], None]:
        """A stage of ``steps`` steps begins; returns what to call after each."""
        return lambda: None
