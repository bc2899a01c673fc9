"""The shared secret of the control channel: who gets in, who does not, and where decode listens."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import torch
import zmq
from conftest import MakePrefill, MakeRank, MakeRaw
from decode_peer import GEOMETRY, PeerRank, eventually
from decode_process import HOST
from prefill_side import idle, next_room
from prometheus_client import CollectorRegistry

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.config_file import ConfigError
from spectrumkv_sglang.control_secret import read_control_secret
from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.observability.metrics import TransferMetrics
from spectrumkv_sglang.payload.codec import KVBuffers
from spectrumkv_sglang.transfer.control_keys import ControlKeys, KeyPair
from spectrumkv_sglang.transfer.decode_rank import DecodeRank
from spectrumkv_sglang.transfer.messages import Close, Refused, encode
from spectrumkv_sglang.transfer.pool_view import PoolView

pytestmark = pytest.mark.timeout(150)

SecretFile = Callable[[str], str]


@pytest.fixture
def secret_file(tmp_path: Path) -> SecretFile:
    """A file with a secret of 64 letters, named."""

    def make(letter: str) -> str:
        path = tmp_path / f"secret-{letter}"
        path.write_text(letter * 64 + "\n")
        path.chmod(0o600)
        return str(path)

    return make


def rejected(rank: PeerRank, kind: str) -> float:
    return rank.counters().get(kind, 0)


# ---- between two processes -------------------------------------------------------------------------------------------


def test_peers_with_one_secret_send_tiered(
    make_rank: MakeRank, make_prefill: MakePrefill, secret_file: SecretFile
) -> None:
    rank = make_rank(control_secret_file=secret_file("a"))
    source = make_prefill(control_secret_file=secret_file("a"))
    for _ in range(3):
        next_room(rank, source)
    assert rank.counters() == {}
    assert idle(rank)


@pytest.mark.parametrize(("decode_has", "prefill_has"), [("a", "b"), ("a", None), (None, "a")])
def test_another_secret_or_none_goes_native_at_once(
    make_rank: MakeRank,
    make_prefill: MakePrefill,
    secret_file: SecretFile,
    decode_has: str | None,
    prefill_has: str | None,
) -> None:
    rank = make_rank(control_secret_file=decode_has and secret_file(decode_has))
    source = make_prefill(control_secret_file=prefill_has and secret_file(prefill_has), open_timeout_s=60)
    rank.open_room(1, 10)
    outcome = source.send(rank, 1, source.some_pages(10))
    assert (outcome.code, outcome.went_native, outcome.reason) == (0, True, "secret_mismatch")
    assert outcome.failures == {}
    assert outcome.seconds < 30  # nobody waited for an answer
    assert source.engine.writes == []
    next_room(rank, make_prefill(control_secret_file=decode_has and secret_file(decode_has)))
    assert idle(rank)


@pytest.mark.parametrize("speaks", ["no curve", "another secret", "decode's public key alone"])
def test_a_peer_that_claims_the_secret_is_refused_and_counted(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw, secret_file: SecretFile, speaks: str
) -> None:
    """What it says is never read: a correct OPEN, over a connection that does not prove to hold the secret."""
    rank = make_rank(control_secret_file=secret_file("a"))
    source = make_prefill(control_secret_file=secret_file("a"))
    room_pages = rank.open_room(1, 10)
    ours, other = ControlKeys.from_secret(b"a" * 64), ControlKeys.from_secret(b"b" * 64)
    own = KeyPair(*zmq.curve_keypair())
    keys = {"no curve": None, "another secret": other, "decode's public key alone": replace(ours, prefill=own)}[speaks]
    raw = make_raw(source, rank, keys)
    raw.send_frames(encode(raw.opening(1, len(room_pages))))
    assert eventually(lambda: rejected(rank, "unauthenticated") > 0, True)
    assert not raw.answered(0.3)
    assert rank.state()["open_chunks"] == 0
    assert set(rank.counters()) == {"unauthenticated"}
    next_room(rank, source)
    assert idle(rank)


def test_a_prefill_whose_peer_only_claims_the_secret_goes_native(
    make_rank: MakeRank, make_prefill: MakePrefill, secret_file: SecretFile
) -> None:
    """Whoever repeats a handshake's key without the secret behind it never sees what prefill says."""
    rank = make_rank(control_secret_file=secret_file("b"))
    source = make_prefill(control_secret_file=secret_file("a"), open_timeout_s=0.5, slot_wait_s=0)
    rank.open_room(1, 10)
    liar = msgspec.structs.replace(rank.handshake, control_key=ControlKeys.from_secret(b"a" * 64).fingerprint)
    outcome = source.send(rank, 1, source.some_pages(10), peer=liar)
    assert (outcome.code, outcome.went_native, outcome.reason) == (0, True, "open_timeout")
    assert rejected(rank, "unauthenticated") > 0
    assert source.engine.writes == []


def test_a_peer_that_never_got_the_handshake_is_refused(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw
) -> None:
    """Also one that still knows a decode process which listened here before."""
    rank, source = make_rank(), make_prefill()
    raw = make_raw(source, rank)
    rank.open_room(1, 10)
    answer = raw.ask(raw.opening(1, 10, boot_id=rank.handshake.boot_id ^ 1))
    assert isinstance(answer, Refused)
    assert answer.code == "control_error"
    assert rank.counters() == {"unknown_peer": 1}
    outdated = msgspec.structs.replace(rank.handshake, boot_id=7)
    outcome = source.send(rank, 1, source.some_pages(10), peer=outdated)
    assert (outcome.code, outcome.went_native, outcome.reason) == (0, True, "control_error")
    assert idle(rank)
    next_room(rank, source)


def test_what_one_connection_said_means_nothing_on_another(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw, secret_file: SecretFile
) -> None:
    """A recorded message cannot be replayed even by a peer that holds the secret: chunks belong to a connection."""
    rank = make_rank(control_secret_file=secret_file("a"))
    source = make_prefill(control_secret_file=secret_file("a"))
    keys = ControlKeys.from_secret(b"a" * 64)
    first, second = make_raw(source, rank, keys), make_raw(source, rank, keys)
    pages = source.some_pages(8)
    rank.open_room(1, len(pages))
    [grant] = first.grants(1, len(pages))
    commit = first.land(grant, 1, pages)
    answer = second.ask(commit)
    assert type(answer).__name__ == "Failed"
    assert rank.is_untouched()
    assert type(first.ask(commit)).__name__ == "Done"
    second.send_frames(encode(Close(1, [grant.slot])))
    first.send_frames(encode(Close(1, [])))
    assert idle(rank)


def test_noise_on_the_port_is_refused(make_rank: MakeRank, make_prefill: MakePrefill, secret_file: SecretFile) -> None:
    rank = make_rank(control_secret_file=secret_file("a"))
    source = make_prefill(control_secret_file=secret_file("a"))
    host, port = urlsplit(rank.handshake.control_endpoint).netloc.split(":")
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\0\0\0", b"\xff" + b"\0" * 8 + b"\x7f\x03\0CURVE" + b"\xff" * 200):
        with socket.create_connection((host, int(port)), 5) as connection:
            connection.sendall(noise)
    next_room(rank, source)
    assert idle(rank)


# ---- the file --------------------------------------------------------------------------------------------------------


def test_white_space_around_the_secret_is_none_of_it(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"\n " + b"x" * 32 + b"\r\n")
    assert read_control_secret(path) == b"x" * 32


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "0 bytes"), (b"x" * 31 + b" " * 8, "31 bytes"), (b"x" * 4097, "more than 4096 bytes")]
)
def test_a_file_without_a_secret_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        read_control_secret(path)
    assert "openssl rand -hex 32" in str(caught.value)


def test_a_missing_file_and_an_endless_one(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "none", "No such file"), (tmp_path, "directory"), (Path("/dev/zero"), "more than")):
        with pytest.raises(ConfigError, match=said):
            read_control_secret(path)


def test_a_file_that_others_can_read_is_said_to_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"x" * 32)
    path.chmod(0o600)
    read_control_secret(path)
    assert caplog.records == []
    path.chmod(0o644)
    read_control_secret(path)
    assert f"chmod 600 {path}" in caplog.text


def test_keys_depend_on_the_secret_alone_and_are_not_shown() -> None:
    keys = ControlKeys.from_secret(b"a" * 64)
    assert keys == ControlKeys.from_secret(b"a" * 64)
    assert keys.fingerprint != ControlKeys.from_secret(b"b" * 64).fingerprint
    assert keys.decode != keys.prefill
    for pair in (keys.decode, keys.prefill):
        assert pair.private.decode() not in repr(keys)


# ---- the port --------------------------------------------------------------------------------------------------------


def decode_rank(engine: Any, rank: int, **config: Any) -> DecodeRank:
    buffers = KVBuffers(
        [torch.zeros(16, GEOMETRY.kv_heads, GEOMETRY.head_dim)] * GEOMETRY.layers,
        [torch.zeros(16, GEOMETRY.kv_heads, GEOMETRY.v_head_dim)] * GEOMETRY.layers,
    )
    return DecodeRank(
        view=PoolView(buffers, GEOMETRY, torch.device("cpu"), 16),
        config=SpectrumKVConfig(slot_bytes=65536, **config),
        engine=engine,
        host=HOST,
        metrics=TransferMetrics("decode", 0, registry=CollectorRegistry()),
        rank=rank,
    )


def _port(rank: DecodeRank) -> int:
    return int(rank.handshake.control_endpoint.rpartition(":")[2])


def free_ports(count: int) -> int:
    """First of ``count`` neighbouring ports that are free."""
    for first in range(21000, 29000, count):
        probes = []
        try:
            probes = [socket.create_server((HOST, first + number)) for number in range(count)]
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()
        return first
    raise AssertionError("no free ports")


def test_ranks_take_the_ports_that_they_are_given(engine: Any) -> None:
    first = free_ports(3)
    ranks = [decode_rank(engine, rank, control_port=f"{first}-{first + 2}") for rank in (1, 1, 5)]
    assert [_port(rank) for rank in ranks] == [first + 1, first + 2, first]
    with pytest.raises(SpectrumKVError, match=rf"no free port .* {first}-{first + 2}: give it a range"):
        decode_rank(engine, 0, control_port=f"{first}-{first + 2}")
    for rank in ranks:
        rank.close()
    again = decode_rank(engine, 0, control_port=first)  # a restarted server gets its port again, at once
    assert _port(again) == first
    again.close()


def test_a_bad_secret_stops_the_rank_and_leaves_nothing(engine: Any, tmp_path: Path) -> None:
    for _ in range(2):  # a landing region left registered would overlap the next
        with pytest.raises(ConfigError, match="control_secret_file"):
            decode_rank(engine, 0, control_secret_file=tmp_path / "none")
    decode_rank(engine, 0).close()
