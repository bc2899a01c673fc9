"""An SGLang plugin that makes a server fail at a chosen stage of a transfer; no part of the package.

It does nothing unless `FOLDER_VARIABLE` names a folder. There the benchmark puts a file `arm` with a stage and an
action; the first transfer that comes to the stage takes the file away and acts: ``kill`` (SIGKILL to the scheduler
itself), ``stop`` (SIGSTOP), or what happens to the control message of that stage: ``drop`` (it is lost), ``twice`` (it
comes a second time) or ``late`` (by `LATE_SECONDS`, which delays its thread too). For `faults.py` and `soak.py`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "BENCHMARK_FAULT_FOLDER"
LATE_SECONDS = 1.0
_TRANSFER = "spectrumkv_sglang.transfer"

PREFILL_STAGES = ("before OPEN", "mid pack", "mid write", "before COMMIT", "after DONE")
DECODE_STAGES = ("before GRANT", "mid unpack", "after DONE")

Around = Callable[..., Any]


def reached(stage: str) -> str:
    """Act if ``stage`` is armed in this process; returns what is to happen to its message, or ""."""
    order = Path(os.environ[FOLDER_VARIABLE], "arm")
    try:
        wanted, action = order.read_text(encoding="utf-8").split("\n")
        if wanted != stage:
            return ""
        order.rename(order.with_name("fired"))  # of two threads one gets here
    except (FileNotFoundError, ValueError):
        return ""
    if action in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)
        return ""
    return action


def delivered(action: str, send: Callable[[], Any]) -> Any:
    """Deliver a message as ``action`` says."""
    if action == "drop":
        return None
    if action == "late":
        time.sleep(LATE_SECONDS)
    result = send()
    if action == "twice":
        send()
    return result


def before(stage: str) -> Around:
    """A hook that reaches ``stage`` before what it is put around."""

    def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return delivered(reached(stage), lambda: original(*args, **kwargs))

    return hook


def after(stage: str) -> Around:
    """A hook that reaches ``stage`` after what it is put around."""

    def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        reached(stage)
        return result

    return hook


def _sending(original: Callable[..., Any], channel: Any, message: Any, *args: Any, **kwargs: Any) -> Any:
    stage = {"Open": "before OPEN", "Commit": "before COMMIT"}.get(type(message).__name__)
    action = reached(stage) if stage is not None else ""
    return delivered(action, lambda: original(channel, message, *args, **kwargs))


def _replying(original: Callable[..., Any], server: Any, key: Any, message: Any, *args: Any, **kwargs: Any) -> Any:
    done = type(message).__name__ == "Done"
    action = reached("before DONE") if done else ""
    result = delivered(action, lambda: original(server, key, message, *args, **kwargs))
    if done and action != "drop":
        reached("after DONE")
    return result


def register() -> None:
    """Called by SGLang in each of its processes; hooks go into the scheduler's."""
    if not os.environ.get(FOLDER_VARIABLE) or not os.environ.get("SPECTRUMKV_ACTIVE"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks: dict[str, Around] = {
        "chunk_sender.ChunkSender._queue_pack": after("mid pack"),
        "mooncake_writes.MooncakeWrites.submit": after("mid write"),
        "control_channel.ControlChannel.send": _sending,
        "chunk_sender.ChunkSender._take_answer": after("after DONE"),
        "landing_server.LandingServer._on_open": before("before GRANT"),
        "landing_server.LandingServer._unpack": before("mid unpack"),
        "landing_server.LandingServer._reply": _replying,
    }
    role = os.environ.get("BENCHMARK_FAULT_ROLE", "")
    for target, hook in hooks.items():
        if target.startswith("landing_server") == (role == "decode"):
            HookRegistry.register(f"{_TRANSFER}.{target}", hook, HookType.AROUND)
