"""The controller against every fixed choice on a real pair whose link changes while it serves. Needs root, pyroute2.

    python benchmarks/controller.py --model-path DIR --out DIR [--phases 1:12,0.1:12,0:16] [-- SGLang flags]

Prefill and decode run in two network namespaces; a token bucket limits the link between them, and its rate changes
from phase to phase (RATE:REQUESTS, Gb/s, 0: no limit), and with it what requests ask for, where that is said
(RATE:REQUESTS:TARGET:MAX_KL; either may be empty). Every arm is a prefill server of its own: the controller,
SGLang's own backend, and each candidate as a fixed profile. The arms answer every request one after the other, in an
order that rotates, so that a busy moment of the machine meets them alike.

Prompts are random token ids. By default prefill keeps them in its prefix cache, as a conversation's turns are kept:
then a request is hardly more than its transfer. With --fresh both caches are emptied before each request.

controller.json is written as the run goes on; controller.md and, with --plot, controller.png at its end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import plain_transfer_log
from command_line import made
from controller_report import report_of
from controller_samples import CONTROLLER, NATIVE, WARM_UP, Phase, Sample
from link_goodput import goodput_gbps
from pairs import TUNED, Pair, PairBench, PairOptions, Variant
from plain_transfer_log import read_plain_transfer
from sglang_plugin import plugin_folder
from transfer_prompts import prompt_of
from transfer_table import console

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.launch.client import flush_caches, generate_on_pair
from spectrumkv_sglang.launch.netns import linked_hosts
from spectrumkv_sglang.launch.sglang_versions import installed_version
from spectrumkv_sglang.launch.transfer_log_reader import request_transfer
from spectrumkv_sglang.profiles.profile import load_profile
from spectrumkv_sglang.tuning.settings import SHIPPED_CANDIDATES, candidate_label

GIGABIT = 1_000_000_000


@dataclass(frozen=True)
class Fixed:
    """A candidate: profile, budget and the KL that it is said to cost."""

    profile: str
    budget: float
    kl: float

    @property
    def label(self) -> str:
        """As the controller names it."""
        return candidate_label(load_profile(self.profile).name, self.budget)


SHIPPED = tuple(Fixed(c.profile, c.budget, c.kl) for c in SHIPPED_CANDIDATES)


def arms_of(candidates: tuple[Fixed, ...], safe: Fixed, settings: dict[str, str]) -> list[Variant]:
    """One server each; all of ours share a decode that knows every candidate."""
    listed = [{"profile": c.profile, "budget": c.budget, "kl": c.kl} for c in candidates]
    env = {
        **TUNED,
        "SPECTRUMKV_CONTROLLER_ENABLED": "true",
        "SPECTRUMKV_CONTROLLER_CANDIDATES": json.dumps(listed),
        **{f"SPECTRUMKV_CONTROLLER_{name.upper()}": value for name, value in settings.items()},
    }
    off = {"SPECTRUMKV_CONTROLLER_ENABLED": "false"}
    return [
        Variant(CONTROLLER, safe.profile, safe.budget, env=env),
        Variant(NATIVE),
        *(Variant(c.label, c.profile, c.budget, env=env, prefill_env=off) for c in candidates),
    ]


class ControllerRun:
    """One run over all phases; ``document`` is what goes to controller.json."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._console = options, console()
        self._pairs = PairOptions(
            model=options.model_path,
            log_dir=options.out / "logs",
            flags=tuple(options.flags),
            prefill_python_paths=(plugin_folder(options.out / "plugins", Path(plain_transfer_log.__file__)),),
        )
        candidates = options.candidates
        safe = next((c for c in candidates if c.label == options.safe), candidates[1 % len(candidates)])
        self._arms = arms_of(candidates, safe, options.settings)
        self._phases: list[Phase] = []
        self._samples: list[Sample] = []
        self._began = time.monotonic()
        self.document: dict[str, Any] = {
            "sglang": installed_version(),
            "device": self._pairs.device.value,
            "cores": os.cpu_count(),
            "model": options.model_path.name,
            "flags": self._pairs.flags,
            "prompt_tokens": options.prompt_tokens,
            "fresh": options.fresh,
            "target_s": options.target,
            "candidates": [{**asdict(c), "label": c.label} for c in candidates],
            "safe": safe.label,
            "settings": options.settings,
            "failures": [],
        }

    def measure_all(self) -> None:
        """Start the servers, warm them up, run every phase."""
        with linked_hosts() as link, PairBench(self._pairs, link).running(self._arms) as group:
            for name, error in group.failed.items():
                self.document["failures"].append(f"{name} did not start: {error}")
                self._console.print(f"{name}: not started: {error[-600:]}", markup=False)
            if not {CONTROLLER, NATIVE} <= {pair.variant.name for pair in group.pairs}:
                raise SpectrumKVError("the controller's pair or the plain one did not start: nothing to compare")
            self._console.print(f"{len(group.pairs)} arms: ready after {group.ready_seconds:.0f} s")
            self._began = time.monotonic()
            for number in range(max(self._options.warm_up, self._options.prompts)):
                self._round(group.pairs, WARM_UP, number)
            for index, (rate, requests, *_) in enumerate(self._options.phases):
                link.set_rate(round(rate * GIGABIT) if rate else None)
                phase = Phase(rate, requests, goodput_gbps(link), os.getloadavg()[0], time.monotonic() - self._began)
                self._phases.append(phase)
                for number in range(requests):
                    self._round(group.pairs, index, number)
                self.save()
                self._console.print(f"{phase.label} ({phase.goodput_gbps:.3f} by a plain socket): {requests} requests")

    def save(self) -> None:
        """Write controller.json; a reader never sees half of it."""
        self.document["phases"] = [asdict(phase) for phase in self._phases]
        self.document["samples"] = [asdict(sample) for sample in self._samples]
        path = self._options.out / "controller.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    def _round(self, pairs: list[Pair], phase: int, number: int) -> None:
        """One request on every arm; the arm that begins is another each time."""
        for place in range(len(pairs)):
            pair = pairs[(place + number) % len(pairs)]
            try:
                self._samples.append(self._request(pair, phase, number))
            except SpectrumKVError as error:
                self.document["failures"].append(f"phase {phase}, request {number}, {pair.variant.name}: {error}")
                self._console.print(f"{pair.variant.name}: {error}", markup=False)
                if pair.log is not None:
                    pair.log.skip()

    def _request(self, pair: Pair, phase: int, number: int) -> Sample:
        options = self._options
        if options.fresh:
            flush_caches(pair.servers)
        if pair.log is not None:
            pair.log.skip()
        logged = pair.log_path.stat().st_size if pair.log_path.exists() else 0
        tokens = prompt_of(options.prompt_tokens, number % options.prompts, options.vocabulary)
        target, max_kl = (None, None) if phase == WARM_UP else options.phases[phase][2:]
        target = target or (options.target if phase != WARM_UP else None)
        limits = {name: value for name, value in (("ttft_target_s", target), ("max_kl", max_kl)) if value is not None}
        sent = time.monotonic() - self._began
        answer = generate_on_pair(
            pair.prefill,
            pair.decode,
            tokens,
            max_new_tokens=1,
            timeout_seconds=options.request_timeout,
            sampling={"custom_params": {"spectrumkv": limits}} if limits and pair.log is not None else None,
        )
        name = pair.variant.name
        blank = Sample(name, phase, number, options.prompt_tokens, sent, answer.seconds, 0.0, 0, 0, candidate=name)
        blank = replace(blank, target_s=target, max_kl=max_kl)
        if pair.log is None:
            plain = read_plain_transfer(pair.log_path, logged)
            if plain is None or plain.failed:
                raise SpectrumKVError(f"{name}: SGLang's own transfer was not logged, or failed")
            return replace(
                blank,
                transfer_s=plain.seconds,
                native_bytes=plain.wire_bytes,
                wire_bytes=plain.wire_bytes,
                chunks=plain.chunks,
                writes=plain.blocks,
            )
        records = pair.log.next_request()
        moved = request_transfer(records)
        return replace(
            blank,
            transfer_s=moved.transfer_seconds,
            native_bytes=moved.native_bytes,
            wire_bytes=moved.wire_bytes,
            chunks=len(records),
            writes=moved.writes,
            pack_s=sum(record.pack_seconds for record in records),
            write_s=sum(record.write_seconds for record in records),
            wait_s=sum(record.wait_seconds for record in records),
            candidate=records[0].candidate or name,
            decision=records[0].decision.value if records[0].decision else "",
        )


def _phases(text: str) -> list[tuple[float, int, float | None, float | None]]:
    """(Gb/s, requests, TTFT target in seconds, largest KL) of each phase."""
    found = []
    for part in text.split(","):
        rate, requests, *limits = part.split(":")
        target, max_kl = (float(limit) if limit else None for limit in (*limits, "", "")[:2])
        found.append((float(rate), int(requests), target, max_kl))
    return found


def _candidates(text: str) -> tuple[Fixed, ...]:
    found = []
    for part in text.split(","):
        name, kl = part.rsplit(":", 1)
        profile, budget = name.rsplit("@", 1)
        found.append(Fixed(profile, float(budget), float(kl)))
    return tuple(found)


def _settings(text: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in text.split(",") if part)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python benchmarks/controller.py", description="A link that changes.")
    parser.add_argument("--model-path", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for controller.json, tables and logs")
    parser.add_argument(
        "--phases",
        type=_phases,
        default=_phases("1:14,0.1:14,0:20,0.3:14,0:20,0.1:14,1:14"),
        help="RATE:REQUESTS[:TARGET[:MAX_KL]],... in Gb/s, 0: no limit; limits of its requests: s, nats a token",
    )
    parser.add_argument(
        "--candidates", type=_candidates, default=SHIPPED, help="PROFILE@BUDGET:KL,...; default: the shipped ones"
    )
    parser.add_argument("--safe", default="", help="PROFILE@BUDGET of the controller's own server; default: the second")
    parser.add_argument("--settings", type=_settings, default={}, help="of the controller: name=value,...")
    parser.add_argument("--prompt-tokens", type=int, default=1800)
    parser.add_argument("--prompts", type=int, default=4, help="different prompts")
    parser.add_argument("--warm-up", type=int, default=6, help="requests of each arm before the first phase")
    parser.add_argument("--fresh", action="store_true", help="empty the prefix caches before each request")
    parser.add_argument("--target", type=float, default=None, metavar="S", help="TTFT target of every request")
    parser.add_argument("--request-timeout", type=float, default=180.0, help="seconds")
    parser.add_argument("--vocabulary", type=int, default=30000, help="token ids are drawn from 100 to this")
    parser.add_argument("--plot", action="store_true", help="also write controller.png (needs matplotlib)")
    parser.add_argument("flags", nargs="*", help="further SGLang flags, after --")
    options = parser.parse_args()
    options.out = made(options.out)
    return options


def main() -> int:
    """Command line."""
    options = _options()
    run = ControllerRun(options)
    try:
        run.measure_all()
    finally:
        run.save()
    text = report_of(run.document)
    (options.out / "controller.md").write_text(text, encoding="utf-8")
    print(text)
    if options.plot:
        from controller_plot import plot_phases

        plot_phases(run.document, options.out / "controller.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
