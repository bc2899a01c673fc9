"""The replay simulator against a run of the controller benchmark: predicted and measured transfers of every arm.

    python benchmarks/controller_simulation.py controller.json [--slot-mib 16] [--out FILE.md]

The simulator is fed with the requests and the link as they were, and with speeds and fixed costs that were measured
without a limit alone. The limited phases are predictions: nothing of them was fitted, but what a plain socket got.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller_report import table
from controller_samples import CONTROLLER, EXPLORING, NATIVE, SETTLING, Phase, Sample, read_samples

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.simulation.replay import Cluster, CodecSpeed, Outcome, outcomes_of
from spectrumkv_sglang.simulation.traces import BandwidthTrace, Request
from spectrumkv_sglang.tuning.frontier import NATIVE as NATIVE_CANDIDATE
from spectrumkv_sglang.tuning.frontier import Candidate
from spectrumkv_sglang.tuning.link_model import bytes_per_second
from spectrumkv_sglang.tuning.settings import ControllerSettings, candidate_label

_LEAST_UNPACK = 1e-6


@dataclass(frozen=True)
class Compared:
    """Median transfers of one arm in one phase, settled requests; seconds."""

    arm: str
    phase: Phase
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted_s / self.measured_s - 1


class Replayed:
    """A run, and what the simulator makes of it.

    Args:
        payload_bytes: the servers' ``slot_bytes``.

    Raises:
        SpectrumKVError: the run has no phase without a limit.
    """

    def __init__(self, document: Mapping[str, Any], payload_bytes: float) -> None:
        self._document, self._payload_bytes = document, payload_bytes
        self.phases, self._samples = read_samples(document)
        self._unlimited = {number for number, phase in enumerate(self.phases) if not phase.rate_gbps}
        if not self._unlimited:
            raise SpectrumKVError("no phase without a limit: the speeds of the codecs are measured in one")
        self.arms = list(dict.fromkeys(sample.arm for sample in self._samples))
        self._link = BandwidthTrace(
            [(0.0, bytes_per_second(self.phases[min(self._unlimited)].goodput_gbps))]
            + [(max(phase.began_s, 1e-9), bytes_per_second(phase.goodput_gbps)) for phase in self.phases]
        )
        self._candidates = {arm: self._candidate(arm) for arm in self.arms if arm not in (CONTROLLER, NATIVE)}
        self._outcomes = {arm: self._replay(arm) for arm in self.arms}

    def compared(self) -> list[Compared]:
        """Every arm in every phase."""
        return [
            Compared(arm, phase, statistics.median(s.transfer_s for s, _ in pairs), _median(o for _, o in pairs))
            for arm in self.arms
            for number, phase in enumerate(self.phases)
            if (pairs := [p for p in self._outcomes[arm] if p[0].phase == number and p[0].number >= SETTLING])
        ]

    def agreement(self) -> tuple[int, int]:
        """Requests of the controller that it sends alike in the replay, and all but the trials of either."""
        pairs = [(s, o) for s, o in self._outcomes[CONTROLLER] if s.phase >= 0 and s.decision != EXPLORING]
        return sum(s.candidate == o.candidate.name for s, o in pairs), len(pairs)

    def totals(self) -> dict[str, tuple[float, float]]:
        """Sums of each arm's transfers over the phases: measured, predicted."""
        return {
            arm: (
                sum(s.transfer_s for s, _ in pairs if s.phase >= 0),
                sum(o.sending_s for s, o in pairs if s.phase >= 0),
            )
            for arm, pairs in self._outcomes.items()
        }

    def speeds(self) -> dict[str, CodecSpeed]:
        """What the codecs were measured to do without a limit; the unpacking holds what nothing hides."""
        return {arm: self._codec(arm) for arm in self._candidates}

    def _free(self, arm: str) -> list[Sample]:
        found = [s for s in self._samples if s.arm == arm and s.phase in self._unlimited and s.number >= SETTLING]
        if not found:
            raise SpectrumKVError(f"no settled request of {arm} without a limit")
        return found

    def _candidate(self, arm: str) -> Candidate:
        samples = self._free(arm)
        b = sum(s.wire_bytes for s in samples) / sum(s.native_bytes for s in samples)
        return Candidate(arm, b=b, kl=self._kl().get(arm, 0.0))

    def _kl(self) -> dict[str, float]:
        return {candidate_label(Path(c["profile"]).stem, c["budget"]): c["kl"] for c in self._document["candidates"]}

    def _bandwidth(self) -> float:
        return bytes_per_second(statistics.median(self.phases[number].goodput_gbps for number in self._unlimited))

    def _codec(self, arm: str) -> CodecSpeed:
        """Speeds by which the pipeline takes as long as it did without a limit."""
        samples = self._free(arm)
        native = statistics.median(s.native_bytes for s in samples)
        payloads = max(1, math.ceil(statistics.median(s.wire_bytes for s in samples) / self._payload_bytes))
        pack = statistics.median(s.pack_s for s in samples) / payloads
        write = statistics.median(s.wire_bytes for s in samples) / self._bandwidth() / payloads
        wanted = statistics.median(s.transfer_s for s in samples)
        low, high = _LEAST_UNPACK, max(wanted, 2 * _LEAST_UNPACK)
        for _ in range(60):  # the pipeline's time grows with the seconds of a stage
            unpack = (low + high) / 2
            seconds = pack + write + unpack + (payloads - 1) * max(pack, write, unpack)
            low, high = (unpack, high) if seconds < wanted else (low, unpack)
        return CodecSpeed(native / payloads / max(pack, 1e-9), native / payloads / unpack)

    def _cluster(self, arm: str) -> Cluster:
        native, own = self._free(NATIVE), self._free(arm)
        tokens = own[0].prompt_tokens
        rest = statistics.median(s.ttft_s - s.transfer_s for s in own)
        over = statistics.median(s.transfer_s - s.wire_bytes / self._bandwidth() for s in native)  # of all its chunks
        return Cluster(
            prefill_ranks=1,
            prefill_tokens_per_second=tokens / max(rest, 1e-3),
            decode_seconds_per_token=0.0,
            kv_bytes_per_token=statistics.median(s.native_bytes / s.prompt_tokens for s in native),
            codecs=self.speeds(),
            native_chunk_seconds=max(0.0, over),
            payload_bytes=self._payload_bytes,
        )

    def _replay(self, arm: str) -> list[tuple[Sample, Outcome]]:
        samples = sorted((s for s in self._samples if s.arm == arm), key=lambda s: s.sent_s)
        candidates = list(self._candidates.values())
        fixed = {CONTROLLER: None, NATIVE: NATIVE_CANDIDATE}.get(arm, self._candidates.get(arm))
        settings = {name: float(value) for name, value in self._document["settings"].items()}
        outcomes = outcomes_of(
            [Request(s.sent_s, s.prompt_tokens, 1) for s in samples],
            self._link,
            self._cluster(arm),
            candidates,
            self._candidates[self._document["safe"]],
            ControllerSettings(**settings),
            fixed=fixed,
        )
        return list(zip(samples, outcomes, strict=True))


def report_of(replayed: Replayed) -> str:
    """Predicted beside measured, as Markdown."""
    compared = replayed.compared()
    rows = []
    for arm in replayed.arms:
        of_arm = [c for c in compared if c.arm == arm]
        rows.append(
            (arm, *(f"{c.predicted_s * 1e3:,.0f} / {c.measured_s * 1e3:,.0f} ({c.error:+.0%})" for c in of_arm))
        )
    columns = ("arm", *(phase.label for phase in replayed.phases))
    limited = [c for c in compared if c.phase.rate_gbps]
    fixed = [abs(c.error) for c in limited if c.arm != CONTROLLER]
    controlled = [abs(c.error) for c in limited if c.arm == CONTROLLER]
    same, of = replayed.agreement()
    totals = [
        (arm, f"{measured:.1f}", f"{predicted:.1f}", f"{predicted / measured - 1:+.1%}")
        for arm, (measured, predicted) in replayed.totals().items()
    ]
    speeds = ", ".join(
        f"{arm} {speed.pack / 1e6:,.0f} and {speed.unpack / 1e6:,.0f}" for arm, speed in replayed.speeds().items()
    )
    return "\n\n".join(
        (
            "Predicted / measured median transfer, ms (error). Speeds without a limit, MB/s packed and unpacked: "
            f"{speeds}.",
            table(columns, rows),
            f"Fixed arms on limited links: error {_mean(fixed):.1%} on average, {max(fixed):.1%} at most; the "
            f"controller's arm {_mean(controlled):.1%} and {max(controlled):.1%}; {same} of {of} decisions alike.",
            table(("arm", "measured s, sum", "predicted", "error"), totals),
        )
    )


def _median(outcomes: Any) -> float:
    return statistics.median(outcome.sending_s for outcome in outcomes)


def _mean(values: Sequence[float]) -> float:
    return statistics.mean(values)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python benchmarks/controller_simulation.py", description="Simulator, held.")
    parser.add_argument("run", type=Path, metavar="controller.json")
    parser.add_argument("--slot-mib", type=float, default=16.0, help="slot_bytes of the servers")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE.md")
    options = parser.parse_args()
    document = json.loads(options.run.read_text(encoding="utf-8"))
    text = report_of(Replayed(document, options.slot_mib * 1024 * 1024)) + "\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
