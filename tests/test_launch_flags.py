"""A command line becomes a mapping and comes back as SGLang's parser would read it the first time."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectrumkv_sglang.launch_flags import (
    MANAGED_FLAGS,
    Flags,
    FlagsError,
    arguments_from_flags,
    flags_from_arguments,
    last_value,
    merged_flags,
    with_absolute_paths,
)

keys = st.from_regex(r"[x-z][A-Za-z0-9_.-]{0,8}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
numbers = st.integers() | st.floats()
plain_texts = texts.filter(lambda text: not text.startswith("-"))
awkward_texts = st.sampled_from(
    [
        *("", "-", "-1", "-.5", "-1e-5", "-x", "--x", "--x y", "- a", "a=b", "-a=b c", "#", "a: b", "\n", "1" * 5000),
        *("007", "0.90", "1e5", "1_0", "٣", "inf", "nan", "true", "yes", "null", "~", "2026-01-31", '{"a": -1}', "[1]"),
    ]
)
lists = st.lists(st.integers() | plain_texts, min_size=1, max_size=4)
flags = st.dictionaries(keys, st.booleans() | st.none() | numbers | texts | awkward_texts | lists, max_size=6)


@given(flags)
def test_a_mapping_comes_back_from_its_command_line(given_flags: dict[str, object]) -> None:
    arguments = arguments_from_flags(given_flags)
    assert arguments_from_flags(flags_from_arguments(arguments)) == arguments


@given(st.dictionaries(keys, st.one_of(texts, awkward_texts, st.lists(plain_texts, max_size=4)), max_size=5))
def test_argparse_reads_the_same_before_and_after(given_flags: dict[str, str | list[str]]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    arguments: list[str] = []
    for key, value in given_flags.items():
        if isinstance(value, list):
            parser.add_argument(f"--{key}", nargs="*")
            arguments += [f"--{key}", *value]
        else:
            parser.add_argument(f"--{key}")
            arguments.append(f"--{key}={value}")
    kept = arguments_from_flags(flags_from_arguments(arguments))
    assert parser.parse_args(kept) == parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--tp", "2"], {"tp": 2}),
        (["--tp=2"], {"tp": 2}),
        (["--enable-metrics"], {"enable-metrics": True}),
        (["--enable-metrics", "--tp", "2"], {"enable-metrics": True, "tp": 2}),
        (["--cuda-graph-bs", "1", "2", "4"], {"cuda-graph-bs": [1, 2, 4]}),
        (["--chunked-prefill-size", "-1"], {"chunked-prefill-size": -1}),
        (["--mem-fraction-static", "0.88"], {"mem-fraction-static": 0.88}),
        (["--mem-fraction-static", "0.880"], {"mem-fraction-static": "0.880"}),
        (["--revision", "007"], {"revision": "007"}),
        (["--json-model-override-args", '{"a": -1}'], {"json-model-override-args": '{"a": -1}'}),
        (["--chat-template=-x.jinja"], {"chat-template": "-x.jinja"}),
        (["--served-model-name", ""], {"served-model-name": ""}),
        (["--Odd_name.x", "true"], {"Odd_name.x": "true"}),
        (["--tp", "2", "--port", "1", "--tp", "4"], {"port": 1, "tp": 4}),
        ([], {}),
    ],
)
def test_what_a_command_line_means(arguments: list[str], expected: dict[str, object]) -> None:
    found = flags_from_arguments(arguments)
    assert found == expected
    assert list(found) == list(expected)
    assert [type(value) for value in found.values()] == [type(value) for value in expected.values()]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["2"], "'2' belongs to no flag"),
        (["--tp=2", "3"], "'3' belongs to no flag"),
        (["-tp", "2"], "'-tp' is no SGLang flag: expected --name"),
        (["--tp", "2", "--"], "'--' is no SGLang flag"),
        (["--a", "-x"], "'-x' is no SGLang flag.*--name=VALUE"),
        (["--disaggregation-mode", "prefill"], "launch prefill.decode.pair` sets it"),
        (["--disaggregation-transfer-backend=nixl"], "set it with the key `backend`"),
        (["--spectrumkv-config", "x"], "gives the server the launch config itself"),
    ],
)
def test_a_command_line_that_cannot_be_kept_is_refused(arguments: list[str], expected: str) -> None:
    with pytest.raises(FlagsError, match=expected):
        flags_from_arguments(arguments)


@given(st.sampled_from(sorted(MANAGED_FLAGS)), st.data())
def test_no_abbreviation_slips_a_managed_flag_in(name: str, data: st.DataObject) -> None:
    shortest = len("disaggregation-m") if name.startswith("d") else len("spectrumkv-c")
    beginning = name[: data.draw(st.integers(shortest, len(name)))]
    with pytest.raises(FlagsError, match=f"stands for --{name}"):
        flags_from_arguments([f"--{beginning}", "x"])


def test_flags_that_only_look_like_managed_ones_are_the_operators() -> None:
    arguments = ["--disaggregation-bootstrap-port", "9000", "--disaggregation-mode-x", "1", "--d", "2"]
    assert arguments_from_flags(flags_from_arguments(arguments)) == arguments


def test_a_roles_own_flags_replace_common_ones_and_stand_behind_them() -> None:
    merged = merged_flags({"tp": 2, "dtype": "half", "x": True}, {"tp": 4, "x": False})
    assert arguments_from_flags(merged) == ["--dtype", "half", "--tp", "4"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--port", "1", "--port=2"], "2"),
        (["--port=1", "--port", "2"], "2"),
        (["--port", "--tp"], None),
        (["--port"], None),
        (["--porter", "1"], None),
        (["--port", "1", "--p", "2"], "2"),
    ],
)
def test_the_last_value_of_a_flag_is_the_one_that_holds(arguments: list[str], expected: str | None) -> None:
    assert last_value(arguments, "--port", "--p") == expected


def test_paths_become_absolute_for_servers_that_start_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tok", "triton", "t.jinja"):
        Path(name).touch()
    flags: Flags = {"tokenizer-path": "tok", "chat_template": "t.jinja", "download-dir": "new", "tp": 2}
    here: Flags = {"tokenizer-path": f"{tmp_path}/tok", "chat_template": f"{tmp_path}/t.jinja", "tp": 2}
    assert with_absolute_paths(flags) == {**here, "download-dir": f"{tmp_path}/new"}
    others: Flags = {"attention-backend": "triton", "tokenizer-path": "org/name", "chat-template": "chatml"}
    assert with_absolute_paths(others) == others
