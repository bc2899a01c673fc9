"""Every parser takes any input: it gives what it says it gives, or the one error that it names, and nothing worse.

A fixed number of cases each, from three sources: noise, valid inputs with damage, and values of the wrong kind in the
right places. What comes over the network is parsed from bytes; what operators write, from YAML files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spectrumkv_sglang.config import ConfigError, SpectrumKVConfig, load_config
from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.launch_config import LaunchConfig, LaunchConfigError, read_launch_config
from spectrumkv_sglang.observability.transfer_log import ChunkRecord
from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.payload.prologue import PROLOGUE_BYTES, Prologue, decode_prologue, encode_prologue
from spectrumkv_sglang.payload.tier_map import decode_tier_map, encode_tier_map
from spectrumkv_sglang.profiles.errors import ProfileError
from spectrumkv_sglang.profiles.profile import Profile, load_profile, shipped_profiles
from spectrumkv_sglang.strict_yaml import MOST_FILE_BYTES
from spectrumkv_sglang.transfer.errors import ControlMessageError
from spectrumkv_sglang.transfer.handshake import Handshake, decode_handshake, encode_handshake, split_handshake
from spectrumkv_sglang.transfer.messages import (
    Close,
    Commit,
    DecodeMessage,
    Done,
    Failed,
    Granted,
    Open,
    PrefillMessage,
    Refused,
    SlotGrant,
    decode_from_decode,
    decode_from_prefill,
    encode,
)
from spectrumkv_sglang.tuning.request_limits import RequestLimits, read_limits

pytestmark = pytest.mark.timeout(120)

CASES = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FILE_CASES = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

GEOMETRY = KVGeometry(layers=3, kv_heads=2, head_dim=64, v_head_dim=64, page_size=1, dtype="bfloat16")
TIERS = np.array([0, 1, 2, 2, 1, 0, 0, 2, 1], dtype=np.uint8)
TABLE = load_profile("spectrum").table(GEOMETRY)

Parser = Callable[[bytes], Any]
# Name, parser, the one error that it may raise, type of what it gives, valid inputs.
WIRE: list[tuple[str, Parser, type[SpectrumKVError], Any, list[bytes]]] = [
    (
        "messages of prefill",
        decode_from_prefill,
        ControlMessageError,
        PrefillMessage,
        [
            encode(Open(1, 2, 3, 7, 4, 5, 6, 0, 2, TABLE.to_bytes(), [0, 1, 2], 4, 1.0)),
            encode(Commit(1, 2, 3, 4, 5, 9, 7, [3, 3, 3], encode_tier_map(TIERS, 3), 4096, 2**63, "zstd", 99)),
            encode(Close(1, [0, 7])),
        ],
    ),
    (
        "messages of decode",
        decode_from_decode,
        ControlMessageError,
        DecodeMessage,
        [
            encode(Granted(1, [SlotGrant(0, 1, 2**47)], 4096)),
            encode(Refused(1, "room_gone", "closed")),
            encode(Done(1, 2, 3, 4, 0.5)),
            encode(Failed(1, 2, "checksum_mismatch", "slot 3")),
        ],
    ),
    (
        "handshake",
        decode_handshake,
        ControlMessageError,
        Handshake,
        [
            encode_handshake(
                Handshake(
                    "tcp://10.0.0.7:1", 5, "bfloat16", 3, 2, 2, 4, 64, 64, 1, 65536, 4, [0, 1, 2], True, "k", ["zstd"]
                )
            )
        ],
    ),
    (
        "prologue",
        decode_prologue,
        PayloadError,
        Prologue,
        [encode_prologue(Prologue(1, 2, 3, 4, (3, 3, 3), 4096, GEOMETRY.digest(), TABLE.digest()))],
    ),
    (
        "tier map",
        lambda data: decode_tier_map(data, len(TIERS), 3),
        PayloadError,
        np.ndarray,
        [encode_tier_map(TIERS, 3)],
    ),
    (
        "precision table",
        lambda data: PrecisionTable.from_bytes(data, GEOMETRY),
        PayloadError,
        PrecisionTable,
        [TABLE.to_bytes(), load_profile("balanced").table(GEOMETRY).to_bytes()],
    ),
]
EACH_WIRE = pytest.mark.parametrize("what", WIRE, ids=[name for name, *_ in WIRE])


def damaged(data: st.DataObject, valid: bytes) -> bytes:
    """``valid`` with bytes changed, cut out, doubled, or put in."""
    raw = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 5))):
        place = data.draw(st.integers(0, max(0, len(raw) - 1)))
        length = data.draw(st.integers(0, 12))
        how = data.draw(st.sampled_from(["change", "cut", "double", "insert", "end"]))
        if how == "change" and raw:
            raw[place] = data.draw(st.integers(0, 255))
        elif how == "cut":
            del raw[place : place + length]
        elif how == "double":
            raw[place:place] = raw[place : place + length]
        elif how == "insert":
            raw[place:place] = data.draw(st.binary(max_size=12))
        else:
            del raw[place:]
    return bytes(raw)


def parse(what: tuple[str, Parser, type[SpectrumKVError], Any, list[bytes]], raw: bytes) -> None:
    _, parser, error, gives, _ = what
    said = ""
    try:
        found = parser(raw)
    except error as refusal:
        said = str(refusal)
    else:
        assert isinstance(found, gives)
    assert len(said) < 2000  # it lands in a log


@EACH_WIRE
@given(data=st.data())
@CASES
def test_what_comes_over_the_network(what: Any, data: st.DataObject) -> None:
    valid = data.draw(st.sampled_from(what[4]))
    parse(what, valid)
    parse(what, damaged(data, valid))
    parse(what, data.draw(st.binary(max_size=2 * PROLOGUE_BYTES)))
    parse(what, valid[:8] + data.draw(st.binary(max_size=100)))


@EACH_WIRE
def test_lengths_that_nothing_follows_allocate_nothing(what: Any) -> None:
    """Headers that announce gigabytes, of arrays, maps, strings and bytes (msgpack), anywhere in a valid input."""
    for valid in what[4]:
        for place in range(len(valid) + 1):
            for header in (
                b"\xdd\xff\xff\xff\xff",
                b"\xdf\xff\xff\xff\xff",
                b"\xdb\xff\xff\xff\xff",
                b"\xc6\xff\xff\xff\xff",
            ):
                parse(what, valid[:place] + header)


@given(frames=st.lists(st.binary(max_size=20), max_size=60))
@CASES
def test_any_registration_is_split(frames: list[bytes]) -> None:
    own, handshake = split_handshake(frames)
    assert own == frames[: len(own)]
    assert handshake is None or handshake == frames[-1]


# ---- files -----------------------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["high", "low", "int4", "balanced", "1e999", "~", "&a", "16MiB", "../x.yaml", "18000-18001"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=6,
)


def shipped_text(name: str) -> str:
    import spectrumkv_sglang.profiles.shipped as shipped

    return Path(str(shipped.__path__[0]), f"{name}.yaml").read_text()


RECORD = {
    "format": 1,
    "passed": True,
    "fingerprint": {"dtype": "bfloat16"},
    "policy": {"profile": "balanced", "budget": 0.3},
    "allowed_tiers": ["high", "mid"],
}
CONFIG = {
    "budget": 0.4,
    "profile": "balanced",
    "allowed_tiers": ["high", "mid", "low"],
    "slot_bytes": "16MiB",
    "control_port": "18000-18015",
    "controller": {"enabled": True, "candidates": [{"profile": "int8", "budget": 0.55, "kl": 0.001}]},
    "probe": RECORD,
}
LAUNCH = {
    "format": 1,
    "backend": "spectrumkv_tcp",
    "sglang": {"common": {"model-path": "m", "tp-size": 2}, "prefill": {}, "decode": {"port": 31000}},
    "spectrumkv": CONFIG,
}
Reader = Callable[[Path], Any]
FILES: list[tuple[str, Reader, type[SpectrumKVError], Any, list[str]]] = [
    ("profile", lambda path: load_profile(path), ProfileError, Profile, [shipped_text(n) for n in shipped_profiles()]),
    ("config", lambda path: load_config(path, environ={}), ConfigError, SpectrumKVConfig, [yaml.safe_dump(CONFIG)]),
    ("launch config", read_launch_config, LaunchConfigError, LaunchConfig, [yaml.safe_dump(LAUNCH)]),
]
EACH_FILE = pytest.mark.parametrize("what", FILES, ids=[name for name, *_ in FILES])


def read(what: Any, path: Path, content: bytes) -> None:
    _, reader, error, gives, _ = what
    path.write_bytes(content)
    said = path.name
    try:
        found = reader(path)
    except error as refusal:
        said = str(refusal)
    else:
        assert isinstance(found, gives)
    assert path.name in said


def replaced(data: st.DataObject, document: Any) -> Any:
    """``document`` with a random value in the place of one of its own, or beside them."""
    if isinstance(document, dict) and document and data.draw(st.integers(0, 3)):
        name = data.draw(st.sampled_from(sorted(document, key=str)))
        return {**document, name: replaced(data, document[name])}
    if isinstance(document, list) and document and data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(document) - 1))
        return [*document[:place], replaced(data, document[place]), *document[place + 1 :]]
    if isinstance(document, dict) and data.draw(st.booleans()):
        return {**document, data.draw(st.text(max_size=8)): data.draw(VALUES)}
    return data.draw(VALUES)


@EACH_FILE
@given(data=st.data())
@FILE_CASES
def test_what_operators_write(what: Any, tmp_path: Path, data: st.DataObject) -> None:
    path, valid = tmp_path / "file.yaml", data.draw(st.sampled_from(what[4]))
    read(what, path, valid.encode())
    read(what, path, damaged(data, valid.encode()))
    read(
        what, path, yaml.safe_dump(replaced(data, yaml.safe_load(valid)), allow_unicode=True).encode("utf-8", "ignore")
    )
    read(what, path, data.draw(st.text(alphabet="{}[]:-?|>&*!%@`'\"#,.\n\t ab0~<", max_size=60)).encode())


HOSTILE = {
    "nested": b"[" * 1500,
    "nested maps": b"{a: " * 1500,
    "laughs": b"a: &a [x, x]\n"
    + b"".join(b"%c: &%c [*%c, *%c]\n" % (98 + i, 98 + i, 97 + i, 97 + i) for i in range(24)),
    "itself": b"&a [*a]",
    "itself as a map": b"&a {budget: *a, name: *a, format: *a}",
    "tag": b"!!python/object/apply:os.system ['echo']",
    "number": b"budget: " + b"9" * 5000,
    "sexagesimal": b"budget: " + b"1:" * 2000 + b"1",
    "not text": b"\xff\xfe\x00",
    "keys": b"? [a, b]\n: c\n? {a: b}\n: c\n",
    "endless": b"#" * (MOST_FILE_BYTES + 1),
}


@EACH_FILE
@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_are_refused_by_name(what: Any, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_bytes(content)
    with pytest.raises(what[2], match=r"file\.yaml"):
        what[1](path)


@EACH_FILE
def test_files_that_are_none(what: Any, tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path, Path("/dev/zero")):
        if path.suffix != ".yaml" and what[0] == "profile":
            path = path / "x.yaml"
        with pytest.raises(what[2]):
            what[1](path)


@given(value=VALUES)
@CASES
def test_any_limits_of_a_request_are_read(value: Any) -> None:
    """What a client sends along: never an error, and a problem that is short enough for a log."""
    for shape in (value, {"ttft_target_s": value}, {"max_kl": value, "x": 1}):
        limits = read_limits(shape)
        assert isinstance(limits, RequestLimits)
        assert len(limits.problem) < 1000


@given(field=st.sampled_from(sorted(SpectrumKVConfig.model_fields)), text=st.text(max_size=40))
@FILE_CASES
def test_any_environment_is_a_config_or_refused(field: str, text: str) -> None:
    variable = said = f"SPECTRUMKV_{field.upper()}"
    try:
        load_config(environ={variable: text})
    except ConfigError as error:
        said = str(error)
    assert variable in said


def test_the_log_of_transfers_has_no_field_for_what_was_transferred() -> None:
    """Sizes, times and names only: no token, text, page or value of KV."""
    names = set(ChunkRecord.__struct_fields__)
    assert not names & {
        "text",
        "prompt",
        "tokens_ids",
        "token_ids",
        "input_ids",
        "pages",
        "tiers",
        "tier_map",
        "payload",
    }
