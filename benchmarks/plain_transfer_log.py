"""An SGLang plugin that logs what SGLang's own Mooncake backend sends: seconds, Mooncake blocks and bytes of a chunk.

SGLang has no such account of its own, and without one a transfer of plain Mooncake could not be compared with ours. It
is put on the PYTHONPATH of a plain prefill server (see `sglang_plugin`) and does nothing unless the variable
`PLAIN_LOG_VARIABLE` names a file. A line is written before decode is told that the chunk is complete, so all lines of
a request are there when its answer is.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLAIN_LOG_VARIABLE = "BENCHMARK_PLAIN_TRANSFER_LOG"
_MANAGER = "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager"


@dataclass(frozen=True)
class PlainTransfer:
    """Sums over the chunks of one request.

    Attributes:
        seconds: time in SGLang's ``send_kvcache``.
        blocks: blocks handed to Mooncake.
        wire_bytes: their bytes.
        chunks: calls of ``send_kvcache``.
        failed: chunks for which it returned an error.
    """

    seconds: float
    blocks: int
    wire_bytes: int
    chunks: int
    failed: int


def read_plain_transfer(path: Path, offset: int) -> PlainTransfer | None:
    """What was logged from byte ``offset`` of the file on; None when nothing was."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(offset)
        chunks = [json.loads(line) for line in file if line.endswith(b"\n")]
    if not chunks:
        return None
    return PlainTransfer(
        seconds=sum(chunk["seconds"] for chunk in chunks),
        blocks=sum(chunk["blocks"] for chunk in chunks),
        wire_bytes=sum(chunk["bytes"] for chunk in chunks),
        chunks=len(chunks),
        failed=sum(chunk["status"] != 0 for chunk in chunks),
    )


def register() -> None:
    """Entry point for SGLang."""
    path = os.environ.get(PLAIN_LOG_VARIABLE)
    if not path:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    sent = threading.local()  # a chunk is sent by one worker thread

    def count_blocks(original: Callable[..., Any], manager: Any, session: str, blocks: list[tuple[int, ...]]) -> Any:
        if hasattr(sent, "blocks"):
            sent.blocks += len(blocks)
            sent.bytes += sum(block[2] for block in blocks)
        return original(manager, session, blocks)

    def log_chunk(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        sent.blocks = sent.bytes = 0
        started = time.perf_counter()
        status = original(*args, **kwargs)
        seconds = time.perf_counter() - started
        record = {"seconds": seconds, "blocks": sent.blocks, "bytes": sent.bytes, "status": int(status)}
        del sent.blocks, sent.bytes
        with open(path, "ab", buffering=0) as file:
            file.write(json.dumps(record).encode() + b"\n")
        return status

    HookRegistry.register(f"{_MANAGER}._transfer_data", count_blocks, HookType.AROUND)
    HookRegistry.register(f"{_MANAGER}.send_kvcache", log_chunk, HookType.AROUND)
