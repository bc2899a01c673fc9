"""One file says how a model's servers start; it is read strictly and written whole or not at all."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spectrumkv_sglang.config import LAUNCH_CONFIG_KEYS, ConfigError, load_config
from spectrumkv_sglang.launch_config import (
    LaunchConfig,
    LaunchConfigError,
    SGLangFlags,
    check_writable,
    read_launch_config,
    write_launch_config,
)

CONFIG = LaunchConfig(
    backend="spectrumkv_tcp",
    sglang=SGLangFlags(
        common={"model-path": "/models/m", "tp": 2, "enable-metrics": True, "dtype": "bfloat16"},
        prefill={"port": 30000, "chunked-prefill-size": -1},
        decode={"port": 30001, "enable-metrics": False, "dtype": "float16", "cuda-graph-bs": [1, 2, 4]},
    ),
    spectrumkv={"profile": "int8", "budget": 0.6},
)
VALID = """\
format: 1
sglang:
  common: {model-path: /models/m}
spectrumkv: {profile: int8}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "launch.yaml"
    path.write_text(text)
    return path


# ---- what the servers get ----------------------------------------------------------------------------------------


def test_a_role_gets_the_common_flags_and_its_own_which_win() -> None:
    assert CONFIG.arguments("prefill") == [
        *("--model-path", "/models/m", "--tp", "2", "--enable-metrics", "--dtype", "bfloat16"),
        *("--port", "30000", "--chunked-prefill-size", "-1"),
    ]
    assert CONFIG.arguments("decode") == [
        *("--model-path", "/models/m", "--tp", "2"),
        *("--port", "30001", "--dtype", "float16", "--cuda-graph-bs", "1", "2", "4"),
    ]


def test_another_role_is_refused() -> None:
    with pytest.raises(LaunchConfigError, match="unknown role 'router': expected prefill or decode"):
        CONFIG.arguments("router")


# ---- reading -----------------------------------------------------------------------------------------------------


def test_what_was_written_is_read_and_is_a_spectrumkv_configuration_too(tmp_path: Path) -> None:
    path = tmp_path / "launch.yaml"
    write_launch_config(path, CONFIG)
    assert read_launch_config(path) == CONFIG
    assert load_config(path, {}).budget == 0.6
    assert path.read_text().startswith("# Launch config of SpectrumKV")
    assert set(LaunchConfig.model_fields) == {*LAUNCH_CONFIG_KEYS, "spectrumkv"}


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
scalars = st.integers() | st.floats(allow_nan=False) | texts
values = st.booleans() | st.none() | scalars


@example({"z": "\x85"})
@example({"z": "a \u2028 b\u2029"})
@example({"z": "\ufeffa"})
@given(st.dictionaries(st.from_regex(r"z[a-z0-9-]{0,10}", fullmatch=True), values, max_size=6))
def test_any_value_survives_the_file(tmp_path_factory: pytest.TempPathFactory, flags: dict[str, object]) -> None:
    path = tmp_path_factory.getbasetemp() / "survives.yaml"
    config = LaunchConfig.model_validate({"sglang": {"decode": flags}, "spectrumkv": {}})
    write_launch_config(path, config)
    assert read_launch_config(path) == config
    assert read_launch_config(path).arguments("decode") == config.arguments("decode")


def test_a_path_that_is_no_text_survives_the_file(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"sglang": SGLangFlags(common={"model-path": os.fsdecode(b"/models/\xff")})})
    write_launch_config(tmp_path / "launch.yaml", config)
    assert os.fsencode(read_launch_config(tmp_path / "launch.yaml").arguments("decode")[1]) == b"/models/\xff"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is no launch config: expected the keys format, sglang and spectrumkv"),
        ("profile: spectrum\nbudget: 0.5\n", "is no launch config.*spectrumkv probe --model-path"),
        ("format: 0\n", "format = 0, expected 1: probe again"),
        ("format: 2\n", "format = 2, expected 1: use a SpectrumKV as new as the one that wrote it"),
        ("format: '1'\n", "format = '1', expected 1"),
        ("format: true\n", "format = True, expected 1"),
        ("format: 1\n", r"sglang is missing: add the section \(sections common, prefill and decode.*; spectrumkv is"),
        (VALID + "spektrumkv: {}\n", r"unknown section spektrumkv \(did you mean spectrumkv\?\): expected format, bac"),
        (VALID + "backend: nixl\n", r"backend = 'nixl': expected spectrumkv \(RDMA.*or spectrumkv_tcp"),
        (VALID + "format: 1\n", "(?s)not valid YAML.*'format' twice"),
        (VALID.replace("{model-path", "{model-path: x, model-path"), "(?s)not valid YAML.*'model-path' twice"),
        (
            VALID.replace("common", "comon"),
            r"unknown section sglang.comon \(did you mean common\?\): expected common, ",
        ),
        (VALID.replace("common", "router"), "unknown section sglang.router: expected common, prefill, decode"),
        (
            VALID.replace("{model-path: /models/m}", "--tp 2"),
            "sglang.common: expected flags and values, .*got '--tp 2'",
        ),
        (VALID.replace("model-path", "--model-path"), "sglang.common: key '--model-path': .*without dashes in front"),
        (VALID.replace("/models/m", "{a: 1}"), r"sglang.common: model-path = \{'a': 1\}: .*put JSON and dates in quot"),
        (VALID.replace("/models/m", "2026-01-31"), "sglang.common: model-path = datetime.* in quotes"),
        (VALID.replace("/models/m", "[]"), r"model-path = \[\]: expected at least one value"),
        (VALID.replace("/models/m", "[true]"), "model-path: expected a list of texts and numbers, got True"),
        (VALID.replace("/models/m", "[a, -b]"), "'-b' in a list: SGLang would take it for a flag"),
        (VALID.replace("model-path", "disaggregation-mode"), "launch prefill.decode.pair` sets it"),
        (VALID.replace("model-path", "disaggregation_mode"), "disaggregation_mode stands for --disaggregation-mode"),
        (VALID.replace("model-path", "disaggregation-trans"), "set it with the key `backend` at the top of the file"),
        (VALID.replace("model-path", "spectrumkv-config"), "gives the server the launch config itself"),
        (VALID.replace("{profile: int8}", "int8"), "spectrumkv = 'int8': expected fields of the SpectrumKV config"),
        (VALID.replace("{profile: int8}", "{1: int8}"), "spectrumkv: expected fields with names, got 1"),
        ("format: [1\n", "is not valid YAML"),
        ("format: 1\nx: 2026-99-99\n", "is not valid YAML"),
        ("[" * 5000, "is not valid YAML"),
    ],
)
def test_a_file_that_cannot_be_used_is_explained(text: str, expected: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(LaunchConfigError, match=expected) as raised:
        read_launch_config(path)
    assert str(path) in str(raised.value)


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    text = VALID.replace("common: {", "prefill: {1: 2}\n  common: {--") + "backend: x\nfoo: 1\n"
    with pytest.raises(LaunchConfigError, match=r"(?s)backend.*sglang.common.*sglang.prefill.*foo"):
        read_launch_config(written(tmp_path, text))


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchConfigError, match=r"there is no launch config .*no\.yaml: make one with `spectrumkv pro"):
        read_launch_config(tmp_path / "no.yaml")
    with pytest.raises(LaunchConfigError, match=r"cannot read launch config .*directory"):
        read_launch_config(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(LaunchConfigError, match=r"cannot read launch config .*utf-8"):
        read_launch_config(binary)


# ---- writing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_new_file_has_an_ordinary_files_permissions(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_launch_config(tmp_path / "launch.yaml", CONFIG)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "launch.yaml").stat().st_mode) == 0o666 & ~umask


def test_a_file_that_is_there_keeps_its_permissions_and_the_link_to_it(tmp_path: Path) -> None:
    target = written(tmp_path, "old")
    target.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(target)
    write_launch_config(link, CONFIG)
    assert link.is_symlink()
    assert read_launch_config(target) == CONFIG
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


@pytest.mark.parametrize("failing", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_error_in_the_middle_leaves_the_old_file_and_nothing_else(
    failing: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, VALID)

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises((LaunchConfigError, KeyboardInterrupt), match=r"No space left|^$"):
        write_launch_config(path, CONFIG)
    assert path.read_text() == VALID
    assert list(tmp_path.iterdir()) == [path]


KILLED = """
import os, signal, sys
from spectrumkv_sglang.launch_config import read_launch_config, write_launch_config
config = read_launch_config(sys.argv[1])
os.replace = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
write_launch_config(sys.argv[1], config)
"""


def test_a_kill_in_the_middle_leaves_the_old_file(tmp_path: Path) -> None:
    path = written(tmp_path, VALID)
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False).returncode == -9
    assert path.read_text() == VALID


def test_a_value_that_yaml_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"spectrumkv": {"profile": object()}})
    with pytest.raises(LaunchConfigError, match="cannot be written as YAML"):
        write_launch_config(tmp_path / "launch.yaml", config)
    assert list(tmp_path.iterdir()) == []


def unwritable(kind: str, folder: Path) -> Path:
    if kind == "no folder":
        return folder / "missing" / "launch.yaml"
    if kind == "folder is a file":
        return written(folder, VALID) / "launch.yaml"
    if kind == "folder":
        return folder
    if kind == "device":
        return Path("/dev/null")
    if kind == "protected":
        path = written(folder, VALID)
        path.chmod(0o444)
        return path
    assert kind == "read-only"
    return Path("/proc/launch.yaml")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("no folder", "the folder .*missing does not exist"),
        ("folder is a file", "launch.yaml is no folder"),
        ("folder", "it is a folder"),
        ("device", "no ordinary file"),
        ("protected", "the file is write-protected"),
        ("read-only", "cannot write /proc/launch.yaml"),
    ],
)
def test_an_unwritable_place_is_found_before_any_work(kind: str, expected: str, tmp_path: Path) -> None:
    path = unwritable(kind, tmp_path)
    before = sorted(tmp_path.iterdir())
    for attempt in (check_writable, lambda target: write_launch_config(target, CONFIG)):
        with pytest.raises(LaunchConfigError, match=f"{expected}.*name a file that can be written"):
            attempt(path)
    assert sorted(tmp_path.iterdir()) == before


def test_checking_a_writable_place_changes_nothing(tmp_path: Path) -> None:
    check_writable(tmp_path / "launch.yaml")
    assert list(tmp_path.iterdir()) == []
    path = written(tmp_path, VALID)
    check_writable(path)
    assert path.read_text() == VALID


@pytest.mark.parametrize("text", ["format: {n}", "format: 1\nsglang: {{common: {{port: {n}}}}}\nspectrumkv: {{}}"])
def test_a_number_too_large_to_print_is_refused_with_its_place(text: str, tmp_path: Path) -> None:
    path = tmp_path / "launch.yaml"
    path.write_text(text.format(n="0x" + "f" * 20_000))
    with pytest.raises(LaunchConfigError, match="whole number of 80000 bits"):
        read_launch_config(path)
    path.write_text(f"spectrumkv: {{budget: 0x{'f' * 20_000}}}")
    with pytest.raises(ConfigError, match="whole number of 80000 bits"):
        load_config(path, {})


def test_a_name_as_long_as_file_systems_allow_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("\u4e00" * 83 + ".yaml")  # 254 bytes
    check_writable(path)
    write_launch_config(path, LaunchConfig(sglang=SGLangFlags(), spectrumkv={}))
    assert [found.name for found in tmp_path.iterdir()] == [path.name]
