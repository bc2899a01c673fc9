"""Whether compressing a payload pays: seconds that the link saves against seconds that the codec takes.

A byte costs 1 / B on a link of B bytes a second. A codec that leaves the share r of it, at C bytes a second in and D
bytes a second out, pays where ``(1 - r) / B > 1 / C + 1 / D``: as if nothing overlapped, since a payload that is
compressed holds up the one behind it. r, C and D are measured on samples of the payloads themselves, now and then, and
r and C on whole payloads while the codec works.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

import torch

from spectrumkv_sglang.lossless.codec import LosslessCodec
from spectrumkv_sglang.observability.reasons import CodecOutcome

SAMPLE_PIECES = 4
SAMPLE_PIECE_BYTES = 64 * 1024
ELEMENT_BYTES = 4
"""Pieces begin at a multiple of it: between two bytes of an element they would look like another payload."""
JUDGED_BETWEEN_SAMPLES = 64
"""Payloads of one kind for which a sample holds."""
MOST_RATIO = 0.98
"""What takes off less is not worth a second look at the payload."""
WEIGHT = 0.3
_MOST_KINDS = 256


@dataclass(frozen=True)
class Estimate:
    """What a codec does to one kind of payload.

    Attributes:
        ratio: bytes out / bytes in.
        compress: bytes a second in.
        decompress: bytes a second out.
    """

    ratio: float
    compress: float
    decompress: float

    def break_even(self) -> float:
        """Goodput of the link, bytes a second, below which compressing pays; 0 where it never does."""
        return max(0.0, 1 - self.ratio) / (1 / self.compress + 1 / self.decompress)


@dataclass
class _Kind:
    estimate: Estimate
    judged: int = 0


class Worth:
    """Judges payloads of one codec by kind; thread-safe.

    Args:
        codec: that would work on them.
    """

    def __init__(self, codec: LosslessCodec) -> None:
        self._codec = codec
        self._kinds: OrderedDict[int, _Kind] = OrderedDict()
        self._lock = threading.Lock()

    def judge(self, kind: int, payload: torch.Tensor, link: float | None) -> CodecOutcome | None:
        """Why not to compress ``payload``; None: it pays.

        Args:
            kind: payloads of one kind compress alike: the digest of their precision table.
            payload: uint8, packed.
            link: goodput in bytes a second; None: not known.
        """
        if link is None:
            return CodecOutcome.LINK_UNKNOWN
        with self._lock:
            known = self._kinds.get(kind)
            if known is not None and known.judged < JUDGED_BETWEEN_SAMPLES:
                known.judged += 1
                return _verdict(known.estimate, link)
        estimate = measure(self._codec, payload)
        with self._lock:
            self._kinds[kind] = _Kind(estimate)
            self._kinds.move_to_end(kind)
            while len(self._kinds) > _MOST_KINDS:
                self._kinds.popitem(last=False)
        return _verdict(estimate, link)

    def compressed(self, kind: int, size: int, left: int, seconds: float) -> None:
        """A whole payload of ``size`` bytes became ``left`` bytes in ``seconds``."""
        with self._lock:
            known = self._kinds.get(kind)
            if known is None or seconds <= 0:
                return
            before = known.estimate
            known.estimate = Estimate(
                before.ratio + WEIGHT * (left / size - before.ratio),
                before.compress * (size / seconds / before.compress) ** WEIGHT,
                before.decompress,
            )

    def estimate(self, kind: int) -> Estimate | None:
        """What is known of a kind of payload."""
        with self._lock:
            known = self._kinds.get(kind)
            return known.estimate if known is not None else None


def measure(codec: LosslessCodec, payload: torch.Tensor) -> Estimate:
    """Try ``codec`` on pieces from all over ``payload``."""
    if payload.numel() <= SAMPLE_PIECES * SAMPLE_PIECE_BYTES:
        sample = payload.clone()
    else:  # pieces that overlap would look alike
        last = payload.numel() - SAMPLE_PIECE_BYTES
        starts = [last * place // (SAMPLE_PIECES - 1) for place in range(SAMPLE_PIECES)]
        starts = [start - start % ELEMENT_BYTES for start in starts]
        sample = torch.cat([payload[start : start + SAMPLE_PIECE_BYTES] for start in starts])
    out = torch.empty(sample.numel() + sample.numel() // 64 + 4096, dtype=torch.uint8, device=payload.device)
    started = time.perf_counter()
    left = codec.compress(sample, out)
    between = time.perf_counter()
    if left is None:
        return Estimate(1.0, sample.numel() / (between - started), float("inf"))
    codec.decompress(out[:left], sample)
    ended = time.perf_counter()
    return Estimate(left / sample.numel(), sample.numel() / (between - started), sample.numel() / (ended - between))


def _verdict(estimate: Estimate, link: float) -> CodecOutcome | None:
    if estimate.ratio > MOST_RATIO:
        return CodecOutcome.NO_GAIN
    return None if link < estimate.break_even() else CodecOutcome.LINK_FAST
