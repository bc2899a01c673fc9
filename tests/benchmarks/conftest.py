"""Lets tests import the modules of benchmarks/, which are no package: `from serving_result import read_result`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# In the folder there is also a kernels.py, which must not pass for the package of that name that SGLang looks for.
MODULES = {path.stem for path in BENCHMARKS.glob("*.py")} - {"kernels"}


class _BenchmarkModules(MetaPathFinder):
    """Finds them after everything that is installed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(BENCHMARKS)], target) if path is None and name in MODULES else None


sys.meta_path.append(_BenchmarkModules())
