"""`spectrumkv profiles` with files of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spectrumkv_sglang.cli import app
from spectrumkv_sglang.profiles.errors import ProfileError
from spectrumkv_sglang.profiles.profile import shipped_profiles

MINE = """\
name: mine
tiers:
  high: {keys: int8, values: int4}
layer_overrides:
  - {layers: [3], keys: native}
"""


def test_files_are_listed_before_the_shipped_ones(tmp_path: Path) -> None:
    mine, out = tmp_path / "mine.yaml", tmp_path / "out.json"
    mine.write_text(MINE)
    arguments = ["profiles", str(mine), "int8", "--layers", "4", "--json", str(out)]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    listed = json.loads(out.read_text())
    assert [one["name"] for one in listed[:2]] == ["mine", "int8"]
    assert sorted(one["name"] for one in listed[1:]) == sorted(shipped_profiles())
    (tier,) = listed[0]["tiers"]
    assert (tier["keys"], tier["values"]) == ("int8 to native", "int4")  # one layer of four keeps its keys
    keys, values = (3 * (128 + 2) + 256) * 8, 4 * (64 + 4) * 8
    assert tier["bytes_per_token"] == keys + values
    assert "mine" in done.output


def test_a_file_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(MINE)
    for arguments, why in ((["--layers", "3", str(mine)], "state its size"), ([str(tmp_path / "no.yaml")], "no.yaml")):
        error = CliRunner().invoke(app, ["profiles", *arguments]).exception
        with pytest.raises(ProfileError, match=why):
            raise error or AssertionError("it was taken")
