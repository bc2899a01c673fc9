"""The lossless stage: between packing and writing on prefill, between landing and unpacking on decode.

A payload is packed into its staging slot as always, and compressed there where that pays; what is written is shorter
then, and COMMIT says by which codec and how short. Checksum and prologue are those of the payload as it was packed, so
whatever goes wrong in between is found by the checks that there are.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from spectrumkv_sglang.lossless.codec import LosslessCodec, installed_codecs
from spectrumkv_sglang.lossless.worth import Worth
from spectrumkv_sglang.observability.metrics import TransferMetrics
from spectrumkv_sglang.observability.once import log_once
from spectrumkv_sglang.observability.reasons import CodecOutcome, FailureCause
from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.transfer.errors import ChunkFailedError
from spectrumkv_sglang.transfer.messages import Commit
from spectrumkv_sglang.transfer.slot_memory import Placement, SlotMemory
from spectrumkv_sglang.tuning.bandwidth import LinkClock
from spectrumkv_sglang.tuning.peer_links import PeerLinks

logger = logging.getLogger(__name__)


class Stored(NamedTuple):
    """How a payload lies in a slot.

    Attributes:
        length: bytes that are written.
        codec: that made them; "": they are the payload itself.
    """

    length: int
    codec: str = ""


class Compressing:
    """Prefill's side. Threads may share it.

    Args:
        codec: the configured one.
        memory: staging slots.

    Attributes:
        clock: to be told of every write, by session: what the codec is worth depends on the link.
    """

    def __init__(self, codec: LosslessCodec, memory: SlotMemory, metrics: TransferMetrics) -> None:
        self._codec, self._memory, self._metrics = codec, memory, metrics
        self._links = PeerLinks()
        self.clock = LinkClock(self._links.sample)
        self._worth = Worth(codec)

    def shrink(self, slot: int, length: int, kind: int, session: str, peer_codecs: Sequence[str]) -> Stored:
        """Compress the packed payload of ``length`` bytes in ``slot``, in its place, if that pays.

        Args:
            kind: digest of the payload's precision table.
            session: Mooncake's name of the peer.
            peer_codecs: those that its handshake names.
        """
        payload = self._memory.view(slot, length)
        left: int | None = None
        try:
            outcome = self._why_not(payload, kind, session, peer_codecs)
            if outcome is None:
                left = self._compressed(payload, kind)
                outcome = CodecOutcome.NO_GAIN if left is None else CodecOutcome.COMPRESSED
        except Exception:  # no codec touches the slot before it has the whole result
            logger.exception("codec %s failed", self._codec.name.value)
            outcome = CodecOutcome.FAILED
        if outcome is not CodecOutcome.COMPRESSED:
            name = self._codec.name.value
            log_once(
                logger,
                logging.INFO,
                f"codec-{outcome.value}",
                f"payloads to {session} travel without codec {name}: {outcome.meaning}",
            )
        self._metrics.codec(outcome, length, length if left is None else left)
        return Stored(length) if left is None else Stored(left, self._codec.name.value)

    def _compressed(self, payload: torch.Tensor, kind: int) -> int | None:
        started = time.perf_counter()
        left = self._codec.compress(payload, payload)
        seconds = time.perf_counter() - started
        self._worth.compressed(kind, payload.numel(), payload.numel() if left is None else left, seconds)
        self._metrics.codec_seconds(seconds)
        return left

    def _why_not(
        self, payload: torch.Tensor, kind: int, session: str, peer_codecs: Sequence[str]
    ) -> CodecOutcome | None:
        if not _works_in(self._codec, self._memory):
            return CodecOutcome.WRONG_MEMORY
        if self._codec.name.value not in peer_codecs:
            return CodecOutcome.PEER_LACKS_CODEC
        return self._worth.judge(kind, payload, self._links.estimate(session))


class Restoring:
    """Decode's side. Threads may share it.

    Attributes:
        codecs: names of those that can be brought back here.
    """

    def __init__(self, memory: SlotMemory) -> None:
        self._memory = memory
        self._codecs = {name: codec for name, codec in installed_codecs().items() if _works_in(codec, memory)}
        self.codecs = tuple(self._codecs)
        self._per_thread = threading.local()

    def payload(self, commit: Commit) -> torch.Tensor:
        """The payload that ``commit`` announces, uint8 [commit.length] where unpack kernels can read it.

        Raises:
            ChunkFailedError: it is not compressed as announced, or does not fit a slot.
        """
        if not commit.codec:
            return self._memory.load_from_slot(commit.slot, commit.length)
        codec = self._codecs.get(commit.codec)
        if codec is None or not 0 < commit.stored <= self._memory.slot_bytes:
            raise ChunkFailedError(
                FailureCause.BAD_MESSAGE,
                f"{commit.stored} bytes of codec {commit.codec!r} announced, expected at most "
                f"{self._memory.slot_bytes} of one of {list(self.codecs)}",
            )
        out = self._scratch(commit.length)
        try:
            codec.decompress(self._memory.view(commit.slot, commit.stored), out)
        except PayloadError as error:
            raise ChunkFailedError(FailureCause.CHECKSUM_MISMATCH, f"slot {commit.slot}: {error}") from error
        if self._memory.placement is not Placement.pinned:
            return out
        work = self._memory.work_area(commit.slot, commit.length)
        work.copy_(out, non_blocking=True)
        return work

    def _scratch(self, length: int) -> torch.Tensor:
        scratch = getattr(self._per_thread, "scratch", None)
        if scratch is None:
            pinned = self._memory.placement is Placement.pinned
            scratch = torch.empty(self._memory.slot_bytes, dtype=torch.uint8, pin_memory=pinned)
            self._per_thread.scratch = scratch
        return scratch[:length]


def _works_in(codec: LosslessCodec, memory: SlotMemory) -> bool:
    return codec.on_device == (memory.placement is Placement.device)
