"""Chunk records of one request are found in a growing transfer log and added up."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from spectrumkv_sglang.launch.transfer_log_reader import TransferLogError, TransferLogReader, request_transfer
from spectrumkv_sglang.observability.reasons import Path as TransferPath
from spectrumkv_sglang.observability.reasons import Reason
from spectrumkv_sglang.observability.transfer_log import ChunkRecord, TokensByTier


def chunk(room: int, *, last: bool, path: TransferPath = TransferPath.TIERED) -> ChunkRecord:
    return ChunkRecord(
        time=0.0,
        room=room,
        path=path,
        reason=next(iter(Reason)),
        profile="spectrum",
        tokens=10,
        native_bytes=1000,
        wire_bytes=350,
        achieved_b=0.35,
        tokens_by_tier=TokensByTier(high=2, mid=3, low=5),
        writes=1,
        transfer_seconds=0.5,
        last_chunk=last,
    )


def append(path: Path, *records: ChunkRecord) -> None:
    with path.open("ab") as file:
        for record in records:
            file.write(msgspec.json.encode(record) + b"\n")


def test_requests_are_read_one_at_a_time(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    reader = TransferLogReader(log)
    append(log, chunk(1, last=False), chunk(1, last=True), chunk(2, last=True))
    assert [record.room for record in reader.next_request()] == [1, 1]
    assert [record.room for record in reader.next_request()] == [2]


def test_what_was_there_before_can_be_passed_over(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    reader = TransferLogReader(log)
    reader.skip()
    append(log, chunk(1, last=True))
    reader.skip()
    append(log, chunk(2, last=True))
    assert [record.room for record in reader.next_request()] == [2]


def test_chunks_of_a_request_are_added_up() -> None:
    total = request_transfer((chunk(1, last=False), chunk(1, last=True)))
    assert (total.native_bytes, total.wire_bytes, total.writes, total.transfer_seconds) == (2000, 700, 2, 1.0)
    assert total.tokens_by_tier == {"high": 4, "mid": 6, "low": 10}
    assert total.achieved_b == pytest.approx(0.35)
    assert total.path == "tiered"
    assert request_transfer((chunk(1, last=False), chunk(1, last=True, path=TransferPath.NATIVE))).path == "mixed"


def test_a_request_without_a_last_chunk_is_an_error(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    append(log, chunk(1, last=False))
    with pytest.raises(TransferLogError, match="no last chunk within 0 s after 1 chunks"):
        TransferLogReader(log).next_request(timeout_seconds=0.2)


def test_a_line_that_is_no_chunk_record_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"time": 1}\n')
    with pytest.raises(TransferLogError, match="not a chunk record"):
        TransferLogReader(log).next_request(timeout_seconds=0.2)
