"""Where a model runs and in which dtypes: the options ``--device``, ``--dtype`` and ``--kv-dtype``."""

from __future__ import annotations

import torch

from spectrumkv_sglang.evaluation.errors import EvaluationError
from spectrumkv_sglang.payload.geometry import ITEMSIZE_BY_DTYPE

AUTO = "auto"


def usable_device_type(text: str) -> str:
    """Type ("cpu", "cuda") of the device that ``text`` names.

    Raises:
        EvaluationError: torch cannot use it here.
    """
    try:
        device = torch.device(text)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).splitlines()[0]
        raise EvaluationError(f"--device {text}: cannot be used here ({first_line}); try cpu or cuda") from error
    return device.type


def chosen_dtype(text: str, option: str, automatic: str) -> str:
    """The dtype that ``option`` names; ``automatic`` for "auto".

    Raises:
        EvaluationError: none that KV pools have.
    """
    if text == AUTO:
        return automatic
    if text not in ITEMSIZE_BY_DTYPE:
        raise EvaluationError(f"{option} {text}: expected {AUTO}, {', '.join(ITEMSIZE_BY_DTYPE)}")
    return text
