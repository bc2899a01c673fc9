"""What the docs tell people to type exists: commands, options, targets, files and links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer.main
import yaml

from spectrumkv_sglang.cli import app
from spectrumkv_sglang.launch.probe_then_launch import argument_parser
from spectrumkv_sglang.profiles.profile import Profile

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("**/*.md"), *(ROOT / "examples").glob("**/*.md")]
)
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
COMMANDS: dict[str, click.Command] = typer.main.get_group(app).commands  # type: ignore[assignment]
# What stands for something in the docs.
LEFT_OUT = re.compile(r"\.\.\.|…")


def code_lines(page: Path) -> Iterator[str]:
    """Lines of indented or fenced code, with continued ones joined and comments cut off."""
    joined = page.read_text().replace("\\\n", " ")
    fenced = False
    for line in joined.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            yield re.sub(r"\s+#\s.*$", "", line).strip()


def inline_code(page: Path) -> Iterator[str]:
    """What stands between backticks."""
    yield from (code.replace("\n", " ") for code in re.findall(r"`([^`]+)`", page.read_text()))


def words_of(line: str) -> list[str]:
    """Words of a shell line up to a pipe or a second command, without variables in front."""
    words = shlex.split(re.split(r"\s(?:\||&&|;|>)\s", line)[0])
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    return words


def options_of(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


def check_options(words: list[str]) -> None:
    """Each option of a `spectrumkv` command exists, or goes on to SGLang."""
    command = COMMANDS[words[1]]
    if command.context_settings.get("ignore_unknown_options"):
        return
    used = {word.partition("=")[0] for word in words[2:] if re.match(r"--[a-z]", word)}
    assert used <= options_of(command), words


def spectrumkv_lines() -> list[tuple[str, str]]:
    return [
        (name, line)
        for name, page in zip(NAMES, PAGES, strict=True)
        for line in code_lines(page)
        if re.match(r"(\S*/)?spectrumkv\s+[a-z]", line)
    ]


def test_there_are_commands_to_check() -> None:
    named = {words_of(line)[1] for _, line in spectrumkv_lines()}
    assert named >= {"doctor", "profiles", "eval", "calibrate", "simulate", "probe", "launch", "size", "report"}


@pytest.mark.parametrize(("name", "line"), spectrumkv_lines())
def test_every_command_parses(name: str, line: str) -> None:
    words = words_of(line)
    check_options(words)
    if LEFT_OUT.search(line):
        return
    command = COMMANDS[words[1]]
    arguments = [word.replace("|", "") for word in words[2:]]
    command.make_context(words[1], list(arguments)).close()


@pytest.mark.parametrize("name", NAMES)
def test_options_in_running_text_exist(name: str) -> None:
    for code in inline_code(ROOT / name):
        found = re.match(r"spectrumkv\s+([a-z]+)(\s|$)", code)
        if found and not LEFT_OUT.search(code):
            assert found[1] in COMMANDS, code
            check_options(words_of(code))


@pytest.mark.parametrize("name", NAMES)
def test_scripts_exist_and_know_their_options(name: str) -> None:
    for line in [*code_lines(ROOT / name), *inline_code(ROOT / name)]:
        for path, rest in re.findall(r"python ((?:benchmarks|examples|tests)/\S+\.py)([^|;&]*)", line):
            assert (ROOT / path).is_file(), line
            source = (ROOT / path).read_text() + (ROOT / "benchmarks" / "command_line.py").read_text()
            ours = rest.split(" -- ")[0]
            for option in re.findall(r"(?<!\S)(--[a-z][a-z0-9-]*)", ours):
                assert f'"{option}"' in source, f"{line}: {path} has no {option}"
        for path in re.findall(r"pytest ((?:tests/\S+ ?)+)", line):
            assert all((ROOT / one.split("::")[0]).exists() for one in path.split()), line
        for target in re.findall(r"^make ([a-z-]+)$", line):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line


@pytest.mark.parametrize("name", NAMES)
def test_probe_then_launch_parses(name: str) -> None:
    for line in [*code_lines(ROOT / name), *inline_code(ROOT / name)]:
        if line.startswith("python -m spectrumkv_sglang.launch.probe_then_launch --") and not LEFT_OUT.search(line):
            argument_parser().parse_args(words_of(line)[3:])


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), f"{name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{name}: {target}"


def test_the_profile_that_newcomers_start_from_loads() -> None:
    text = (ROOT / "docs" / "extending.md").read_text()
    block = re.search(r"((?:^    .*\n)*^    name: mine\n(?:^    .*\n)*)", text, re.MULTILINE)
    assert block is not None
    Profile.model_validate(yaml.safe_load(block[1]))
