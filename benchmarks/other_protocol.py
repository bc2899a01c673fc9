"""An SGLang plugin that makes a server of ours speak the next protocol version; no part of the package.

Everything that it says and expects carries the other version, as if another release of the package were installed. For
`mixed_versions.py`.
"""

from __future__ import annotations

import os


def register() -> None:
    """Called by SGLang in each of its processes; only schedulers that run our backend talk to each other."""
    if not os.environ.get("SPECTRUMKV_ACTIVE"):
        return
    from spectrumkv_sglang.transfer import messages

    messages.PROTOCOL_VERSION += 1
