"""Faults on a real SGLang pair: what the request that is hit gets, what others get, how long until all is well again.

    python benchmarks/faults.py --out build/faults                       # every case, on this machine's CPU or GPU
    python benchmarks/faults.py --out build/faults --only stop,drop,reuse,abort
    python benchmarks/faults.py --out build/faults --model DIR -- --disable-cuda-graph

Prefill and decode are real servers with SmolLM2 (or --model) and `fault_points` as a plugin; answers are compared with
those of a plain server, which is stopped before the pair starts; they are kept for later runs in the same folder.
A killed server is started again.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from command_line import made, this_machine
from fault_cases import AT_ONCE, FaultBench
from fault_pair import SETTINGS, PairSettings
from fault_points import DECODE_STAGES, PREFILL_STAGES
from fault_report import Row, write

from spectrumkv_sglang.launch.model import fetch_model
from spectrumkv_sglang.launch.netns import linked_hosts
from spectrumkv_sglang.launch.processes import stopping_on_signals
from spectrumkv_sglang.launch.servers import READY_TIMEOUT_SECONDS, Fleet, Role, detect_device

KINDS = "drop,twice,reuse,abort,stop,pool,pages,kill"


def logs_hold_a_prompt(out: Path, prompts: list[str]) -> list[str]:
    """Lines of our modules in the servers' logs that hold a piece of a prompt."""
    pieces = {text[start : start + 24] for text in prompts for start in range(0, len(text) - 24, 24)}
    return [
        line[:120]
        for log in out.glob("*.log")
        for line in log.read_text(errors="replace").splitlines()
        if any(piece in line for piece in pieces)
    ]


def main() -> int:
    """Run the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of the model; SmolLM2 by default")
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and results")
    parser.add_argument("--only", help=f"kinds of faults, with commas; {KINDS} by default, and link")
    parser.add_argument("--link-faults", action="store_true", help="two network namespaces whose link fails; as root")
    parser.add_argument("--minutes", type=float, default=600, help="no new case begins after this many")
    parser.add_argument("--ready-seconds", type=float, default=READY_TIMEOUT_SECONDS, help="for a server's start")
    parser.add_argument("flags", nargs="*", help="further SGLang flags for all servers, after --")
    options = parser.parse_args()
    out, started = made(options.out), time.monotonic()
    kinds = (options.only or KINDS + (",link" if options.link_faults else "")).split(",")
    model = options.model or fetch_model(Path("build/models"))
    rows: list[Row] = []
    table = "no case ran"
    machine = this_machine()
    with stopping_on_signals(), ExitStack() as stack:
        link = stack.enter_context(linked_hosts()) if options.link_faults else None
        fleet = stack.enter_context(Fleet())
        flags = ("--log-level", "debug", *options.flags)
        settings = PairSettings(model, out, out, detect_device(), SETTINGS, flags, link)
        bench = FaultBench(settings, fleet, options.ready_seconds)
        cases: dict[str, list[Callable[[], Row]]] = {
            "drop": [
                *(lambda at=at: bench.message(Role.PREFILL, at, "drop") for at in ("before OPEN", "before COMMIT")),
                *(lambda at=at: bench.message(Role.DECODE, at, "drop") for at in ("before GRANT", "before DONE")),
            ],
            "twice": [
                *(lambda at=at: bench.message(Role.PREFILL, at, "twice") for at in ("before OPEN", "before COMMIT")),
                lambda: bench.message(Role.DECODE, "before DONE", "twice"),
            ],
            "link": [
                *(lambda at=at: bench.cut(Role.PREFILL, at) for at in ("before OPEN", "mid write", "before COMMIT")),
                lambda: bench.cut(Role.DECODE, "mid unpack"),
            ],
            "pool": [
                lambda: bench.other_decode(
                    "landing pool exhausted",
                    f"1 slot, {AT_ONCE} requests at once",
                    {
                        "SPECTRUMKV_LANDING_SLOTS": "1",
                        "SPECTRUMKV_SLOTS_PER_CHUNK": "1",
                        "SPECTRUMKV_SLOT_WAIT_S": "0",
                    },
                    (),
                )
            ],
            "pages": [lambda: bench.other_decode("decode with pages of 16 tokens", "", {}, ("--page-size", "16"))],
            "reuse": [bench.reuse],
            "abort": [bench.abort],
            "stop": [
                *(lambda stage=stage: bench.stop(Role.PREFILL, stage) for stage in PREFILL_STAGES),
                *(lambda stage=stage: bench.stop(Role.DECODE, stage) for stage in DECODE_STAGES),
            ],
            "kill": [
                *(lambda stage=stage: bench.kill(Role.DECODE, stage) for stage in DECODE_STAGES),
                *(lambda stage=stage: bench.kill(Role.PREFILL, stage) for stage in PREFILL_STAGES),
            ],
        }
        for kind in kinds:
            for run in cases[kind]:
                if time.monotonic() - started > options.minutes * 60:
                    break
                rows.append(run())
                table = write(rows, out, machine)
    found = logs_hold_a_prompt(out, bench.prompts)
    print(table)
    print(f"{sum(row.passed for row in rows)} of {len(rows)} cases passed; log lines with prompt text: {len(found)}")
    print(f"threads left here: {[t.name for t in threading.enumerate() if t is not threading.main_thread()]}")
    return 0 if all(row.passed for row in rows) and not found else 1


if __name__ == "__main__":
    sys.exit(main())
