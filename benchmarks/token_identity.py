"""Whether a pair answers token for token as a plain server does, for each dtype: table, JSON, exit status 1 if not.

    python benchmarks/token_identity.py --model-path DIR --out DIR [--dtypes bfloat16,float16] [-- SGLang flags]

For each dtype a plain server, a prefill and a decode server (profile native-packed, or the one given) start side by
side with SGLang's own defaults: overlap scheduling, and CUDA graphs where there is a GPU. All answer the same prompts
greedily, one at a time, with empty prefix caches: texts of 5 to about 900 tokens, and random token ids of the lengths
asked for, so that a prompt may span several prefill chunks.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from command_line import made
from rich.console import Console
from rich.table import Table

from spectrumkv_sglang.launch.client import flush_caches, generate, generate_on_pair
from spectrumkv_sglang.launch.prompts import LONG_PROMPTS, SHORT_PROMPTS
from spectrumkv_sglang.launch.servers import Device, Fleet, Role, ServerSpec, SGLangServer, detect_device
from spectrumkv_sglang.launch.sglang_versions import installed_version
from spectrumkv_sglang.launch.transfer_log_reader import TransferLogReader, request_transfer

BACKEND = "spectrumkv_tcp"
# What a server of this benchmark needs beside SGLang's defaults; flags after `--` override them.
_GPU_FLAGS = ("--random-seed", "1", "--max-total-tokens", "65536", "--max-running-requests", "16")


@dataclass(frozen=True)
class Answer:
    """One prompt's answers. ``equal_tokens`` counts the first tokens on which pair and plain server agree."""

    dtype: str
    prompt: str
    prompt_tokens: int
    new_tokens: int
    equal_tokens: int
    path: str
    achieved_b: float

    @property
    def identical(self) -> bool:
        """All tokens are equal."""
        return self.equal_tokens == self.new_tokens


def common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Number of leading tokens that two answers share."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


class Trio:
    """Plain server and pair of one dtype."""

    def __init__(self, fleet: Fleet, dtype: str, options: argparse.Namespace) -> None:
        self.dtype, self._options = dtype, options
        self._log_path = (options.out / "logs" / f"{dtype}.jsonl").resolve()
        self._log_path.unlink(missing_ok=True)
        self.plain = fleet.start(self._server(Role.PLAIN))
        self.prefill = fleet.start(self._server(Role.PREFILL))
        self.decode = fleet.start(self._server(Role.DECODE))
        self.log = TransferLogReader(self._log_path)

    def ask(self, name: str, prompt: str | list[int]) -> Answer:
        """Put one prompt to both."""
        flush_caches([self.plain, self.prefill, self.decode])
        self.log.skip()
        new_tokens = self._options.new_tokens
        plain = generate(self.plain, prompt, max_new_tokens=new_tokens)
        pair = generate_on_pair(self.prefill, self.decode, prompt, max_new_tokens=new_tokens)
        moved = request_transfer(self.log.next_request())
        return Answer(
            dtype=self.dtype,
            prompt=name,
            prompt_tokens=pair.prompt_tokens,
            new_tokens=max(len(plain.output_ids), len(pair.output_ids)),
            equal_tokens=common_prefix(pair.output_ids, plain.output_ids),
            path=moved.path,
            achieved_b=moved.wire_bytes / moved.native_bytes,
        )

    def _server(self, role: Role) -> SGLangServer:
        device = detect_device()
        env = {"SPECTRUMKV_PROFILE": self._options.profile, "SPECTRUMKV_BUDGET": str(self._options.budget)}
        if role is Role.PREFILL:
            env["SPECTRUMKV_TRANSFER_LOG"] = str(self._log_path)
        spec = ServerSpec(
            role=role,
            model=self._options.model_path,
            backend=BACKEND,
            device=device,
            own_flags=device is Device.CPU,
            env=env if role is not Role.PLAIN else {},
            extra_args=(
                *(_GPU_FLAGS if device is Device.CUDA else ()),
                *("--dtype", self.dtype),
                *self._options.flags,
            ),
        )
        return SGLangServer(spec, f"{role.value}-{self.dtype}", log_dir=self._options.out / "logs")


def run(options: argparse.Namespace, console: Console) -> list[Answer]:
    """All dtypes and prompts."""
    prompts: dict[str, str | list[int]] = {prompt.name: prompt.text for prompt in (*SHORT_PROMPTS, *LONG_PROMPTS)}
    for length in options.random_lengths:
        drawn = random.Random(length)
        prompts[f"{length} random ids"] = [drawn.randrange(100, options.vocabulary) for _ in range(length)]
    answers = []
    with Fleet() as fleet:
        trios = [Trio(fleet, dtype, options) for dtype in options.dtypes]
        fleet.wait_ready()
        for trio in trios:
            answers += [trio.ask(name, prompt) for name, prompt in prompts.items()]
            console.print(f"{trio.dtype}: {len(prompts)} prompts answered")
    return answers


def table_of(answers: Sequence[Answer]) -> Table:
    """One line a prompt."""
    table = Table(title="Pair against plain server")
    for column in ("dtype", "prompt", "tokens", "equal new tokens", "path", "b"):
        table.add_column(column, justify="left" if column in ("dtype", "prompt", "path") else "right")
    for answer in answers:
        equal = f"{answer.equal_tokens}/{answer.new_tokens}"
        b = f"{answer.achieved_b:.3f}"
        table.add_row(answer.dtype, answer.prompt, str(answer.prompt_tokens), equal, answer.path, b)
    return table


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/token_identity.py", description="Pairs that answer as a plain server does."
    )
    parser.add_argument("--model-path", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for token_identity.json and logs")
    default_dtypes = ["float32"] if detect_device() is Device.CPU else ["bfloat16", "float16"]
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=default_dtypes)
    parser.add_argument("--profile", default="native-packed")
    parser.add_argument("--budget", type=float, default=1.0, help="b, wire bytes / native bytes")
    parser.add_argument("--new-tokens", type=int, default=32)
    lengths = [600] if detect_device() is Device.CPU else [3000, 6000]
    parser.add_argument("--random-lengths", type=lambda text: [int(n) for n in text.split(",")], default=lengths)
    parser.add_argument("--vocabulary", type=int, default=30000, help="random ids are drawn from 100 to this")
    parser.add_argument("flags", nargs="*", help="further SGLang flags for all servers, after --")
    options = parser.parse_args()
    options.out = made(options.out)
    console = Console(width=None if sys.stdout.isatty() else 120)
    answers = run(options, console)
    document = {
        "sglang": installed_version(),
        "device": detect_device().value,
        "profile": options.profile,
        "flags": options.flags,
        "answers": [asdict(answer) for answer in answers],
    }
    (options.out / "token_identity.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    console.print(table_of(answers))
    different = sum(not answer.identical for answer in answers)
    console.print(f"{len(answers) - different} of {len(answers)} answers identical")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
