"""Does the installed SGLang have everything that the backend attaches to?"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import msgspec

from spectrumkv_sglang.doctor.findings import Section
from spectrumkv_sglang.doctor.isolated import run_python

_MARK = "extension points: "
_LIST_POINTS = f"""
import json
try:
    import sglang.srt.server_args  # one clear problem when SGLang as a whole does not import
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("sglang"):
        raise
from spectrumkv_sglang.sglang_compat import check_extension_points
points = [[p.name, bool(p.found), str(p.detail), str(p.needed_for)] for p in check_extension_points()]
print()
print({_MARK!r} + json.dumps(points))
"""


class _Point(msgspec.Struct, array_like=True):
    name: str
    found: bool
    detail: str
    needed_for: str


def check_sglang_extension_points() -> Section:
    """Imports SGLang (in a process of its own) and looks for each extension point."""
    section = Section("extension points")
    if importlib.util.find_spec("sglang") is None:
        section.info("sglang", "not installed: extension points cannot be checked")
        return section
    listed = run_python(_LIST_POINTS)
    lines = [line for line in listed.output.splitlines() if line.startswith(_MARK)]
    if not listed.succeeded or not lines:
        section.problem("sglang", f"cannot be imported: {listed.last_line}", _import_remedy())
        return section
    points = msgspec.json.decode(lines[-1][len(_MARK) :], type=list[_Point])
    missing = [point for point in points if not point.found]
    for point in missing:
        section.problem(
            point.name,
            f"{point.detail}; needed to {point.needed_for}",
            "install SGLang 0.5.16 to 0.5.23; until then start with --disaggregation-transfer-backend mooncake",
        )
    if not missing:
        section.ok("sglang", f"all {len(points)} found")
    return section


def _import_remedy() -> str:
    remedy = "make `python -c 'import sglang'` work first"
    launch = importlib.util.find_spec("spectrumkv_sglang.launch")
    if launch is not None and launch.submodule_search_locations:
        shims = Path(next(iter(launch.submodule_search_locations))) / "cpu_shims"
        if shims.is_dir():
            remedy += f"; on a host without a GPU: PYTHONPATH={shims}"
    return remedy
