"""What decode's refusals mean for the chunk: it goes native, or its room fails.

Only what a decode rank can know of is taken from its word. Any other code of ours, such as those of prefill's own
decisions, would be counted and learned from as if it had happened here.
"""

from __future__ import annotations

from spectrumkv_sglang.observability.metrics import TransferMetrics
from spectrumkv_sglang.observability.reasons import FailureCause, Reason
from spectrumkv_sglang.transfer.errors import ChunkFailedError, GoNativeError, quoted
from spectrumkv_sglang.transfer.messages import Failed, Refused

_SENDS_NATIVE = {
    reason.value: reason
    for reason in (
        Reason.CONTROL_ERROR,
        Reason.GEOMETRY_MISMATCH,
        Reason.TIER_FORBIDDEN,
        Reason.ROTATION_UNKNOWN,
        Reason.POOL_EXHAUSTED,
    )
}
_ENDS_ROOM = {
    cause.value: cause for cause in (FailureCause.ROOM_GONE, FailureCause.PAGE_RANGE, FailureCause.OTHER_REQUEST)
}
_REJECTS_PAYLOAD = {
    cause.value: cause
    for cause in (
        FailureCause.BAD_MESSAGE,
        FailureCause.CHECKSUM_MISMATCH,
        FailureCause.STALE_GENERATION,
        FailureCause.TIER_UNDECLARED,
        FailureCause.UNPACK_FAILED,
    )
}


def refusal(answer: Refused) -> GoNativeError | ChunkFailedError:
    """What a refused OPEN means: a cause that ends the room, or a reason to go native."""
    if cause := _ENDS_ROOM.get(answer.code):
        return ChunkFailedError(cause, quoted(answer.message))
    if reason := _SENDS_NATIVE.get(answer.code):
        return GoNativeError(reason, f"decode refused the chunk: {quoted(answer.message)}")
    return GoNativeError(
        Reason.CONTROL_ERROR,
        f"decode refused the chunk by a code that is none of its own, {quoted(answer.code)}: {quoted(answer.message)}",
    )


def failure(answer: Failed, metrics: TransferMetrics) -> GoNativeError | ChunkFailedError:
    """What a refused COMMIT means. A payload that arrived broken is sent again natively while its room lives."""
    if cause := _ENDS_ROOM.get(answer.code):
        return ChunkFailedError(cause, quoted(answer.message))
    cause = _REJECTS_PAYLOAD.get(answer.code, FailureCause.BAD_MESSAGE)
    metrics.failure(cause)
    return GoNativeError(
        Reason.PAYLOAD_REJECTED, f"decode refused a payload ({quoted(answer.code)}): {quoted(answer.message)}"
    )
