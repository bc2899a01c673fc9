"""The transfer log: whole lines from many threads and processes; a log that cannot be written breaks no transfer."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path as FilePath

import msgspec
import pytest

from spectrumkv_sglang.observability.reasons import DecisionReason, Path, Reason
from spectrumkv_sglang.observability.transfer_log import ChunkRecord, TokensByTier, TransferLog, read_transfer_log


def record(room: int = 1, **changes: object) -> ChunkRecord:
    fields: dict[str, object] = {
        "time": 1764441600.25,
        "room": room,
        "path": Path.TIERED,
        "reason": Reason.TIERED,
        "profile": "spectrum",
        "tokens": 900,
        "native_bytes": 41_472_000,
        "wire_bytes": 22_800_000,
        "achieved_b": 0.5497,
        "tokens_by_tier": TokensByTier(high=100, mid=500, low=300),
        "writes": 2,
        "subchunks": 2,
        "transfer_seconds": 0.4,
        "pack_seconds": 0.1,
        "write_seconds": 0.2,
        "wait_seconds": 0.05,
        "last_chunk": True,
        "codec_saved_bytes": 0,
        "candidate": "balanced@0.3",
        "decision": DecisionReason.ENVELOPE,
    }
    return ChunkRecord(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_line_has_the_documented_fields(tmp_path: FilePath) -> None:
    log = TransferLog(str(tmp_path / "log"))
    assert log.write(record(room=2**63 - 1))
    log.close()
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert json.loads(line) == {
        "time": 1764441600.25,
        "room": 2**63 - 1,
        "path": "tiered",
        "reason": "tiered",
        "profile": "spectrum",
        "tokens": 900,
        "native_bytes": 41_472_000,
        "wire_bytes": 22_800_000,
        "achieved_b": 0.5497,
        "tokens_by_tier": {"high": 100, "mid": 500, "low": 300},
        "writes": 2,
        "subchunks": 2,
        "transfer_seconds": 0.4,
        "pack_seconds": 0.1,
        "write_seconds": 0.2,
        "wait_seconds": 0.05,
        "last_chunk": True,
        "codec_saved_bytes": 0,
        "candidate": "balanced@0.3",
        "decision": "envelope",
    }


@pytest.mark.parametrize("reason", list(Reason))
def test_reading_gives_back_what_was_written(tmp_path: FilePath, reason: Reason) -> None:
    written = record(path=reason.path, reason=reason)
    log = TransferLog(str(tmp_path / "log"))
    log.write(written)
    log.close()
    assert read_transfer_log(str(tmp_path / "log")) == [written]


def test_reading_refuses_a_line_that_is_no_record(tmp_path: FilePath) -> None:
    (tmp_path / "log").write_text('{"room": 1}\n')
    with pytest.raises(msgspec.DecodeError):
        read_transfer_log(str(tmp_path / "log"))


def test_a_restart_appends(tmp_path: FilePath) -> None:
    for room in (1, 2):
        log = TransferLog(str(tmp_path / "log"))
        log.write(record(room))
        log.close()
    assert [entry.room for entry in read_transfer_log(str(tmp_path / "log"))] == [1, 2]


def test_threads_write_whole_lines(tmp_path: FilePath) -> None:
    log = TransferLog(str(tmp_path / "log"))
    threads = [
        threading.Thread(target=lambda first=first: [log.write(record(first + i)) for i in range(100)])
        for first in (0, 100, 200, 300)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert sorted(entry.room for entry in read_transfer_log(str(tmp_path / "log"))) == list(range(400))


WRITE_MANY = """
import sys
from spectrumkv_sglang.observability.reasons import Path, Reason
from spectrumkv_sglang.observability.transfer_log import ChunkRecord, TransferLog
log = TransferLog(sys.argv[1])
for room in range(int(sys.argv[2]), int(sys.argv[2]) + 500):
    log.write(ChunkRecord(time=0.0, room=room, path=Path.NATIVE, reason=Reason.MLA, profile="p" * 300, tokens=1,
                          native_bytes=1, wire_bytes=1, achieved_b=1.0))
log.close()
"""


def test_processes_share_a_file(tmp_path: FilePath) -> None:
    log = str(tmp_path / "log")
    writers = [subprocess.Popen([sys.executable, "-c", WRITE_MANY, log, str(first)]) for first in (0, 500)]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    assert sorted(entry.room for entry in read_transfer_log(log)) == list(range(1000))


def test_a_full_disk_is_counted_and_mentioned_once(caplog: pytest.LogCaptureFixture) -> None:
    lost: list[None] = []
    log = TransferLog("/dev/full", on_error=lambda: lost.append(None))
    assert [log.write(record()) for _ in range(3)] == [False] * 3
    log.close()
    assert (log.lost_lines, len(lost)) == (3, 3)
    (message,) = caplog.messages
    assert "/dev/full" in message
    assert "No space left" in message
    assert "unset transfer_log" in message


@pytest.mark.parametrize("name", ["missing/log", "."])
def test_a_path_that_cannot_be_opened_breaks_nothing(tmp_path: FilePath, name: str) -> None:
    log = TransferLog(str(tmp_path / name))
    assert not log.write(record())
    log.close()
    assert log.lost_lines == 1


def test_writing_goes_on_when_the_directory_appears(tmp_path: FilePath) -> None:
    log = TransferLog(str(tmp_path / "later" / "log"))
    assert not log.write(record(1))
    (tmp_path / "later").mkdir()
    assert log.write(record(2))
    log.close()
    assert [entry.room for entry in read_transfer_log(log.path)] == [2]


def test_a_pipe_without_a_reader_does_not_block(tmp_path: FilePath) -> None:
    os.mkfifo(tmp_path / "pipe")
    log = TransferLog(str(tmp_path / "pipe"))
    assert not log.write(record())
    log.close()


def test_a_rotated_file_is_left_alone(tmp_path: FilePath) -> None:
    log = TransferLog(str(tmp_path / "log"))
    log.write(record(1))
    (tmp_path / "log").rename(tmp_path / "log.1")
    log.write(record(2))
    log.close()
    assert [entry.room for entry in read_transfer_log(str(tmp_path / "log.1"))] == [1]
    assert [entry.room for entry in read_transfer_log(str(tmp_path / "log"))] == [2]


def test_a_line_cut_by_a_full_disk_does_not_spoil_the_next(tmp_path: FilePath) -> None:
    log = TransferLog(str(tmp_path / "log"))
    log.write(record(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "log").stat().st_size + 50, hard))
    try:
        assert [log.write(record(2)), log.write(record(3))] == [False, False]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert log.write(record(4))
    log.close()
    whole = [line for line in (tmp_path / "log").read_bytes().splitlines() if line.endswith(b"}")]
    assert [msgspec.json.decode(line, type=ChunkRecord).room for line in whole] == [1, 4]
    assert log.lost_lines == 2


def test_close_ends_the_descriptor_and_later_writes(tmp_path: FilePath) -> None:
    before = len(os.listdir("/proc/self/fd"))
    log = TransferLog(str(tmp_path / "log"))
    log.write(record(1))
    log.close()
    log.close()
    assert not log.write(record(2))
    assert len(os.listdir("/proc/self/fd")) == before
    assert log.lost_lines == 0
