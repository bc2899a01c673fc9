"""Deployment shapes on real SGLang pairs: which KV travels tiered, which natively and why, whether answers are right.

    python benchmarks/shapes.py --out build/shapes --model DIR --window-model DIR
    python benchmarks/shapes.py --out build/shapes --model DIR --only tp-2-1,tp-1-2,pp-2
    python benchmarks/shapes.py --out build/shapes --model DIR --device cuda -- --cuda-graph-max-bs-decode 16

For each shape a plain server with the same flags is asked first, then a prefill and a decode server start and are asked
the same, greedily, with a profile that loses nothing. Where a server does not start or an answer is not right, SGLang's
own backend is tried in our place, so that the table says whose fault it is. Flags after -- go to SGLang.

--model must have an even number of KV heads for the TP shapes (SmolLM2 has three).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from command_line import made, this_machine
from shape_bench import BenchSettings, ShapeBench
from shape_cases import Models, make_tiny_mla, shapes
from shape_report import Row, write

from spectrumkv_sglang.launch.processes import stopping_on_signals
from spectrumkv_sglang.launch.servers import READY_TIMEOUT_SECONDS, Device, Fleet, detect_device
from spectrumkv_sglang.launch.sglang_versions import installed_version


def main() -> int:
    """Run the shapes that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and results")
    parser.add_argument("--model", type=Path, required=True, help="directory of a model with plain attention")
    parser.add_argument("--window-model", type=Path, help="directory of a model with sliding windows (Gemma 3)")
    parser.add_argument(
        "--mla-model", type=Path, help="directory of an MLA model; a tiny one without weights by default"
    )
    parser.add_argument("--only", help="names of shapes, with commas; all by default")
    parser.add_argument("--device", choices=[device.value for device in Device], help="found out by default")
    parser.add_argument("--profile", default="native-packed", help="one that loses nothing: answers are compared")
    parser.add_argument("--new-tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--longest-words", type=int, help="cut the prompts of 300 to 700 words, for a busy CPU")
    parser.add_argument("--ready-seconds", type=float, default=READY_TIMEOUT_SECONDS, help="for the start of servers")
    parser.add_argument("--request-seconds", type=float, default=300.0, help="for one answer")
    parser.add_argument("flags", nargs="*", help="further SGLang flags for all servers, after --")
    options = parser.parse_args()
    out = made(options.out)
    mla = options.mla_model or make_tiny_mla(out / "tiny-mla", options.model)
    models = Models(options.model, options.window_model, mla)
    known = {shape.name: shape for shape in shapes(models)}
    names = options.only.split(",") if options.only else list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no shape {', '.join(unknown)}; there are {', '.join(known)}")
    device = Device(options.device) if options.device else detect_device()
    machine = this_machine() | {"device": device.value}
    machine |= {"sglang": installed_version(), "model": options.model.name, "flags": " ".join(options.flags)}
    settings = BenchSettings(
        models=models,
        out=out,
        device=device,
        profile=options.profile,
        flags=tuple(options.flags),
        new_tokens=options.new_tokens,
        ready_seconds=options.ready_seconds,
        request_seconds=options.request_seconds,
        longest_words=options.longest_words,
    )
    rows: list[Row] = []
    table = "no shape ran"
    with stopping_on_signals(), Fleet() as fleet:
        bench = ShapeBench(settings, fleet)
        for name in names:
            rows.append(bench.run(known[name]))
            print(f"{'ok  ' if rows[-1].passed else 'BAD '} {rows[-1]}", flush=True)
            table = write(rows, out, machine)
    print(table)
    print(f"{sum(row.passed for row in rows)} of {len(rows)} shapes passed")
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
