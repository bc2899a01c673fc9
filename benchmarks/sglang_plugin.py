"""Makes a module of this folder an SGLang plugin without installing it: a folder with the module and its dist-info."""

from __future__ import annotations

import shutil
from pathlib import Path


def plugin_folder(folder: Path, module: Path) -> Path:
    """Copy the plugin ``module``, a file with a function ``register``, under ``folder``.

    Returns:
        What to put on a server's PYTHONPATH.
    """
    name = module.stem
    root = folder / name
    info = root / f"{name}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(module, root / module.name)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n", encoding="utf-8")
    entry_point = f"[sglang.srt.plugins]\n{name} = {name}:register\n"
    (info / "entry_points.txt").write_text(entry_point, encoding="utf-8")
    return root.resolve()
