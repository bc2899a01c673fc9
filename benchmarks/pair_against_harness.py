"""Whether a real pair's decode sees what `spectrumkv eval` judges: table, JSON, exit status 1 if tokens differ.

    python benchmarks/pair_against_harness.py --model-path DIR --text FILE --out DIR \
        --profile balanced@0.3 --profile aggressive@0.2 [--texts 4] [--prefix-tokens 1024] [--new-tokens 64]

For each profile a prefill and a decode server answer windows of a text greedily, with log-probabilities. The harness
prefills the same windows, moves their KV with the same profile, and is fed the pair's answer: token by token, would it
have said the same, and with which log-probability? Equal figures of both mean that what the harness says of a profile
holds for servers. Pools and computation are float32 on a CPU and bfloat16 on a GPU, where rounding alone makes the two
differ: a row of native KV shows by how much.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from command_line import made
from rich.console import Console
from rich.table import Table

from spectrumkv_sglang.evaluation.methods import make_methods, observations
from spectrumkv_sglang.evaluation.model import EvalModel, ModelFiles, read_model_files
from spectrumkv_sglang.evaluation.prefix import Method
from spectrumkv_sglang.evaluation.scorers import Observation
from spectrumkv_sglang.evaluation.windows import TextWindow, cut_windows
from spectrumkv_sglang.launch.client import Completion, flush_caches, generate_on_pair
from spectrumkv_sglang.launch.servers import Device, Fleet, Role, ServerSpec, SGLangServer, detect_device
from spectrumkv_sglang.launch.sglang_versions import installed_version
from spectrumkv_sglang.launch.transfer_log_reader import TransferLogReader, request_transfer

BACKEND = "spectrumkv_tcp"
NATIVE = "native-packed"
_GPU_FLAGS = ("--random-seed", "1", "--max-total-tokens", "65536", "--max-running-requests", "16")


@dataclass(frozen=True)
class PairAnswer:
    """What a pair said after one window.

    Attributes:
        output_ids, logprobs: the answer; its first token comes from prefill.
        tokens_by_tier: tokens of the prompt in high, mid, low.
    """

    profile: str
    window: str
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    wire_bytes: int
    tokens_by_tier: tuple[int, int, int]


@dataclass(frozen=True)
class Comparison:
    """A pair's answer beside the harness.

    Attributes:
        equal_tokens: of the pair's tokens after the first, those that the harness holds most likely.
        pair_nll, harness_nll: mean negative log-probability of the pair's tokens after the first, nats.
        largest_difference: between the two log-probabilities of one token, nats.
        equal_tiers: both put as many tokens into each tier.
    """

    profile: str
    window: str
    tokens: int
    equal_tokens: int
    pair_nll: float
    harness_nll: float
    largest_difference: float
    equal_tiers: bool
    wire_bytes: int
    tokens_by_tier: tuple[int, int, int]


def ask_pair(options: argparse.Namespace, profile: str, windows: Sequence[TextWindow]) -> list[PairAnswer]:
    """Answers of a pair that serves ``profile`` (NAME@BUDGET)."""
    name, _, budget = profile.partition("@")
    log_path = (options.out / "logs" / f"{Path(profile).name}.jsonl").resolve()
    log_path.unlink(missing_ok=True)
    env = {"SPECTRUMKV_PROFILE": name, "SPECTRUMKV_REQUIRE_PROBE": "false"}
    if budget:
        env["SPECTRUMKV_BUDGET"] = budget
    answers = []
    with Fleet() as fleet:
        servers = [fleet.start(_server(options, profile, role, env, log_path)) for role in (Role.PREFILL, Role.DECODE)]
        fleet.wait_ready()
        log = TransferLogReader(log_path)
        for window in windows:
            flush_caches(servers)
            log.skip()
            said: Completion = generate_on_pair(
                *servers,
                window.prefix(options.prefix_tokens),
                max_new_tokens=options.new_tokens,
                sampling={"ignore_eos": True},
                logprobs=True,
            )
            records = log.next_request()
            moved = request_transfer(records)
            high, mid, low = (sum(getattr(r.tokens_by_tier, tier) for r in records) for tier in ("high", "mid", "low"))
            tiers = (high, mid, low)
            answers.append(PairAnswer(profile, window.name, said.output_ids, said.logprobs, moved.wire_bytes, tiers))
    return answers


def _server(options: argparse.Namespace, profile: str, role: Role, env: dict[str, str], log_path: Path) -> SGLangServer:
    device = detect_device()
    spec = ServerSpec(
        role=role,
        model=options.model_path,
        backend=BACKEND,
        device=device,
        own_flags=device is Device.CPU,
        env={**env, "SPECTRUMKV_TRANSFER_LOG": str(log_path)} if role is Role.PREFILL else env,
        extra_args=(*(_GPU_FLAGS if device is Device.CUDA else ()), "--dtype", options.dtype, *options.flags),
    )
    return SGLangServer(spec, f"{role.value}-{Path(profile).name}", log_dir=options.out / "logs")


def compare(
    model: EvalModel, method: Method, observed: Mapping[str, Observation], prefix: Sequence[int], answer: PairAnswer
) -> Comparison:
    """Feed the pair's answer to the harness behind KV that ``method`` moved."""
    prefilled = model.prefill(answer.window, prefix, observed)
    moved = method.move(prefilled.prefix)
    logits = model.logits_after(moved, answer.output_ids[:-1]).float()
    said = torch.tensor(answer.output_ids[1:], device=logits.device)
    theirs = torch.log_softmax(logits, dim=-1).gather(1, said[:, None])[:, 0].tolist()
    ours = answer.logprobs[1:]
    return Comparison(
        profile=answer.profile,
        window=answer.window,
        tokens=len(theirs),
        equal_tokens=int((logits.argmax(dim=-1) == said).sum()),
        pair_nll=-statistics.fmean(ours),
        harness_nll=-statistics.fmean(theirs),
        largest_difference=max(abs(a - b) for a, b in zip(ours, theirs, strict=True)),
        equal_tiers=moved.tokens_by_tier == answer.tokens_by_tier,
        wire_bytes=answer.wire_bytes,
        tokens_by_tier=answer.tokens_by_tier,
    )


def run(options: argparse.Namespace, console: Console) -> list[Comparison]:
    """All profiles and windows: first the servers, then the harness, so that memory holds one of them."""
    files: ModelFiles = read_model_files(options.model_path)
    windows = cut_windows(
        files.tokenizer,
        options.text.read_text(encoding="utf-8"),
        prefix_tokens=[options.prefix_tokens],
        continuation_tokens=1,
        texts=options.texts,
        seed=0,
        context_tokens=files.context_tokens,
    )
    answers = []
    for profile in options.profile:
        answers += ask_pair(options, profile, windows)
        console.print(f"{profile}: {len(windows)} windows answered")
    model = EvalModel(files, "cuda" if detect_device() is Device.CUDA else "cpu", options.dtype, options.dtype)
    methods = make_methods(options.profile, [], budget=None, scorer="window", seed=0, folder=options.out)
    observed = observations(methods)
    prefixes = {window.name: window.prefix(options.prefix_tokens) for window in windows}
    return [compare(model, methods[a.profile], observed, prefixes[a.window], a) for a in answers]


def table_of(comparisons: Sequence[Comparison]) -> Table:
    """One line a profile."""
    table = Table(title="A pair's answers, and what the harness says of them")
    for column in (
        "profile",
        "tokens by tier",
        "equal tokens",
        "PPL pair",
        "PPL harness",
        "largest |dlogprob|",
        "tiers",
    ):
        table.add_column(column, justify="left" if column == "profile" else "right")
    for profile in dict.fromkeys(c.profile for c in comparisons):
        of_it = [c for c in comparisons if c.profile == profile]
        tokens = sum(c.tokens for c in of_it)
        pair, harness = (
            math.exp(sum(getattr(c, side) * c.tokens for c in of_it) / tokens) for side in ("pair_nll", "harness_nll")
        )
        table.add_row(
            profile,
            "/".join(str(sum(c.tokens_by_tier[tier] for c in of_it)) for tier in range(3)),
            f"{sum(c.equal_tokens for c in of_it)}/{tokens}",
            f"{pair:.5f}",
            f"{harness:.5f}",
            f"{max(c.largest_difference for c in of_it):.5f}",
            "equal" if all(c.equal_tiers for c in of_it) else "differ",
        )
    return table


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/pair_against_harness.py", description="A real pair beside spectrumkv eval."
    )
    parser.add_argument("--model-path", type=Path, required=True, metavar="DIR")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for pair_against_harness.json and logs")
    parser.add_argument("--profile", action="append", help="NAME@BUDGET, may be repeated; native is always there")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--prefix-tokens", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32" if detect_device() is Device.CPU else "bfloat16")
    parser.add_argument("flags", nargs="*", help="further SGLang flags for all servers, after --")
    options = parser.parse_args()
    options.out = made(options.out)
    options.profile = list(dict.fromkeys([NATIVE, *(options.profile or ["balanced@0.3", "aggressive@0.2"])]))
    console = Console(width=None if sys.stdout.isatty() else 120)
    comparisons = run(options, console)
    document = {
        "sglang": installed_version(),
        "device": detect_device().value,
        "dtype": options.dtype,
        "model": options.model_path.name,
        "prefix_tokens": options.prefix_tokens,
        "comparisons": [asdict(comparison) for comparison in comparisons],
    }
    (options.out / "pair_against_harness.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    console.print(table_of(comparisons))
    return 0 if all(c.equal_tokens == c.tokens for c in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main())
