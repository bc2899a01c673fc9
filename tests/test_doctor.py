"""`spectrumkv doctor` names what is wrong, says what to do, and works where half of the stack is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from spectrumkv_sglang.config import load_config
from spectrumkv_sglang.doctor.findings import Finding, Report, Section, Severity, make_report
from spectrumkv_sglang.doctor.isolated import run_python
from spectrumkv_sglang.doctor.model import check_model, geometry_of, judge_model
from spectrumkv_sglang.doctor.settings import check_settings
from spectrumkv_sglang.doctor.transport import check_transport
from spectrumkv_sglang.doctor.versions import check_versions
from spectrumkv_sglang.observability.reasons import Reason
from spectrumkv_sglang.transport_tuning import TCP_TUNING, tune_tcp

ROOT = Path(__file__).parents[1]
SITE_PACKAGES = Path(sysconfig.get_path("purelib"))
TUNED = {variable.name: variable.value for variable in TCP_TUNING}

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "dtype": "bfloat16",
}


def named(section: Section, name: str) -> Finding:
    (found,) = [finding for finding in section.findings if finding.name == name]
    return found


# ---- model -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({}, Reason.TIERED, id="llama"),
        pytest.param({"num_key_value_heads": None}, Reason.TIERED, id="multi-head"),
        pytest.param({"multi_query": True}, Reason.TIERED, id="multi-query"),
        pytest.param({"quantization_config": {"quant_method": "awq"}}, Reason.TIERED, id="quantised weights"),
        pytest.param(
            {
                "architectures": ["Gemma3ForConditionalGeneration"],
                "text_config": {**LLAMA, "sliding_window_pattern": 6, "sliding_window": 512},
            },
            Reason.TIERED,
            id="gemma 3",
        ),
        pytest.param({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, Reason.MLA, id="deepseek v3"),
        pytest.param({"text_config": {"kv_lora_rank": 512, "num_hidden_layers": 60}}, Reason.MLA, id="kimi k2.5"),
        pytest.param({"kv_lora_rank": 512, "use_mla": False}, Reason.TIERED, id="deepseek vl2 without mla"),
        pytest.param({"kv_lora_rank": None}, Reason.TIERED, id="mla field unset"),
        pytest.param({"layer_types": ["linear_attention", "full_attention"]}, Reason.HYBRID_STATE, id="qwen3 next"),
        pytest.param({"hybrid_override_pattern": "M-M*"}, Reason.HYBRID_STATE, id="nemotron h"),
        pytest.param({"attn_layer_period": 8}, Reason.HYBRID_STATE, id="jamba"),
        pytest.param({"mamba_d_ssm": 1024}, Reason.HYBRID_STATE, id="falcon h1"),
        pytest.param(
            {"architectures": ["GptOssForCausalLM"], "layer_types": ["sliding_attention", "full_attention"]},
            Reason.HYBRID_STATE,
            id="gpt-oss",
        ),
        pytest.param(
            {"architectures": ["Llama4ForConditionalGeneration"], "text_config": LLAMA},
            Reason.HYBRID_STATE,
            id="llama 4",
        ),
        pytest.param({"is_hybrid_swa": True}, Reason.HYBRID_STATE, id="declared split sliding window"),
        pytest.param({"layer_types": ["full_attention"] * 32}, Reason.TIERED, id="qwen3"),
        pytest.param({"num_key_value_heads": [4, 8]}, Reason.UNSUPPORTED_POOL, id="heads per layer"),
        pytest.param({"head_dim": 100}, Reason.UNSUPPORTED_POOL, id="odd head size"),
        pytest.param(
            {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}},
            Reason.UNSUPPORTED_DTYPE,
            id="fp8 kv checkpoint",
        ),
        pytest.param(
            {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}},
            Reason.UNSUPPORTED_DTYPE,
            id="modelopt fp8 kv",
        ),
    ],
)
def test_a_model_is_tiered_or_native_for_a_reason(changes: dict[str, Any], reason: Reason) -> None:
    verdict = judge_model({**LLAMA, **changes})
    assert verdict.reason is reason
    assert verdict.tiered == (reason is Reason.TIERED)
    assert verdict.tiered or verdict.remedy


@pytest.mark.parametrize(
    ("changes", "layers", "kv_heads", "head_dim", "v_head_dim", "dtype"),
    [
        ({}, 32, 8, 128, 128, "bfloat16"),
        ({"head_dim": 256, "v_head_dim": 128}, 32, 8, 256, 128, "bfloat16"),
        ({"num_key_value_heads": None, "dtype": None, "torch_dtype": "float16"}, 32, 32, 128, 128, "float16"),
        ({"multi_query": True, "dtype": "float32"}, 32, 1, 128, 128, "bfloat16"),
        ({"text_config": {**LLAMA, "num_hidden_layers": 7}, "num_hidden_layers": 7}, 7, 8, 128, 128, "bfloat16"),
    ],
)
def test_geometry_is_read_from_the_config(
    changes: dict[str, Any], layers: int, kv_heads: int, head_dim: int, v_head_dim: int, dtype: str
) -> None:
    geometry = geometry_of({**LLAMA, **changes})
    assert (geometry.layers, geometry.kv_heads, geometry.head_dim, geometry.v_head_dim, geometry.dtype) == (
        layers,
        kv_heads,
        head_dim,
        v_head_dim,
        dtype,
    )


def model_directory(path: Path, **changes: Any) -> Path:
    (path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return path


def test_a_tiered_model_is_described_in_bytes(tmp_path: Path) -> None:
    section = check_model(model_directory(tmp_path), load_config(None, {}))
    assert "131,072 bytes a token" in named(section, "geometry").detail
    assert "mid 0.512" in named(section, "budget").detail
    assert {finding.severity for finding in section.findings} == {Severity.OK}


def test_a_native_model_is_a_warning_with_the_metrics_reason(tmp_path: Path) -> None:
    section = check_model(model_directory(tmp_path, kv_lora_rank=512), load_config(None, {}))
    (finding,) = section.findings
    assert finding.severity is Severity.WARNING
    assert "reason mla" in finding.detail


def test_a_budget_that_small_heads_cannot_reach_is_a_warning(tmp_path: Path) -> None:
    config = load_config(None, {"SPECTRUMKV_PROFILE": "int8", "SPECTRUMKV_BUDGET": "0.55"})
    finding = named(check_model(model_directory(tmp_path, head_dim=16), config), "budget")
    assert finding.severity is Severity.WARNING
    assert "at least 0.57" in finding.remedy


@pytest.mark.parametrize(
    ("profile", "warned"), [("spectrum", True), ("k8v4", False), ("balanced", False), ("spectrum-safe", False)]
)
def test_int4_keys_are_warned_of_on_fragile_families(tmp_path: Path, profile: str, warned: bool) -> None:
    config = load_config(None, {"SPECTRUMKV_PROFILE": profile})
    section = check_model(model_directory(tmp_path, model_type="qwen2"), config)
    assert any(finding.name == "keys" for finding in section.findings) == warned


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_an_unreadable_model_config_is_a_problem(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    (finding,) = check_model(tmp_path, None).findings
    assert finding.severity is Severity.PROBLEM
    assert str(tmp_path) in finding.detail


# ---- transport -------------------------------------------------------------------------------------------------------


def host(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content + "\n")
    return root


RDMA_PORT = {
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
    "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
    "sys/class/infiniband/mlx5_0/ports/1/link_layer": "Ethernet",
}


def test_an_active_rdma_device_is_used(tmp_path: Path) -> None:
    section = check_transport({}, host(tmp_path, RDMA_PORT), memlock_bytes=-1)
    assert named(section, "transport").detail == "RDMA"
    assert "400 Gb/sec" in named(section, "rdma mlx5_0").detail
    assert named(section, "locked memory").severity is Severity.OK


def test_rdma_with_a_memory_limit_or_without_peer_memory_is_warned_of(tmp_path: Path) -> None:
    root = host(tmp_path, {**RDMA_PORT, "proc/modules": "nvidia 123 0\nib_core 1 0"})
    section = check_transport({}, root, memlock_bytes=8 * 2**20)
    assert named(section, "locked memory").severity is Severity.WARNING
    assert named(section, "gpu direct").remedy == "modprobe nvidia_peermem"


def test_a_device_without_an_active_port_leaves_tcp(tmp_path: Path) -> None:
    root = host(tmp_path, {**RDMA_PORT, "sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN"})
    section = check_transport({}, root)
    assert named(section, "rdma mlx5_0").severity is Severity.WARNING
    assert "spectrumkv_tcp" in named(section, "transport").remedy


def test_forced_tcp_beats_rdma(tmp_path: Path) -> None:
    section = check_transport({"MC_FORCE_TCP": "1", **TUNED}, host(tmp_path, RDMA_PORT))
    assert "MC_FORCE_TCP" in named(section, "transport").detail
    assert named(section, "mooncake tcp").severity is Severity.OK


def test_tuning_variables_that_nobody_set_are_listed_with_who_sets_them(tmp_path: Path) -> None:
    section = check_transport({"MC_TCP_LANES_PER_PEER": "16"}, tmp_path)
    ours = named(section, "mooncake tcp").detail
    exports = named(section, "mooncake tcp timeouts").remedy.split()
    assert "MC_TCP_SLICE_SIZE=1048576" in ours
    assert "LANES" not in ours
    assert exports == ["export", "MC_TRANSFER_TIMEOUT=10", "MC_TCP_PROGRESS_TIMEOUT_SEC=10"]


def test_tuning_sets_what_nobody_has_set_and_no_timeouts() -> None:
    environ = {"MC_TCP_LANES_PER_PEER": "2", "MC_TCP_SLICE_SIZE": ""}
    changed = tune_tcp(environ)
    assert environ["MC_TCP_LANES_PER_PEER"] == "2"
    assert environ["MC_TCP_SLICE_SIZE"] == ""
    assert set(changed) == {
        f"{variable.name}={variable.value}"
        for variable in TCP_TUNING
        if variable.set_by_us and variable.name not in ("MC_TCP_LANES_PER_PEER", "MC_TCP_SLICE_SIZE")
    }
    assert not any("TIMEOUT" in name for name in environ)
    assert tune_tcp(environ) == []


@pytest.mark.parametrize("value", ["2", "1.5", "soon"])
def test_a_timeout_that_mooncake_does_not_take_is_warned_of(tmp_path: Path, value: str) -> None:
    section = check_transport({"MC_TRANSFER_TIMEOUT": value}, tmp_path)
    assert named(section, "MC_TRANSFER_TIMEOUT").severity is Severity.WARNING


def test_congestion_control_is_named(tmp_path: Path) -> None:
    file = "proc/sys/net/ipv4/tcp_congestion_control"
    assert "bbr" in named(check_transport({}, host(tmp_path, {file: "bbr"})), "congestion control").detail
    assert named(check_transport({}, host(tmp_path, {file: "cubic"})), "congestion control").severity is Severity.OK


def test_missing_system_libraries_are_named_with_their_packages(tmp_path: Path) -> None:
    def load(library: str) -> None:
        if library != "libnuma.so.1":
            raise OSError(library)

    finding = named(check_transport({}, tmp_path, load_library=load), "system libraries")
    assert finding.severity is Severity.PROBLEM
    assert finding.remedy == "apt-get install libibverbs1 librdmacm1"


# ---- versions and configuration --------------------------------------------------------------------------------------


def install(directory: Path, name: str, version: str) -> None:
    metadata = directory / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("version", "severity"),
    [
        ("0.5.15", Severity.PROBLEM),
        ("0.5.16", Severity.OK),
        ("0.5.23.post1", Severity.OK),
        ("0.5.24", Severity.WARNING),
        ("0.0.0.dev0", Severity.WARNING),
    ],
)
def test_sglang_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, severity: Severity) -> None:
    install(tmp_path, "sglang", version)
    monkeypatch.syspath_prepend(tmp_path)
    assert named(check_versions(None), "sglang").severity is severity


def test_an_insecure_mooncake_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for flavour in {"mooncake-transfer-engine", *installed_mooncakes()}:
        install(tmp_path, flavour, "0.3.11")
    monkeypatch.syspath_prepend(tmp_path)
    finding = named(check_versions(None), "mooncake")
    assert finding.severity is Severity.PROBLEM


def test_two_mooncake_flavours_are_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for flavour in ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"):
        install(tmp_path, flavour, "0.3.14")
    monkeypatch.syspath_prepend(tmp_path)
    finding = named(check_versions(None), "mooncake")
    assert finding.severity is Severity.PROBLEM
    assert "several flavours" in finding.detail


def installed_mooncakes() -> list[str]:
    names = [
        path.name.split("-")[0].replace("_", "-") for path in SITE_PACKAGES.glob("mooncake_transfer_engine*.dist-info")
    ]
    return sorted(names)


@pytest.mark.parametrize(("allowed", "severity"), [("other", Severity.PROBLEM), ("other, spectrumkv", Severity.OK)])
def test_a_plugin_list_without_this_one_is_a_problem(allowed: str, severity: Severity) -> None:
    assert named(check_versions(allowed), "spectrumkv-sglang").severity is severity


def test_a_wrong_configuration_is_a_problem_with_its_message(tmp_path: Path) -> None:
    file = tmp_path / "spectrumkv.yaml"
    file.write_text("budget: 7\n")
    section, config = check_settings(file, {})
    assert config is None
    (finding,) = section.findings
    assert finding.severity is Severity.PROBLEM
    assert str(file) in finding.detail
    assert "budget" in finding.detail


def test_the_control_channel_is_told_with_its_secret(tmp_path: Path) -> None:
    def told(environ: dict[str, str]) -> Finding:
        section, _ = check_settings(None, environ)
        (found,) = [finding for finding in section.findings if finding.name == "control channel"]
        return found

    assert "a random port; no secret" in told({}).detail
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef" * 4)
    secret.chmod(0o600)
    held = {"SPECTRUMKV_CONTROL_SECRET_FILE": str(secret), "SPECTRUMKV_CONTROL_PORT": "18000-18015"}
    assert (told(held).severity, "port 18000-18015" in told(held).detail) == (Severity.OK, True)
    assert secret.read_text() not in told(held).detail
    secret.write_text("short")
    assert told(held).severity is Severity.PROBLEM


def test_settings_that_waste_the_backend_are_warned_of(tmp_path: Path) -> None:
    environ = {"SPECTRUMKV_ENABLED": "false", "SPECTRUMKV_TRANSFER_LOG": str(tmp_path / "missing" / "log")}
    section, config = check_settings(None, environ)
    assert config is not None
    assert named(section, "enabled").severity is Severity.WARNING
    assert named(section, "transfer_log").severity is Severity.WARNING


# ---- isolation -------------------------------------------------------------------------------------------------------


def test_isolated_code_that_works() -> None:
    outcome = run_python("print('hello')")
    assert outcome.succeeded
    assert outcome.output == "hello\n"


@pytest.mark.parametrize(
    ("code", "last_line"),
    [
        ("raise ImportError('libcuda.so.1: cannot open')", "ImportError: libcuda.so.1: cannot open"),
        ("import os; os.abort()", "killed by SIGABRT"),
        ("import os; os._exit(3)", "ended with exit code 3"),
    ],
)
def test_isolated_code_that_fails_says_how(code: str, last_line: str) -> None:
    outcome = run_python(code)
    assert not outcome.succeeded
    assert outcome.last_line == last_line


def test_isolated_code_that_hangs_is_ended() -> None:
    assert run_python("import time; time.sleep(60)", timeout_s=0.5).last_line == "no answer within 0 s"


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(
    *arguments: str, python_path: list[Path], flags: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SPECTRUMKV_", "MC_"))}
    environ["PYTHONPATH"] = os.pathsep.join(str(path) for path in python_path)
    environ["PYTHONSAFEPATH"] = "1"
    command = [sys.executable, *flags, "-c", "from spectrumkv_sglang.cli import main; main()", *arguments]
    return subprocess.run(command, env=environ, cwd="/", capture_output=True, text=True, timeout=300, check=False)


def doctor(
    tmp_path: Path, *arguments: str, python_path: list[Path], flags: tuple[str, ...] = ()
) -> tuple[int, Report, str]:
    file = tmp_path / "doctor.json"
    done = run_command("doctor", "--json", str(file), *arguments, python_path=python_path, flags=flags)
    assert file.exists(), done.stderr
    return done.returncode, msgspec.json.decode(file.read_bytes(), type=Report), done.stdout


def test_doctor_on_this_machine_finds_nothing_that_stops_it(tmp_path: Path) -> None:
    shims = [] if torch.cuda.is_available() else [ROOT / "launch" / "cpu_shims"]
    exit_code, report, shown = doctor(tmp_path, "--model-path", str(model_directory(tmp_path)), python_path=shims)
    assert [finding for finding in report.findings if finding.severity is Severity.PROBLEM] == []
    assert exit_code == 0
    sections = list(dict.fromkeys(finding.section for finding in report.findings))
    assert sections == ["versions", "extension points", "transport", "gpu", "configuration", "model"]
    assert all(section in shown for section in sections)
    assert "SpectrumKV can run" in shown


@pytest.fixture(scope="module")
def without_sglang(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory to be put on PYTHONPATH of `python -S`: this environment, less SGLang and Mooncake."""
    directory = tmp_path_factory.mktemp("packages")
    for entry in SITE_PACKAGES.iterdir():
        if not entry.name.startswith(("sglang", "mooncake", "__editable__", "spectrumkv_sglang.")):
            (directory / entry.name).symlink_to(entry)
    if not (directory / "spectrumkv_sglang").exists():
        package = directory / "spectrumkv_sglang"
        package.mkdir()
        for entry in [*(ROOT / "spectrumkv_sglang").iterdir(), ROOT / "kernels", ROOT / "launch"]:
            (package / entry.name).symlink_to(entry)
    return directory


def test_doctor_without_sglang_and_mooncake_says_what_to_install(tmp_path: Path, without_sglang: Path) -> None:
    exit_code, report, shown = doctor(tmp_path, python_path=[without_sglang], flags=("-S",))
    assert shown.startswith("Looking at this host: ")
    problems = {finding.name: finding for finding in report.findings if finding.severity is Severity.PROBLEM}
    assert exit_code == 1
    assert set(problems) == {"sglang", "mooncake"}
    assert "spectrumkv-sglang[sglang]" in problems["sglang"].remedy
    assert "spectrumkv-sglang[mooncake]" in problems["mooncake"].remedy
    assert "2 problem(s) stop SpectrumKV" in shown


def test_doctor_names_every_extension_point_that_an_sglang_lacks(tmp_path: Path, without_sglang: Path) -> None:
    other = tmp_path / "other"
    (other / "sglang").mkdir(parents=True)
    (other / "sglang" / "__init__.py").write_text('__version__ = "0.5.20"\n')
    install(other, "sglang", "0.5.20")
    exit_code, report, _ = doctor(tmp_path, python_path=[other, without_sglang], flags=("-S",))
    missing = [finding for finding in report.findings if finding.section == "extension points"]
    assert exit_code == 1
    assert len(missing) > 10
    assert all(finding.severity is Severity.PROBLEM and finding.remedy for finding in missing)


@pytest.mark.parametrize(
    "arguments",
    [["doctor", "--bogus"], ["unknown"], ["profiles", "--head-dim", "12"], ["profiles", "--json", "/nope/x"]],
)
def test_wrong_usage_exits_with_2_and_a_message(without_sglang: Path, arguments: list[str]) -> None:
    done = run_command(*arguments, python_path=[without_sglang], flags=("-S",))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr


def test_profiles_lists_every_shipped_profile_with_its_ratio(tmp_path: Path, without_sglang: Path) -> None:
    file = tmp_path / "profiles.json"
    done = run_command(
        *f"profiles --json {file} --kv-heads 2 --head-dim 64 --layers 24 --dtype float16".split(),
        python_path=[without_sglang],
        flags=("-S",),
    )
    assert done.returncode == 0, done.stderr
    listed = {profile["name"]: profile for profile in json.loads(file.read_bytes())}
    assert set(listed) >= {"native-packed", "int8", "near-lossless", "balanced", "aggressive", "spectrum-paper"}
    assert listed["native-packed"]["tiers"][0]["ratio"] == 1
    assert listed["int8"]["native_bytes_per_token"] == 24 * 2 * 2 * 64 * 2
    assert listed["int8"]["tiers"][0]["ratio"] == (64 + 2) / 128
    assert [tier["ratio"] for tier in listed["spectrum-paper"]["tiers"]] == [1, (64 + 2) / 128, (32 + 4) / 128]
    assert all(name in done.stdout for name in listed)


def test_version_names_what_is_missing(without_sglang: Path) -> None:
    done = run_command("version", python_path=[without_sglang], flags=("-S",))
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert "sglang not installed" in lines
    assert "mooncake-transfer-engine not installed" in lines
    assert f"torch {torch.__version__}" in lines


def test_a_report_counts_and_ends_by_severity() -> None:
    section = Section("s")
    section.ok("a", "fine")
    section.warning("b", "costly", "do this")
    assert (make_report("1", [section]).exit_code, make_report("1", [section]).warnings) == (0, 1)
    section.problem("c", "broken", "do that")
    report = make_report("1", [section])
    assert (report.exit_code, report.problems) == (1, 1)
    assert json.loads(report.to_json())["findings"][2]["remedy"] == "do that"
