"""What decode's refusals mean for the chunk: it goes native, or its room fails."""

from __future__ import annotations

from spectrumkv_sglang.observability.metrics import TransferMetrics
from spectrumkv_sglang.observability.reasons import FailureCause, Reason
from spectrumkv_sglang.transfer.errors import ChunkFailedError, GoNativeError
from spectrumkv_sglang.transfer.messages import Failed, Refused


def refusal(answer: Refused) -> GoNativeError | ChunkFailedError:
    """What a refused OPEN means: a cause that ends the room, or a reason to go native."""
    if answer.code in {cause.value for cause in FailureCause}:
        return ChunkFailedError(FailureCause(answer.code), answer.message)
    reasons = {reason.value for reason in Reason}
    reason = Reason(answer.code) if answer.code in reasons else Reason.CONTROL_ERROR
    return GoNativeError(reason, f"decode refused the chunk: {answer.message}")


def failure(answer: Failed, metrics: TransferMetrics) -> GoNativeError | ChunkFailedError:
    """What a refused COMMIT means. A payload that arrived broken is sent again natively while its room lives."""
    causes = {cause.value for cause in FailureCause}
    cause = FailureCause(answer.code) if answer.code in causes else FailureCause.BAD_MESSAGE
    if cause in (FailureCause.ROOM_GONE, FailureCause.PAGE_RANGE):
        return ChunkFailedError(cause, answer.message)
    metrics.failure(cause)
    return GoNativeError(Reason.PAYLOAD_REJECTED, f"decode refused a payload ({cause.value}): {answer.message}")
