"""What prefill takes from decode's word: what a decode rank can know, and text that is fit for a log."""

from __future__ import annotations

import pytest
from decode_process import counted
from prometheus_client import CollectorRegistry

from spectrumkv_sglang.observability.metrics import TransferMetrics
from spectrumkv_sglang.observability.reasons import FailureCause, Reason
from spectrumkv_sglang.transfer.decode_answers import failure, refusal
from spectrumkv_sglang.transfer.errors import ChunkFailedError, GoNativeError
from spectrumkv_sglang.transfer.messages import Failed, Refused

ENDS_ROOM = {"room_gone", "page_range", "other_request"}
SENDS_NATIVE = {"control_error", "geometry_mismatch", "tier_forbidden", "rotation_unknown", "pool_exhausted"}
REJECTS = {"bad_message", "checksum_mismatch", "stale_generation", "tier_undeclared", "unpack_failed"}
CODES = sorted({reason.value for reason in Reason} | {cause.value for cause in FailureCause} | {"of the future", ""})


@pytest.mark.parametrize("code", CODES)
def test_a_refused_open(code: str) -> None:
    """Another's code is no decision of ours: a controller would take `bypass` for its own and learn from it."""
    error = refusal(Refused(1, code, "why"))
    if code in ENDS_ROOM:
        assert isinstance(error, ChunkFailedError)
        assert error.cause.value == code
        return
    assert isinstance(error, GoNativeError)
    assert error.reason.value == (code if code in SENDS_NATIVE else "control_error")
    assert code in SENDS_NATIVE or code in str(error)
    assert str(error).endswith("why")


@pytest.mark.parametrize("code", CODES)
def test_a_refused_commit(code: str) -> None:
    registry = CollectorRegistry()
    error = failure(Failed(1, 0, code, "why"), TransferMetrics("prefill", 0, registry=registry))
    if code in ENDS_ROOM:
        assert isinstance(error, ChunkFailedError)
        assert error.cause.value == code
        assert counted(registry) == {}  # by who ends the room
        return
    assert isinstance(error, GoNativeError)
    assert error.reason is Reason.PAYLOAD_REJECTED
    assert counted(registry) == {code if code in REJECTS else "bad_message": 1}


@pytest.mark.parametrize("forged", ["\nERROR: all KV is lost", "\x1b[2J\u2028\r\0", "\U000e0001" * 1024, "x" * 2048])
def test_what_decode_writes_stays_on_its_line_of_the_log(forged: str) -> None:
    metrics = TransferMetrics("prefill", 0, registry=CollectorRegistry())
    for code in ("room_gone", "pool_exhausted", "checksum_mismatch", forged):
        for error in (refusal(Refused(1, code, forged)), failure(Failed(1, 0, code, forged), metrics)):
            assert str(error).isprintable()
            assert len(str(error)) < 2300
