"""A model is probed before it is served, and not again while its launch config still answers for it."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from spectrumkv_sglang.config import load_config
from spectrumkv_sglang.launch import probe_then_launch
from spectrumkv_sglang.launch.probe_then_launch import Wanted, ensure_probed, main, reason_to_probe
from spectrumkv_sglang.launch.server_commands import LaunchError
from spectrumkv_sglang.launch_config import (
    LaunchConfig,
    LaunchConfigError,
    SGLangFlags,
    read_launch_config,
    write_launch_config,
)
from spectrumkv_sglang.verification.fingerprint import fingerprint_model
from spectrumkv_sglang.verification.record import ProbeRecord

SETTINGS = {"profile": "int8", "budget": 0.6}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Directory with all that a fingerprint looks at."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (directory / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    return directory


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "launch.yaml"


def probed(path: Path, model: Path, verdict: str = "low_allowed", **flags: object) -> Wanted:
    """Write what a probe of ``model`` writes; return what was asked of it."""
    common = {"model-path": str(model), "dtype": "float32", **flags}
    config = LaunchConfig(sglang=SGLangFlags(common=common), spectrumkv=SETTINGS)
    write_launch_config(path, config)
    record = ProbeRecord.sealed(
        verdict=verdict,
        allowed_tiers=["high", "mid", "low"],
        rule="3 of 3",
        date="2026-01-31T00:00:00Z",
        tool_version="0",
        sglang_version="0.5.20",
        policy=load_config(path, {}).probed_policy(),
        scores={"niah_passed": 3, "niah_trials": 3, "control_passed": 3, "gate": {}},
        fingerprint=fingerprint_model(model, quantization=None, dtype="float32"),
    )
    content = {**SETTINGS, "probe": record.model_dump(mode="json")}
    write_launch_config(path, config.model_copy(update={"spectrumkv": content}))
    return Wanted(str(model), engine=("--dtype", "float32"))


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


# ---- whether to probe --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verdict", ["low_allowed", "low_not_allowed", "inconclusive"])
def test_the_probed_model_is_not_probed_again_whatever_came_out(verdict: str, path: Path, model: Path) -> None:
    wanted = probed(path, model, verdict)
    assert reason_to_probe(path, wanted) is None


def test_what_the_operator_adds_for_one_role_does_not_count(path: Path, model: Path) -> None:
    wanted = probed(path, model, tp=2)
    edit(path, "prefill: {}", "prefill: {port: 4000}")
    assert reason_to_probe(path, wanted) is None


def test_the_same_directory_under_another_name_is_the_same_model(path: Path, model: Path, tmp_path: Path) -> None:
    wanted = probed(path, model)
    (tmp_path / "link").symlink_to(model)
    assert reason_to_probe(path, Wanted(str(tmp_path / "link"), engine=wanted.engine)) is None


def test_without_a_launch_config_there_is_a_probe(path: Path, model: Path) -> None:
    assert reason_to_probe(path, Wanted(str(model))) == f"there is no {path} yet"


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_changed_model_is_probed_again(file: str, path: Path, model: Path) -> None:
    wanted = probed(path, model)
    content = (model / file).read_bytes()
    (model / file).write_bytes(content[:-1] + b"\1" if file.endswith("s") else b'{"other": 1}')
    reason = reason_to_probe(path, wanted)
    assert reason is not None
    assert "probed sha256:" in reason


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"engine": ("--dtype", "float16")}, "it was made with --dtype float32, now --dtype float16 is asked for"),
        ({"engine": ("--tp", "2")}, "it was made with no --tp, now --tp 2 is asked for"),
        ({"profile": "spectrum"}, "it holds the profile int8, now spectrum is asked for"),
        ({"budget": 0.7}, "it holds the budget 0.6, now 0.7 is asked for"),
        ({"profile": "int8", "budget": 0.6, "engine": ()}, None),
    ],
)
def test_other_flags_or_another_policy_than_probed_are_probed(
    change: dict[str, object], expected: str | None, path: Path, model: Path
) -> None:
    probed(path, model)
    assert reason_to_probe(path, Wanted(str(model), **change)) == expected


def test_a_budget_that_the_allowed_tiers_cannot_reach_is_not_probed_again(path: Path, model: Path) -> None:
    wanted = probed(path, model, "low_not_allowed")
    # The probe leaves the budget out; then the default holds, or the least in reach.
    edit(path, "profile: int8\n  budget: 0.6\n", "profile: int8\n  budget: 0.8\n")
    assert reason_to_probe(path, Wanted(str(model), budget=0.6, engine=wanted.engine)) is None


def test_the_environment_of_a_server_does_not_count(path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = probed(path, model)
    monkeypatch.setenv("SPECTRUMKV_SINK_TOKENS", "9")
    assert reason_to_probe(path, wanted) is None


def test_another_backend_is_written_without_a_probe(stand_in: StandInProbe, path: Path, model: Path) -> None:
    wanted = probed(path, model)
    record = load_config(path, {}).probe
    ensure_probed(path, Wanted(str(model), backend="spectrumkv_tcp", engine=wanted.engine))
    assert stand_in.runs == []
    assert read_launch_config(path).backend == "spectrumkv_tcp"
    assert load_config(path, {}).probe == record
    assert record is not None
    assert not record.edited


def test_another_model_path_is_probed(path: Path, model: Path, tmp_path: Path) -> None:
    wanted = probed(path, model)
    reason = reason_to_probe(path, Wanted(str(tmp_path / "other"), engine=wanted.engine))
    assert reason == f"it was made with --model-path {model}, now --model-path {tmp_path / 'other'} is asked for"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("verdict: low_allowed", "verdict: inconclusive", "its probe record was edited"),
        ("budget: 0.6\n  probe", "budget: 0.55\n  probe", "budget: probed down to 0.6, served 0.55"),
        ("profile: int8\n  budget", "profile: fp8\n  budget", "profile: probed int8"),
    ],
)
def test_an_edited_policy_or_record_is_probed_again(old: str, new: str, expected: str, path: Path, model: Path) -> None:
    wanted = probed(path, model)
    edit(path, old, new)
    assert expected in str(reason_to_probe(path, wanted))


def test_a_config_without_a_record_is_probed(path: Path, model: Path) -> None:
    write_launch_config(path, LaunchConfig(sglang=SGLangFlags(common={"model-path": str(model)}), spectrumkv=SETTINGS))
    assert reason_to_probe(path, Wanted(str(model))) == "it holds no probe record"


def test_a_model_that_is_gone_is_probed_and_the_probe_says_so(path: Path, model: Path) -> None:
    wanted = probed(path, model)
    (model / "model.safetensors").unlink()
    assert "no weights in" in str(reason_to_probe(path, wanted))


def test_a_file_that_cannot_be_used_is_not_overwritten(path: Path, model: Path) -> None:
    path.write_text("format: [1\n")
    with pytest.raises(LaunchError, match=r"(?s)is not valid YAML.*with --reprobe .* is replaced"):
        ensure_probed(path, Wanted(str(model)))
    assert path.read_text() == "format: [1\n"


# ---- probing -----------------------------------------------------------------------------------------------------

# In the place of `spectrumkv probe`: what is seen here is when and how it is run, not what it measures.
PROBE = """
import shutil, sys, time
calls, source, code, seconds, *arguments = sys.argv[1:]
with open(calls, "a") as file:
    print(*arguments, file=file)
time.sleep(float(seconds))
if source:
    shutil.copy(source, arguments[arguments.index("--out") + 1])
sys.exit(int(code))
"""


class StandInProbe:
    """Runs instead of the probe; knows how often it ran."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = folder / "calls"
        self.result: Path | str = ""
        self.code = 0
        self.seconds = 0.0
        monkeypatch.setattr(probe_then_launch, "python_command", self._command)

    def _command(self, module: str, *arguments: str) -> tuple[str, ...]:
        assert module == "spectrumkv_sglang.cli"
        return (
            *(sys.executable, "-c", PROBE, str(self.calls), str(self.result), str(self.code), str(self.seconds)),
            *arguments,
        )

    @property
    def runs(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandInProbe:
    return StandInProbe(tmp_path, monkeypatch)


def test_the_probe_gets_what_was_asked_for_and_runs_once(
    stand_in: StandInProbe, path: Path, model: Path, tmp_path: Path
) -> None:
    probed(tmp_path / "result.yaml", model)
    stand_in.result = tmp_path / "result.yaml"
    wanted = Wanted(str(model), "int8", 0.6, "spectrumkv", ("--trials", "1"), ("--dtype", "float32"))
    for _ in range(2):
        ensure_probed(path, wanted)
    assert stand_in.runs == [
        f"probe --model-path {model} --out {path} --profile int8 --budget 0.6 --backend spectrumkv --trials 1 "
        "--dtype float32"
    ]
    ensure_probed(path, wanted, reprobe=True)
    assert len(stand_in.runs) == 2


@pytest.mark.parametrize(
    ("code", "verdict", "said"),
    [
        (0, "low_allowed", "the probe allows the low tier"),
        (10, "low_not_allowed", "the probe does not allow the low tier: servers use the tiers high and mid"),
        (11, "inconclusive", "the probe was inconclusive: servers use the tiers high and mid"),
    ],
)
def test_whatever_tiers_the_probe_allows_the_pair_starts_and_it_is_said(
    code: int,
    verdict: str,
    said: str,
    stand_in: StandInProbe,
    path: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    probed(tmp_path / "result.yaml", model, verdict)
    stand_in.result, stand_in.code = tmp_path / "result.yaml", code
    started: list[object] = []
    monkeypatch.setattr(probe_then_launch, "launch", lambda *args, **options: started.append((args, options["strict"])))
    assert main(["--model-path", str(model), "--out", str(path), "--strict", "--", "--dtype", "float32"]) == 0
    assert started == [(("pair", path), True)]
    output = capfd.readouterr().out
    assert f"probing {model}: there is no {path} yet" in output
    assert said in output


def test_probe_only_starts_nothing(
    stand_in: StandInProbe, path: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed(tmp_path / "result.yaml", model)
    stand_in.result = tmp_path / "result.yaml"
    monkeypatch.setattr(probe_then_launch, "launch", None)
    assert main(["--model-path", str(model), "--out", str(path), "--probe-only"]) == 0
    assert read_launch_config(path).sglang.common["model-path"] == str(model)


def test_a_signal_ends_the_probe_too(tmp_path: Path, model: Path) -> None:
    program = (
        "import sys; from spectrumkv_sglang.launch import probe_then_launch as module;"
        "module.python_command = lambda *arguments: ('sleep', '600');"
        "sys.exit(module.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "--model-path", str(model), "--out", str(tmp_path / "launch.yaml")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "probing" in process.stdout.readline()
        while not psutil.Process(process.pid).children():
            time.sleep(0.05)
        family = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 128 + signal.SIGTERM
    assert psutil.wait_procs(family, timeout=5)[1] == []


@pytest.mark.parametrize("code", [1, 2, -9])
def test_a_failed_probe_stops_everything(
    code: int, stand_in: StandInProbe, path: Path, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stand_in.code = code % 256
    assert main(["--model-path", str(model), "--out", str(path)]) == 1
    assert (
        f"spectrumkv probe ended with exit code {code % 256}, see above: nothing is started" in capfd.readouterr().err
    )
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--out", "/no/such/folder/launch.yaml"], "the folder /no/such/folder does not exist"),
        (["--", "--disaggregation-mode", "prefill"], "--disaggregation-mode, which is not given here"),
        (["--probe-options", "--text 'a"], "--probe-options --text 'a: No closing quotation: quote it"),
        (["--", "stray"], "'stray' belongs to no flag"),
    ],
)
def test_a_wrong_request_is_refused_before_the_probe(
    arguments: list[str], expected: str, stand_in: StandInProbe, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model-path", str(model), *arguments]) == 1
    assert expected in capfd.readouterr().err
    assert stand_in.runs == []


def test_of_two_at_once_one_probes_and_the_other_waits(
    stand_in: StandInProbe, path: Path, model: Path, tmp_path: Path
) -> None:
    wanted = probed(tmp_path / "result.yaml", model)
    stand_in.result, stand_in.seconds = tmp_path / "result.yaml", 1.0
    others = [threading.Thread(target=ensure_probed, args=(path, wanted)) for _ in range(2)]
    for other in others:
        other.start()
        time.sleep(0.2)
    for other in others:
        other.join()
    assert len(stand_in.runs) == 1


def test_a_probe_that_claims_success_without_a_result_is_an_error(
    stand_in: StandInProbe, path: Path, model: Path
) -> None:
    with pytest.raises(LaunchConfigError, match="there is no launch config"):
        ensure_probed(path, Wanted(str(model)))
    assert len(stand_in.runs) == 1


def test_the_probe_may_clean_up_after_a_signal(tmp_path: Path, model: Path) -> None:
    cleaning = "import time\ntry: print('probe', flush=True); time.sleep(60)\nfinally: time.sleep(1); print('clean')"
    program = (
        "import sys, signal; from spectrumkv_sglang.launch import probe_then_launch as module;"
        "stop = 'import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\\n';"
        f"module.python_command = lambda *arguments: (sys.executable, '-u', '-c', stop + {cleaning!r});"
        "sys.exit(module.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "--model-path", str(model), "--out", str(tmp_path / "launch.yaml")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "probing" in process.stdout.readline()
        assert process.stdout.readline() == "probe\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "clean\n"
