"""Runs ``sglang.bench_serving`` as its command line would, many times, importing it once.

Started by `serving_load.LoadGenerator`; it imports the tool, which takes seconds, and then forks for every line of
standard input: a JSON object with ``arguments`` (of ``python -m sglang.bench_serving``) and ``log`` (a file). For each
it answers with a line of JSON: ``{"status": exit status}``. It ends with its standard input.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

# Here lies a kernels.py, which would hide the package of that name that SGLang imports.
_HERE = Path(__file__).resolve().parent


def import_tool() -> Callable[[], None]:
    """Import the tool and return its command line.

    It imports Hugging Face's ``datasets``, which SGLang does not install, for a data set that is not used here. Where
    that is missing, an empty module takes its place during the import.
    """
    missing = importlib.util.find_spec("datasets") is None
    if missing:
        sys.modules["datasets"] = _empty_datasets()
    try:
        from sglang.bench_serving import cli_main
    finally:
        if missing:
            sys.modules.pop("datasets", None)
    command_line: Callable[[], None] = cli_main
    return command_line


def _empty_datasets() -> ModuleType:
    def load_dataset(*_arguments: Any, **_options: Any) -> None:
        raise ModuleNotFoundError("data sets of Hugging Face need the package datasets: pip install datasets")

    module = ModuleType("datasets")
    module.__spec__ = ModuleSpec("datasets", loader=None)
    module.__dict__["load_dataset"] = load_dataset
    return module


def _run(tool: Callable[[], None], arguments: list[str], log: str) -> int:
    """Run the tool in this process, with its output in ``log``, and return its exit status."""
    with open(log, "wb", buffering=0) as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    sys.argv = ["sglang.bench_serving", *arguments]
    try:
        tool()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001 - the process ends here, and its log says why
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def main() -> None:
    """Serve command lines until standard input ends."""
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what an import prints is no answer
    tool = import_tool()
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(_run(tool, order["arguments"], order["log"]))
        _, status = os.waitpid(child, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(status)}), file=answers)


if __name__ == "__main__":
    main()
