"""The handshake frame: it survives the trip, garbage is refused, and a plain SGLang does not notice it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrumkv_sglang.payload.precision_table import MAX_TIERS
from spectrumkv_sglang.transfer.errors import ControlMessageError
from spectrumkv_sglang.transfer.handshake import (
    HANDSHAKE_FRAME_INDEX,
    MAGIC,
    REGISTRATION_MARK,
    Handshake,
    RegistrationSocket,
    append_handshake,
    decode_handshake,
    encode_handshake,
    split_handshake,
)
from spectrumkv_sglang.transfer.messages import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, seal_envelope

CPU_SHIMS = Path(__file__).parents[2] / "launch" / "cpu_shims"
COUNT = st.integers(1, 2**31 - 1)
HANDSHAKES = st.builds(
    Handshake,
    control_endpoint=st.from_regex(r"\Atcp://[0-9A-Za-z.:%_\-\[\]]{1,100}\Z"),
    boot_id=st.integers(0, 2**64 - 1),
    kv_dtype=st.from_regex(r"\A[a-z0-9_]{1,20}\Z"),
    layers=COUNT,
    kv_heads=COUNT,
    first_head=st.integers(0, 2**16 - 1),
    total_heads=st.just(0),
    head_dim=COUNT,
    v_head_dim=COUNT,
    page_size=COUNT,
    slot_bytes=st.integers(1, 2**64 - 1),
    landing_slots=COUNT,
    allowed_tiers=st.lists(st.integers(1, MAX_TIERS - 1), max_size=MAX_TIERS - 1).map([0].__add__),
    knows_rotation=st.booleans(),
    codecs=st.lists(st.text(max_size=16), max_size=8),
)
HANDSHAKE = Handshake(
    "tcp://10.0.0.7:50123", 2**63, "bfloat16", 30, 3, 3, 9, 64, 64, 16, 16 << 20, 8, [0, 1], True, "", ["zstd"]
)
FRAME = encode_handshake(HANDSHAKE)
FIELDS = msgspec.to_builtins(HANDSHAKE)
SGLANG_FRAMES = st.lists(st.binary(max_size=12), max_size=HANDSHAKE_FRAME_INDEX)


def frame_of(fields: Any) -> bytes:
    return seal_envelope(MAGIC, msgspec.msgpack.encode(fields))


@given(handshake=HANDSHAKES)
@settings(max_examples=100, deadline=None)
def test_a_handshake_round_trips(handshake: Handshake) -> None:
    assert decode_handshake(encode_handshake(handshake)) == handshake


def test_every_truncation_and_any_trailing_byte_is_refused() -> None:
    for end in range(len(FRAME)):
        with pytest.raises(ControlMessageError):
            decode_handshake(FRAME[:end])
    with pytest.raises(ControlMessageError):
        decode_handshake(FRAME + b"\0")
    with pytest.raises(ControlMessageError, match="exceeds the limit"):
        decode_handshake(FRAME + b"\0" * MAX_MESSAGE_BYTES)


def test_another_magic_or_version_is_refused_with_advice() -> None:
    with pytest.raises(ControlMessageError, match="expected magic b'SKVH', got b'SKVC'"):
        decode_handshake(b"SKVC" + FRAME[4:])
    newer = FRAME[:4] + (PROTOCOL_VERSION + 1).to_bytes(2, "little") + FRAME[6:]
    with pytest.raises(ControlMessageError, match="install the same spectrumkv-sglang version on both sides"):
        decode_handshake(newer)


@given(garbage=st.binary(max_size=300), sealed=st.booleans())
@settings(max_examples=200, deadline=None)
def test_garbage_is_refused(garbage: bytes, sealed: bool) -> None:
    with pytest.raises(ControlMessageError):
        decode_handshake(seal_envelope(MAGIC, garbage) if sealed else garbage)


@given(position=st.integers(0, len(FRAME) - 1), byte=st.integers(0, 255))
@settings(max_examples=300, deadline=None)
def test_a_damaged_frame_is_a_handshake_or_refused(position: int, byte: int) -> None:
    try:
        damaged = decode_handshake(FRAME[:position] + bytes([byte]) + FRAME[position + 1 :])
    except ControlMessageError:
        return
    assert isinstance(damaged, Handshake)


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_missing_fields_are_refused(name: str) -> None:
    with pytest.raises(ControlMessageError):
        decode_handshake(frame_of({other: value for other, value in FIELDS.items() if other != name}))


@pytest.mark.parametrize(
    "change",
    [
        {"compression": "zstd"},
        {"control_endpoint": "ipc://control"},
        {"control_endpoint": "10.0.0.7:1"},
        {"control_endpoint": "tcp://" + "x" * 600},
        {"control_endpoint": "tcp://10.0.0.7:1\n"},
        {"control_endpoint": "tcp://10.0.0.7:1 (trust me)"},
        {"control_endpoint": "tcp://10.0.0.7:1\0"},
        {"control_endpoint": "tcp://10.0.0.9:0;10.0.0.7:1"},
        {"kv_dtype": "bfloat16\n"},
        {"kv_dtype": ""},
        {"boot_id": -1},
        {"layers": 0},
        {"kv_heads": -1},
        {"head_dim": 2**31},
        {"v_head_dim": 1.5},
        {"page_size": None},
        {"slot_bytes": 0},
        {"landing_slots": "8"},
        {"allowed_tiers": []},
        {"allowed_tiers": [1, 2]},
        {"allowed_tiers": [0, MAX_TIERS]},
        {"allowed_tiers": [0] * (MAX_TIERS + 1)},
        {"allowed_tiers": "high"},
        {"kv_dtype": 7},
        {"layers": [[]] * 3},
    ],
)
def test_unknown_and_impossible_fields_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ControlMessageError):
        decode_handshake(frame_of({**FIELDS, **change}))


@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * 100_000 + b"\x90",
        b"\x81\xa6layers" + b"\x91" * 100_000 + b"\x90",
        b"\x81\xa1a" * 100_000 + b"\xc0",
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa8kv_dtype\xa2\xff\xff",
        b"\xc1",
    ],
)
def test_hostile_msgpack_is_refused(body: bytes) -> None:
    with pytest.raises(ControlMessageError):
        decode_handshake(seal_envelope(MAGIC, body))


# ---- the registration message ----------------------------------------------------------------------------------------


def without_trailing_empties(frames: list[bytes]) -> list[bytes]:
    end = len(frames)
    while end and frames[end - 1] == b"":
        end -= 1
    return frames[:end]


@given(frames=SGLANG_FRAMES)
@settings(max_examples=200, deadline=None)
def test_any_registration_keeps_its_frames(frames: list[bytes]) -> None:
    message = append_handshake(frames, FRAME)
    assert message[: len(frames)] == frames
    assert set(message[len(frames) : -1]) <= {b""}
    assert (len(message), message[-1]) == (HANDSHAKE_FRAME_INDEX + 1, FRAME)
    assert split_handshake(message) == (without_trailing_empties(frames), FRAME)


@given(frames=SGLANG_FRAMES)
@settings(max_examples=100, deadline=None)
def test_a_registration_without_handshake_is_left_alone(frames: list[bytes]) -> None:
    assert split_handshake(frames) == (frames, None)


def test_other_messages_of_the_same_length_are_left_alone() -> None:
    for last in (b"", b"SKV", b"something else", b"XSKVH"):
        frames = [b"x"] * HANDSHAKE_FRAME_INDEX + [last]
        assert split_handshake(frames) == (frames, None)
    longer = [*append_handshake([b"x"], FRAME), b"x"]
    assert split_handshake(longer) == (longer, None)


def test_a_registration_that_outgrew_the_gap_is_refused() -> None:
    with pytest.raises(ControlMessageError, match="49 frames, expected at most 48"):
        append_handshake([b"x"] * 49, FRAME)


class RecordingSocket:
    """Stands for SGLang's PUSH socket."""

    def __init__(self) -> None:
        self.sent: list[tuple[list[bytes], tuple[object, ...]]] = []
        self.last_endpoint = b"tcp://10.0.0.1:1"

    def send_multipart(self, frames: list[bytes], *flags: object) -> str:
        self.sent.append((frames, flags))
        return "sent"


def test_only_registrations_carry_the_handshake() -> None:
    plain = RecordingSocket()
    socket = RegistrationSocket(plain, FRAME)
    registration = [REGISTRATION_MARK, b"10.0.0.7", b""]
    assert socket.send_multipart(registration) == "sent"
    assert socket.send_multipart([b"123", b"None"], 1) == "sent"
    assert socket.send_multipart([]) == "sent"
    assert plain.sent == [(append_handshake(registration, FRAME), ()), ([b"123", b"None"], (1,)), ([], ())]
    assert registration == [REGISTRATION_MARK, b"10.0.0.7", b""]  # SGLang's list is its own
    assert socket.last_endpoint == b"tcp://10.0.0.1:1"


SGLANG_PARSES = """
import json, struct, sys
from sglang.srt.disaggregation.common.utils import pack_int_lists
from sglang.srt.disaggregation.mooncake.conn import KVArgsRegisterInfo

required = [
    b"None", b"10.0.0.7", b"20001", b"10.0.0.7:15001", struct.pack("60Q", *range(60)), struct.pack("2Q", 8, 9),
    pack_int_lists([[1, 2], [3]], "Q"), b"0", b"1", b"3072",
]
optional = [
    pack_int_lists([[1], [2, 3]], "I"), pack_int_lists([[4]], "I"), struct.pack("3I", 0, 1, 2),
    pack_int_lists([[0], [1]], "I"), b"", b"", b"2", b"1", b"",
]
empty = [pack_int_lists([], "I"), pack_int_lists([], "I")] + [b""] * 7
messages = [required, required + optional, required + empty]
messages += [required + optional[:count] for count in range(1, len(optional))]
print(json.dumps([[frame.hex() for frame in message] for message in messages]), flush=True)
for line in sys.stdin:
    print(repr(KVArgsRegisterInfo.from_zmq([bytes.fromhex(frame) for frame in json.loads(line)])), flush=True)
"""


def test_the_installed_sglang_reads_the_same_registration_with_and_without_handshake(tmp_path: Path) -> None:
    """As a plain prefill reads it, with the gap, and as ours does, after the split."""
    with (tmp_path / "log").open("wb") as log:
        sglang = subprocess.Popen(
            [sys.executable, "-c", SGLANG_PARSES],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": str(CPU_SHIMS), "OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1"},
        )
    assert sglang.stdin is not None
    assert sglang.stdout is not None
    with sglang, sglang.stdin, sglang.stdout:
        answer = sglang.stdout.readline()
        assert answer, (tmp_path / "log").read_text()[-3000:]
        messages = [[bytes.fromhex(frame) for frame in message] for message in json.loads(answer)]

        def parsed(frames: list[bytes]) -> str:
            sglang.stdin.write(json.dumps([frame.hex() for frame in frames]) + "\n")  # type: ignore[union-attr]
            sglang.stdin.flush()  # type: ignore[union-attr]
            return sglang.stdout.readline()  # type: ignore[union-attr]

        for frames in messages:
            plain = parsed(frames)
            assert plain.startswith("KVArgsRegisterInfo("), (tmp_path / "log").read_text()[-3000:]
            with_handshake = append_handshake(frames, FRAME)
            assert parsed(with_handshake) == plain
            own, handshake = split_handshake(with_handshake)
            assert parsed(own) == plain
            assert handshake == FRAME
        assert parsed(messages[0]) != parsed(messages[1])  # the comparison can fail
        sglang.stdin.close()
        assert sglang.wait(90) == 0
