"""Thousands of requests against a real SGLang pair under random faults; every answer is compared as it comes.

    python benchmarks/soak.py --out build/soak --requests 10000 --kills 6 --link-faults      # hours on a CPU
    python benchmarks/soak.py --out build/soak --minutes 8 --kills 2 --model DIR -- --disable-cuda-graph

A plain server is asked for each distinct prompt first. Then clients draw prompts at random, while control messages
are lost, late or doubled, schedulers are stopped and killed, clients go away, room ids come back, the link fails and
the clients become four times as many. How answers are judged: `soak_judging`; which errors are expected:
`soak_windows`. Exit status 1 for a wrong answer, an error outside every fault, or anything still held at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from command_line import made, this_machine
from fault_pair import SETTINGS, FaultPair, PairSettings
from soak_account import Account
from soak_client import Reply, ask_pair
from soak_faults import SoakFaults, Weights
from soak_judging import Expected, Limits
from soak_load import Load
from soak_plain import asked_plain, expected_of
from soak_prompts import soak_prompts
from soak_report import Soak
from soak_watch import Quiet, Watch
from soak_windows import Windows

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.launch.model import fetch_model
from spectrumkv_sglang.launch.netns import linked_hosts
from spectrumkv_sglang.launch.processes import ProcessError, stopping_on_signals
from spectrumkv_sglang.launch.servers import READY_TIMEOUT_SECONDS, Device, Fleet, Role, SGLangServer, detect_device
from spectrumkv_sglang.launch.sglang_versions import installed_version

LOSSLESS = "native-packed"
_SECONDS_FOR_THE_END = 40.0
_SECONDS_FOR_A_KILL = 100.0
# A server that is killed late has no life left to be watched.
_LAST_KILL = 0.75
_SLOTS_PER_CHUNK: int = SpectrumKVConfig.model_fields["slots_per_chunk"].default


class SoakBench:
    """The servers of a run, the right answers, and the load with its faults."""

    def __init__(self, options: argparse.Namespace, settings: PairSettings, fleet: Fleet) -> None:
        self.options, self.settings, self.fleet = options, settings, fleet
        self.started = time.monotonic()
        self.pair = FaultPair(settings, fleet)
        self.prompts = soak_prompts(options.prompts, options.longest_words, options.seed)
        self.windows = Windows()
        expected, noise = self._start_all()
        lossy = options.profile != LOSSLESS
        limits = Limits(options.tie_gap, options.most_shift)
        self.account = Account(expected, self.windows, limits, lossy)
        self.load = Load(
            self.pair,
            self.prompts,
            self.account,
            clients=options.concurrency,
            requests=options.requests,
            seed=options.seed,
            leave_share=options.leave_share,
            timeout_seconds=options.request_timeout,
        )
        self.watch, self.quiet = Watch(self.pair), Quiet(self.pair, self.load)
        machine = this_machine() | {"device": settings.device.value, "sglang": installed_version()}
        told = {name: str(value) for name, value in vars(options).items()}
        self.soak = Soak(machine, told, self.account, self.windows.all, plain_noise=noise)
        self.soak.least_agreement = options.least_agreement

    # ---- before the load -----------------------------------------------------------------------------------------

    def _start_all(self) -> tuple[list[list[Expected]], str]:
        """Right answers first, from the plain server or from what a former run kept; then the pair is up."""
        source = repr((self.prompts, str(self.settings.model), self.settings.flags, self.settings.device.value))
        kept = self.settings.out / "plain_answers.json"
        digest = hashlib.sha256(source.encode()).hexdigest()
        content = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
        known = content.get("prompts") == digest
        plain = None if known else self.pair.start(Role.PLAIN)
        if plain is not None and not self.options.side_by_side:
            content = self._ask_plain(plain, digest, kept)
            plain = None
        for role in (Role.PREFILL, Role.DECODE):
            self.pair.start(role)
        if plain is not None:
            content = self._ask_plain(plain, digest, kept)
        self.fleet.wait_ready(list(self.pair.servers.values()), timeout_seconds=self.options.ready_seconds)
        self._say("pair is up")
        expected = [[Expected(*map(tuple, one)) for one in answers] for answers in content["answers"]]
        self._warm_up(expected)
        return expected, content["noise"]

    def _ask_plain(self, plain: SGLangServer, digest: str, kept: Path) -> dict[str, object]:
        self.fleet.wait_ready([plain], timeout_seconds=self.options.ready_seconds)
        self._say("plain server is up")
        expected, noise = asked_plain(plain, self.prompts, self.options.concurrency)
        self.fleet.stop([plain])
        answers = [[list(asdict(one).values()) for one in some] for some in expected]
        content: dict[str, object] = {"prompts": digest, "noise": noise, "answers": answers}
        kept.write_text(json.dumps(content), encoding="utf-8")
        self._say(f"{len(expected)} prompts answered by the plain server: {noise}")
        return content

    def _warm_up(self, expected: list[list[Expected]]) -> None:
        """As many requests at once as a burst has; with a lossy profile also the pair's own answers, alone."""

        def ask(number: int) -> Reply:
            prompt = self.prompts[number % len(self.prompts)]
            return ask_pair(self.pair.prefill, self.pair.decode, prompt.text, prompt.new_tokens, timeout_seconds=180)

        if self.options.profile != LOSSLESS:
            for number, answers in enumerate(expected):
                answers.append(expected_of(ask(number)))
        with ThreadPoolExecutor(4 * self.options.concurrency) as pool:
            for reply in pool.map(ask, range(4 * self.options.concurrency)):
                expected_of(reply)

    # ---- the load ------------------------------------------------------------------------------------------------

    @property
    def seconds_left(self) -> float:
        """Until the load has to end."""
        seconds: float = self.options.minutes * 60
        return seconds - _SECONDS_FOR_THE_END - (time.monotonic() - self.started)

    @property
    def progress(self) -> float:
        """How much of the load is done, by requests or by time."""
        by_time = self.load.now / max(1.0, self.load.now + self.seconds_left)
        return max(by_time, self.account.answered / int(self.options.requests))

    def run(self) -> Soak:
        """Load and faults until the requests or the minutes are over, then a last quiet check."""
        options = self.options
        faults = SoakFaults(
            self.pair, self.load, self.windows, options.seed, options.weights, options.ready_seconds
        )  # fmt: skip
        drawn = random.Random(f"{options.seed} times")
        kills = [_LAST_KILL * (number + drawn.uniform(0.2, 0.8)) / options.kills for number in range(options.kills)]
        others = [role for role in (Role.PREFILL, Role.DECODE) if role.value != options.first_killed]
        victims = [Role(options.first_killed), *others] * options.kills
        checks = 1
        over = threading.Event()
        teller = threading.Thread(target=self._tell, args=(over,), name="teller", daemon=True)
        self.watch.start()
        self.load.start()
        teller.start()
        try:
            while self.seconds_left > 0 and not self.load.finished:
                time.sleep(min(drawn.uniform(0.5, 2.0) * options.gap, max(0.0, self.seconds_left)))
                if self.load.now > checks * options.check_minutes * 60:
                    self.quiet.check(options.request_timeout)
                    checks = int(self.load.now // (options.check_minutes * 60)) + 1
                if self.load.finished or self.seconds_left <= 0:
                    break
                if kills and self.progress >= kills[0] and self.seconds_left > _SECONDS_FOR_A_KILL:
                    kills.pop(0)
                    faults.kill(victims.pop(0))
                    self.quiet.peer_restarted()
                elif self.seconds_left > 15:
                    faults.next()
        except ProcessError as error:
            self.soak.broken = f"a server ended: {str(error)[:300]}"
        finally:
            self.soak.unended = not self.load.stop()
            over.set()
            teller.join()
        self.soak.seconds = self.load.now
        if not self.soak.broken:
            self.quiet.check(options.request_timeout)
        self.watch.stop()
        if kills:
            self._say(f"{len(kills)} of {options.kills} kills had no time")
        self._save()
        return self.soak

    def _tell(self, over: threading.Event) -> None:
        turn = 0
        while not over.wait(10.0):
            turn += 1
            active = [window.fault for window in list(self.windows.all) if window.ended is None]
            verdicts = ", ".join(f"{name} {count}" for name, count in sorted(dict(self.account.verdicts).items()))
            self._say(
                f"{verdicts}; unexpected {self.account.unexpected.total()}; faults {len(self.windows.all)}; "
                f"under way {self.load.in_flight}; now {', '.join(active) or 'no fault'}"
            )
            if turn % 3 == 0:
                self.soak.seconds = self.load.now
                self._save()

    def _save(self) -> None:
        soak, watch = self.soak, self.watch
        soak.checks, soak.growth = self.quiet.checks, watch.growth()
        soak.chunks, soak.failed = watch.totals(watch.chunks), watch.totals(watch.failed)
        soak.write(self.settings.out)

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self.started:6.0f} s  {text}", flush=True)


def main() -> int:
    """Command line."""
    on_cpu = detect_device() is Device.CPU
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of the model; SmolLM2 by default")
    parser.add_argument("--out", type=Path, required=True, help="folder for soak.json, soak.md and plain_answers.json")
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs; OUT/logs by default")
    parser.add_argument("--requests", type=int, default=10000, help="the load ends after so many whole answers")
    parser.add_argument("--minutes", type=float, default=600, help="for everything, the servers' start included")
    parser.add_argument(
        "--concurrency", type=int, default=3 if on_cpu else 16, help="clients; 4 times as many in bursts"
    )
    parser.add_argument("--prompts", type=int, default=100 if on_cpu else 300, help="distinct prompts")
    parser.add_argument("--longest-words", type=int, default=200 if on_cpu else 1200, help="of a prompt")
    parser.add_argument("--profile", default=LOSSLESS, help="of prefill; others than native-packed are judged by share")
    parser.add_argument("--budget", type=float, help="b, wire bytes / native bytes; the profile's own by default")
    parser.add_argument(
        "--landing-slots", type=int, default=4, help="decode's slots of 4 MiB, few so that they run out"
    )
    parser.add_argument(
        "--slot-wait", type=float, default=0.05, help="seconds until a transfer goes native for want of one"
    )
    parser.add_argument("--kills", type=int, default=2, help="SIGKILLs, of prefill and decode in turn, each a restart")
    parser.add_argument("--first-killed", choices=("prefill", "decode"), default="decode")
    parser.add_argument("--link-faults", action="store_true", help="two network namespaces whose link fails; as root")
    parser.add_argument("--gap", type=float, default=4.0, help="seconds between faults, on average about 1.25 times it")
    parser.add_argument("--leave-share", type=float, default=0.02, help="share of requests whose client goes away")
    parser.add_argument("--check-minutes", type=float, default=3.0, help="between quiet checks for leaks")
    parser.add_argument("--request-timeout", type=float, default=90.0, help="seconds")
    parser.add_argument("--tie-gap", type=float, default=Limits.tie_gap, help="log-probability, see soak_judging")
    parser.add_argument("--most-shift", type=float, default=Limits.most_shift, help="log-probability, the same")
    parser.add_argument("--least-agreement", type=float, default=0.8, help="of a lossy profile: share of equal answers")
    parser.add_argument("--side-by-side", action=argparse.BooleanOptionalAction, default=not on_cpu,
                        help="start the plain server together with the pair")  # fmt: skip
    parser.add_argument("--ready-seconds", type=float, default=READY_TIMEOUT_SECONDS, help="for a server's start")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, faults and times")
    parser.add_argument("flags", nargs="*", help="further SGLang flags for all servers, after --")
    options = parser.parse_args()
    options.weights = Weights()
    out = made(options.out)
    logs = made(options.logs or out / "logs")
    env = SETTINGS | {"SPECTRUMKV_PROFILE": options.profile, "SPECTRUMKV_LANDING_SLOTS": str(options.landing_slots)}
    env |= {"SPECTRUMKV_REQUIRE_PROBE": "false", "SPECTRUMKV_SLOT_WAIT_S": str(options.slot_wait)}
    env["SPECTRUMKV_SLOTS_PER_CHUNK"] = str(min(_SLOTS_PER_CHUNK, options.landing_slots))
    if options.budget is not None:
        env["SPECTRUMKV_BUDGET"] = str(options.budget)
    model = options.model or fetch_model(Path("build/models"))
    with stopping_on_signals(), ExitStack() as stack:
        link = stack.enter_context(linked_hosts()) if options.link_faults else None
        fleet = stack.enter_context(Fleet())
        settings = PairSettings(model.resolve(), out, logs, detect_device(), env, tuple(options.flags), link)
        try:
            soak = SoakBench(options, settings, fleet).run()
        except SpectrumKVError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print(soak.write(out))
    return 1 if soak.faults_found() else 0


if __name__ == "__main__":
    sys.exit(main())
