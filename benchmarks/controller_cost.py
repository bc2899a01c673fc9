"""What the controller costs a room on its way through prefill, in CPU time: python benchmarks/controller_cost.py

A room is expected, decided, sent and learnt from by the code that serves, and bypasses, since every codec is far slower
than the link; only the sending itself takes no time. CPU time of the thread: other processes on the machine hardly
change it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any, cast

from prometheus_client import CollectorRegistry

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.observability.metrics import TransferMetrics
from spectrumkv_sglang.observability.reasons import Reason
from spectrumkv_sglang.transfer.errors import GoNativeError
from spectrumkv_sglang.transfer.handshake import Handshake
from spectrumkv_sglang.transfer.room_decisions import RoomDecisions
from spectrumkv_sglang.transfer.sending_policy import ServedCandidates
from spectrumkv_sglang.tuning.frontier import Candidate
from spectrumkv_sglang.tuning.settings import ControllerSettings

PEER = Handshake(
    control_endpoint="tcp://10.0.0.2:5000",
    boot_id=1,
    kv_dtype="bfloat16",
    layers=32,
    kv_heads=8,
    first_head=0,
    total_heads=8,
    head_dim=128,
    v_head_dim=128,
    page_size=1,
    slot_bytes=16 * 1024 * 1024,
    landing_slots=16,
    allowed_tiers=[0, 1, 2],
    knows_rotation=True,
    control_key="",
    codecs=[],
)
SESSION, NATIVE_BYTES = "10.0.0.2:15000", 1e6
CODEC_SPEED = 1e3


def seconds_per_room(rooms: int) -> list[float]:
    """CPU seconds of each of ``rooms`` rooms that bypass, after some that taught the controller."""
    settings = ControllerSettings(enabled=True, explore=0.0)
    candidates = tuple(Candidate(c.label, c.budget, c.kl, CODEC_SPEED) for c in settings.candidates)
    served = ServedCandidates(candidates, candidates[1], {})
    decisions = RoomDecisions(
        served,
        settings,
        cast(Any, None),  # only tables of policies would need it
        min_tokens=64,
        metrics=TransferMetrics("prefill", 0, registry=CollectorRegistry()),
    )
    for _ in range(4):
        decisions.controller.link_sample(SESSION, 64e6, 64e6 / 1e9, False)
    found = []
    for room in range(rooms):
        began = time.thread_time()
        request = decisions.expect(room, None)
        decision = decisions.decide(request, SESSION, PEER, prompt_tokens=8192, native_bytes=int(NATIVE_BYTES))
        with decisions.sending(request, SESSION, last=True) as cost:
            try:
                decisions.require_tiered(decision)
                raise SpectrumKVError(f"the room does not bypass: {decision}")
            except GoNativeError as bypassed:
                if bypassed.reason is not Reason.BYPASS:
                    raise
            with decisions.timed_native(SESSION, int(NATIVE_BYTES)) as timing:
                timing.succeeded = True
            cost.as_decided, cost.seconds = True, timing.seconds  # known once the block has ended
            cost.native_bytes = cost.wire_bytes = NATIVE_BYTES
        found.append(time.thread_time() - began)
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python benchmarks/controller_cost.py", description="CPU time of a room.")
    parser.add_argument("--rooms", type=int, default=5000)
    found = seconds_per_room(parser.parse_args().rooms)
    p99 = statistics.quantiles(found, n=100)[98]
    print(f"{len(found)} rooms: median {statistics.median(found) * 1e6:.0f} us, 99 % {p99 * 1e6:.0f} us of CPU time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
