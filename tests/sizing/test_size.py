"""`spectrumkv size` against what was measured, and what it says where tiers would bring nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from spectrumkv_sglang.cli import app
from spectrumkv_sglang.sizing.advice import advise
from spectrumkv_sglang.sizing.errors import SizingError
from spectrumkv_sglang.sizing.estimate import Choice, PromptEstimate
from spectrumkv_sglang.sizing.loss import published_kl
from spectrumkv_sglang.sizing.model_kv import read_model
from spectrumkv_sglang.sizing.speeds import read_speeds

GPU_JSON = Path(__file__).parents[2] / "docs" / "results" / "gpu.json"
LLAMA_BYTES = 131072


def sized(result: Result, path: Path) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return dict(json.loads(path.read_text()))


def choice(document: dict[str, Any], profile: str, prompt: int = 0) -> dict[str, Any]:
    return next(one for one in document["estimates"][prompt]["choices"] if one["profile"] == profile)


def test_it_says_what_the_pairs_on_a_gpu_measured(
    model_of: Callable[..., Path], size: Callable[..., Result], tmp_path: Path
) -> None:
    """8,192 tokens of Llama-3.1-8B's shape on 10 Gb/s (docs/results/gpu.md): prefill took .28 s there."""
    out = tmp_path / "size.json"
    document = sized(
        size("--model-path", model_of(), "--gbps", 10, "--prompt-tokens", 8192, "--speeds", GPU_JSON,
             "--prefill-rate", 8192 / 0.28, "--json", out),
        out,
    )  # fmt: skip
    assert document["kv_bytes_per_token"] == LLAMA_BYTES
    estimate = document["estimates"][0]
    assert estimate["native_ttft_seconds"] == pytest.approx(1.178, rel=0.05)
    for profile, seconds in (("int8", 0.750), ("near-lossless", 0.767), ("balanced", 0.574), ("aggressive", 0.482)):
        assert choice(document, profile)["ttft_seconds"] == pytest.approx(seconds, rel=0.06), profile
    assert document["advice"][0]["worth_it"]


def test_a_file_comes_first_with_its_own_budget_and_slots(
    model_of: Callable[..., Path], size: Callable[..., Result], tmp_path: Path
) -> None:
    config, out = tmp_path / "mine.yaml", tmp_path / "size.json"
    config.write_text("profile: balanced\nbudget: 0.4\nlanding_slots: 32\n")
    document = sized(
        size("--model-path", model_of(), "--gbps", 10, "--prompt-tokens", 8192, "--config", config, "--tp", 4,
             "--json", out),
        out,
    )  # fmt: skip
    first = document["estimates"][0]["choices"][0]
    assert (first["profile"], first["budget"]) == ("balanced", 0.4)
    assert first["b"] == pytest.approx(0.4, abs=0.002)
    assert first["b"] <= 0.4
    assert document["memory"]["landing_bytes"] == 4 * 32 * 16 * 2**20


def test_ranks_share_the_link_and_the_work(
    model_of: Callable[..., Path], size: Callable[..., Result], tmp_path: Path
) -> None:
    documents = []
    for tp in (1, 8):
        out = tmp_path / f"{tp}.json"
        arguments = ("--model-path", model_of(), "--gbps", 10, "--prompt-tokens", 8192, "--tp", tp, "--json", out)
        documents.append(sized(size(*arguments), out))
    alone, split = (document["estimates"][0] for document in documents)
    assert split["native_transfer_seconds"] == pytest.approx(alone["native_transfer_seconds"])
    assert split["prefill_seconds"] == pytest.approx(alone["prefill_seconds"] / 8)
    assert split["native_bytes"] == alone["native_bytes"] == 8192 * LLAMA_BYTES


def test_heads_are_held_twice_where_ranks_outnumber_them(model_of: Callable[..., Path]) -> None:
    assert read_model(model_of(), tp=16).bytes_per_token == 2 * LLAMA_BYTES
    with pytest.raises(SizingError, match="--tp 3 does not divide 8 KV heads"):
        read_model(model_of(), tp=3)


@pytest.mark.parametrize(
    ("gbps", "tokens", "why"),
    [
        (10, 32, "under min_tokens (64)"),
        (10, 1024, "under 4,096 tokens"),
        (400, 8192, "the link is too fast"),
        (60, 2000, "under 4,096 tokens"),
    ],
)
def test_it_says_when_it_is_not_worth_it(
    model_of: Callable[..., Path], size: Callable[..., Result], gbps: int, tokens: int, why: str
) -> None:
    result = size("--model-path", model_of(), "--gbps", gbps, "--prompt-tokens", tokens)
    assert result.exit_code == 0
    assert f"{tokens:,} tokens: no: " in result.output
    assert why in result.output
    assert "Not worth turning on for these prompts on this link." in result.output


def test_a_slow_prefill_hides_the_transfer(model_of: Callable[..., Path], size: Callable[..., Result]) -> None:
    arguments = ("--model-path", model_of(), "--gbps", 10, "--prompt-tokens", 32768, "--prefill-rate", 1000)
    result = size(*arguments)
    assert "prefill is what it waits for" in result.output


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_lora_rank": 512}, "mla"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "hybrid_state"),
        ({"architectures": ["GptOssForCausalLM"]}, "hybrid_state"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}, "unsupported_dtype"),
    ],
)
def test_native_kv_is_said_to_be_native(
    model_of: Callable[..., Path], size: Callable[..., Result], changes: dict[str, Any], reason: str
) -> None:
    result = size("--model-path", model_of(changes), "--gbps", 1, "--prompt-tokens", 32768)
    assert result.exit_code == 0
    assert "Not worth turning on" in result.output
    assert f"natively, reason {reason}" in result.output


def test_sliding_windows_in_one_pool_are_tiered(model_of: Callable[..., Path]) -> None:
    model = read_model(model_of({"layer_types": ["sliding_attention", "full_attention"]}))
    assert model.native_reason is None
    assert "sliding-window layers share the plain pool" in model.native_detail


def test_speeds_come_from_transfers_too(tmp_path: Path) -> None:
    """1 GiB in 1 s at .9 GB on the wire over 8 Gb/s of goodput: .1 s beyond the bytes."""
    path = tmp_path / "transfer.json"
    sample = {"variant": "int8", "rate_gbps": 10.0, "prompt_tokens": 8192, "transfer_seconds": 1.0,
              "native_bytes": 2**30, "wire_bytes": 900_000_000, "status": "ok", "repeat": 0, "chunks": 1}  # fmt: skip
    variants = [{"name": "int8", "profile": "int8"}, {"name": "plain-tuned", "profile": None}]
    path.write_text(json.dumps({"samples": [sample], "variants": variants, "goodput_gbps": {"10": 8.0}}))
    speed = read_speeds(path, bytes_per_token=LLAMA_BYTES).of("int8")
    assert 1 / (1 / speed.pack + 1 / speed.unpack) == pytest.approx(2**30 / 0.1)
    assert read_speeds(path, bytes_per_token=LLAMA_BYTES).of("balanced").source == "not measured: as int8"


@pytest.mark.parametrize("content", ["[]", "{}", '{"kernels": [{"page_size": 1}]}', "no json"])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(SizingError, match=r"--speeds .*other\.json"):
        read_speeds(path, bytes_per_token=LLAMA_BYTES)


def test_a_measurement_can_be_kept_and_used_again(
    model_of: Callable[..., Path], size: Callable[..., Result], tmp_path: Path
) -> None:
    small = {"num_hidden_layers": 2, "num_key_value_heads": 1, "hidden_size": 256, "head_dim": 64}
    out, again = tmp_path / "a.json", tmp_path / "b.json"
    model = model_of(small)
    measured = sized(size("--model-path", model, "--gbps", 1, "--prompt-tokens", 8192, "--measure", "--json", out), out)
    assert "measured here" in measured["speeds"]["source"]
    speeds = measured["speeds"]["by_profile"].values()
    assert {"balanced", "native-packed"} <= set(measured["speeds"]["by_profile"])
    assert all(0 < speed["pack"] < 1e13 and 0 < speed["unpack"] < 1e13 for speed in speeds)
    reused = sized(
        size("--model-path", model, "--gbps", 1, "--prompt-tokens", 8192, "--speeds", out, "--json", again), again
    )
    assert reused["estimates"] == measured["estimates"]


def test_tcp_costs_a_chunk_what_it_took_on_the_pairs_and_rdma_less(
    model_of: Callable[..., Path], size: Callable[..., Result], tmp_path: Path
) -> None:
    launch = tmp_path / "launch.yaml"
    launch.write_text("format: 1\nbackend: spectrumkv\nsglang: {common: {model-path: /m}}\nspectrumkv: {}\n")
    seconds = {}
    for name, further in {
        "default": (),
        "tcp": ("--transport", "tcp"),
        "rdma": ("--transport", "rdma"),
        "launch config": ("--config", launch),
    }.items():
        out = tmp_path / f"{name}.json"
        arguments = ("--model-path", model_of(), "--gbps", 10, "--prompt-tokens", 8192, "--json", out, *further)
        document = sized(size(*arguments), out)
        seconds[name] = choice(document, "balanced")["transfer_seconds"]
        assert "docs/results/gpu.md" in " ".join(document["assumptions"]) or name not in ("default", "tcp")
    assert seconds["default"] == seconds["tcp"] == pytest.approx(seconds["rdma"] + 0.024)
    assert seconds["launch config"] == pytest.approx(seconds["rdma"])


def test_a_profile_that_loses_more_is_not_advised_for_next_to_no_time() -> None:
    def one(profile: str, b: float, ttft: float) -> Choice:
        return Choice(profile, b, b, 1, ttft, ttft, 100.0, False, "")

    choices = [one("int8", 0.5, 1.2), one("balanced", 0.3, 1.03), one("aggressive", 0.2, 1.0)]
    assert PromptEstimate(8192, 1, 0.1, 2.0, 2.0, choices).best.profile == "balanced"


def _advice(*choices: Choice, lead: str = "balanced", speeds_assumed: bool = False) -> str:
    estimate = PromptEstimate(8192, 1, 0.1, 2.0, 2.0, list(choices))
    return advise(
        estimate, min_tokens=64, gbps=10, lead=lead, lead_is="the default", speeds_assumed=speeds_assumed
    ).text


def _choice(profile: str, b: float, ttft: float, needs_probe: bool) -> Choice:
    return Choice(profile, b, b, 1, ttft, ttft, 100.0, needs_probe, "")


def test_of_equal_profiles_it_names_the_one_that_is_known_to_lose_less() -> None:
    """docs/results/quality.md: FP8 loses two to ten times what INT8 does, at the same bytes."""
    assert published_kl("near-lossless") < published_kl("int8") < published_kl("fp8")
    fp8, int8 = _choice("fp8", 0.508, 1.2, False), _choice("int8", 0.508, 1.209, False)
    estimate = PromptEstimate(8192, 1, 0.1, 2.0, 2.0, [fp8, int8])
    assert estimate.best is int8
    assert estimate.best_unprobed is int8
    slower = _choice("int8", 0.508, 1.25, False)
    assert PromptEstimate(8192, 1, 0.1, 2.0, 2.0, [fp8, slower]).best_unprobed is fp8


def test_it_names_the_default_before_what_is_faster_at_a_loss() -> None:
    balanced, aggressive = _choice("balanced", 0.3, 1.06, True), _choice("aggressive", 0.2, 0.9, True)
    int8 = _choice("int8", 0.5, 1.4, False)
    assert _advice(aggressive, balanced, int8) == (
        "yes: balanced (the default, after a probe) 0.53 of native's time to the first token, 1,060 instead of "
        "2,000 ms; aggressive 0.45 at a visible loss, after a probe; without a probe int8 0.70"
    )
    assert "without a probe nothing is faster than native" in _advice(balanced, _choice("int8", 0.5, 2.1, False))
    assert _advice(balanced, int8, lead="int8").startswith("yes: int8 (the default) 0.70")
    assert "near-lossless 0.54 with more bytes, which lose less" in _advice(
        balanced, _choice("near-lossless", 0.5, 1.08, True)
    )
    unmoved = _choice("balanced", 0.3, 1.95, True)  # gains too little to be named first
    assert _advice(aggressive, unmoved).startswith("yes: aggressive (after a probe) 0.45")


def test_the_verdict_says_that_no_packing_was_measured() -> None:
    int8 = _choice("int8", 0.5, 1.4, False)
    assert "a CPU is slower and may bring nothing (--measure there)" in _advice(int8, speeds_assumed=True)
    assert "--measure" not in _advice(int8)


def test_no_header_is_cut_at_80_columns(model_of: Callable[..., Path], tmp_path: Path) -> None:
    mine = tmp_path / "a-profile-with-a-rather-long-name-of-its-own.yaml"
    mine.write_text(f"name: {mine.stem}\ntiers:\n  high: {{keys: int8, values: int8}}\n")
    settings = tmp_path / "settings.yaml"
    settings.write_text(f"profile: {mine}\n")
    arguments = ["size", "--model-path", model_of(), "--gbps", 1, "--prompt-tokens", 1_000_000, "--config", settings]
    printed = CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "80"}).output
    assert "…" not in printed
    assert all(word in printed for word in ("transfer", "TTFT", "native", "below", "Gb/s", "probe", "needed"))


def test_a_launch_config_names_the_model(
    model_of: Callable[..., Path], size: Callable[..., Result], tmp_path: Path
) -> None:
    launch, text = tmp_path / "launch.yaml", "format: 1\nsglang: {common: {MODEL}}\nspectrumkv: {}\n"
    asked = ("--gbps", 10, "--prompt-tokens", 8192)
    for spelling in ("model-path", "model"):
        launch.write_text(text.replace("MODEL", f"{spelling}: {model_of()}"))
        result = size(*asked, "--config", launch)
        assert result.exit_code == 0, result.output
        assert "LlamaForCausalLM" in result.output
        assert "balanced (as configured, after a probe)" in result.output
    for named, why in (("model-path: no/such-hub-id", "is no directory here"), ("tp: 2", "names no model-path")):
        launch.write_text(text.replace("MODEL", named))
        refused = size(*asked, "--config", launch)
        assert refused.exit_code == 2
        assert why in refused.output
    assert "missing: give the model's directory" in size(*asked).output


def test_wrong_usage(model_of: Callable[..., Path], size: Callable[..., Result], tmp_path: Path) -> None:
    model = model_of()
    assert size("--model-path", model, "--gbps", 10).exit_code == 2
    assert size("--model-path", model, "--gbps", 0, "--prompt-tokens", 8192).exit_code == 2
    both = ("--measure", "--speeds", GPU_JSON)
    assert size("--model-path", model, "--gbps", 10, "--prompt-tokens", 8192, *both).exit_code == 2
    missing = size("--model-path", tmp_path / "no", "--gbps", 10, "--prompt-tokens", 8192)
    assert isinstance(missing.exception, SizingError)
    assert "--model-path" in str(missing.exception)
