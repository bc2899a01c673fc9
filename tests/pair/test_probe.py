"""`spectrumkv probe` with real servers: what it judges is what a real pair serves, and what it finds is enforced."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pair_cluster import PairCluster
from sglang_plugins import TWO_BIT_INT4, plugin_path

from spectrumkv_sglang.config import load_config
from spectrumkv_sglang.launch.client import get
from spectrumkv_sglang.launch_config import read_launch_config
from spectrumkv_sglang.probe.haystack import load_haystack
from spectrumkv_sglang.probe.needles import DEFAULT_ANSWER_TOKENS, make_trials
from spectrumkv_sglang.probe.result import ProbeResult, read_result
from spectrumkv_sglang.probe.texts import load_judged_text
from spectrumkv_sglang.profiles.tier import Tier
from spectrumkv_sglang.verification.record import ProbeRecord

LENGTH = 768
LOW_TIER = Path(__file__).with_name("low_tier.yaml")
PROBE_SECONDS = 600
KEYS_LOW = """
name: keys-low
tiers:
  high: {keys: native, values: native}
  mid: {keys: int8, values: int8}
  low: {keys: int4, values: int8}
"""


@dataclass(frozen=True)
class Probed:
    """What one run of the command left behind."""

    exit_code: int
    output: str
    launch_path: Path
    result: ProbeResult


def run_probe(folder: Path, model: Path, *arguments: str, env: dict[str, str] | None = None) -> Probed:
    """Run the command as an operator would."""
    folder.mkdir(exist_ok=True)
    outputs = ("--out", "launch.yaml", "--json", "result.json", "--plot", "result.png")
    command = [sys.executable, "-m", "spectrumkv_sglang.cli", "probe", "--model-path", str(model), *outputs]
    done = subprocess.run(
        [*command, "--length", str(LENGTH), *arguments],
        cwd=folder,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=PROBE_SECONDS,
        check=False,
    )
    output = done.stdout + done.stderr
    assert (folder / "result.json").is_file(), output
    assert (folder / "result.png").read_bytes().startswith(b"\x89PNG")
    return Probed(done.returncode, output, folder / "launch.yaml", read_result(folder / "result.json"))


@pytest.fixture(scope="module")
def probed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Probed:
    """The small model, with a profile whose low tier float32 pools need too at the budget that is judged."""
    return run_probe(tmp_path_factory.mktemp("probe"), model, "--profile", str(LOW_TIER))


@pytest.fixture(scope="module")
def trials(model: Path) -> list[tuple[int, ...]]:
    """The needle prompts of ``probed``."""
    from transformers import AutoTokenizer

    made = make_trials(AutoTokenizer.from_pretrained(model), load_haystack(), lengths=[LENGTH])
    return [trial.token_ids for trial in made]


def test_the_small_model_bears_the_low_tier(probed: Probed, figures: list[str]) -> None:
    result = probed.result
    assert probed.exit_code == 0, probed.output
    assert result.verdict == "low_allowed"
    assert result.allowed_tiers == ["high", "mid", "low"]
    assert (result.control.passed, result.niah.passed, result.niah.trials) == (3, 3, 3)
    assert result.kl["native"] == 0.0
    assert 0.0 < result.kl["mid"] < result.kl["low"] < 0.03
    assert result.kl["policy"] < result.kl["low"]
    assert result.kl["random"] < 0.03
    policy_tiers = result.niah.results[0].answers["policy"].tokens_by_tier
    assert policy_tiers is not None
    assert policy_tiers[Tier.LOW] > 0
    kl, seconds, memory = result.kl, result.seconds, result.memory
    figures.append(
        f"probe: KL mid {kl['mid']:.5f}, low {kl['low']:.4f}, policy {kl['policy']:.5f} and random tiers "
        f"{kl['random']:.5f} at b {result.budget:.3f}; {seconds.total:.0f} s (server start {seconds.load:.0f}), memory "
        f"{memory.loaded / 1e9:.2f} GB loaded, {memory.peak / 1e9:.2f} GB at most"
    )


def test_the_launch_config_holds_the_record_and_the_servers_flags(probed: Probed, model: Path) -> None:
    launch = read_launch_config(probed.launch_path)
    config = load_config(probed.launch_path, {})
    assert isinstance(config.probe, ProbeRecord)
    assert not config.probe.edited
    assert config.probe.verdict == "low_allowed"
    assert config.allowed_tiers == (Tier.HIGH, Tier.MID, Tier.LOW)
    assert launch.sglang.common["model-path"] == str(model.resolve())
    assert "--model-path" in launch.arguments("prefill")
    assert msgspec.json.decode(msgspec.json.encode(probed.result.launch))["spectrumkv"]["profile"] == str(LOW_TIER)


def test_what_was_judged_is_what_a_pair_serves(
    cluster: PairCluster, probed: Probed, trials: list[tuple[int, ...]], figures: list[str]
) -> None:
    """Same prompts, same policy: the same tiers for as many tokens, and the same answer, token for token."""
    settings = {
        "SPECTRUMKV_CONFIG": str(probed.launch_path),
        "SPECTRUMKV_BUDGET": str(probed.result.budget),
        "SPECTRUMKV_MIN_TOKENS": "0",
    }
    prefill, decode = (
        cluster.prefill(env=settings),
        cluster.decode(env={"SPECTRUMKV_CONFIG": settings["SPECTRUMKV_CONFIG"]}),
    )
    compared = 0
    for token_ids, judged in zip(trials, probed.result.niah.results, strict=True):
        cluster.wait_ready(prefill, decode)
        cluster.transfers(prefill).skip()
        answer = cluster.generate(prefill, decode, token_ids, max_new_tokens=DEFAULT_ANSWER_TOKENS)
        expected = judged.answers["policy"]
        assert list(answer.output_ids) == expected.output_ids
        (chunk,) = cluster.transfers(prefill).next_request()
        counted = chunk.tokens_by_tier
        assert (counted.high, counted.mid, counted.low) == expected.tokens_by_tier
        assert counted.low > 0
        compared += len(answer.output_ids)
    figures.append(f"probe in place against the pair: {compared} of {compared} tokens equal, same tokens in each tier")


def test_another_model_under_the_same_record_gets_no_low_tier(
    cluster: PairCluster, probed: Probed, trials: list[tuple[int, ...]], model: Path, tmp_path: Path
) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(model, changed)
    weights = changed / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        (last,) = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    config = {"SPECTRUMKV_CONFIG": str(probed.launch_path)}
    prefill = cluster.prefill(
        env={**config, "SPECTRUMKV_BUDGET": str(probed.result.budget)},
        extra_args=("--model-path", str(changed), "--enable-metrics"),
    )
    decode = cluster.decode(env=config)
    cluster.wait_ready(prefill, decode)
    cluster.transfers(prefill).skip()
    cluster.generate(prefill, decode, trials[0], max_new_tokens=4)
    (chunk,) = cluster.transfers(prefill).next_request()
    assert chunk.path == "tiered"
    assert chunk.tokens_by_tier.low == 0
    log = prefill.log_path.read_text(errors="replace")
    warnings = [line for line in log.splitlines() if "probe changed" in line]
    assert len(warnings) == 1
    assert "weights: probed sha256:" in warnings[0]
    metrics = get(f"{prefill.url}/metrics", namespace=prefill.namespace).decode()
    states = [line for line in metrics.splitlines() if line.startswith("spectrumkv:probe_state{")]
    assert [line.rsplit(" ", 1)[1] for line in states if 'state="changed"' in line] == ["1.0"]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in states) == 1.0


def test_a_broken_quantiser_loses_the_needle_itself(model: Path, tmp_path: Path, figures: list[str]) -> None:
    (tmp_path / "keys-low.yaml").write_text(KEYS_LOW)
    (tmp_path / "short.txt").write_text(load_judged_text()[:3000])  # needles are what this is about
    broken: Any = run_probe(
        tmp_path / "run",
        model,
        "--profile",
        str(tmp_path / "keys-low.yaml"),
        "--text",
        str(tmp_path / "short.txt"),
        env={"PYTHONPATH": plugin_path(tmp_path, "two_bit_int4", TWO_BIT_INT4)},
    )
    result = broken.result
    assert broken.exit_code == 10, broken.output
    assert result.verdict == "low_not_allowed"
    assert result.control.passed == 3
    assert result.niah.passed_by_policy["low"] < 3
    assert any(reason.startswith("low: found") for reason in result.reasons)
    assert load_config(broken.launch_path, {}).allowed_tiers == (Tier.HIGH, Tier.MID)
    figures.append(
        f"probe of keys with four levels: {result.niah.passed_by_policy['low']} of 3 needles, KL {result.kl['low']:.2f}"
    )
