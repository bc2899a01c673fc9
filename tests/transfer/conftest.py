"""Fixtures of the transfer tests: one Mooncake engine here, one decode process beside, fresh ranks for each test."""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # tests say `from decode_peer import PeerRank`

from decode_peer import GEOMETRY, MOONCAKE_ENVIRONMENT, SLOT_BYTES, DecodePeer, PeerRank, eventually  # noqa: E402
from decode_process import HOST, count_resources  # noqa: E402
from prefill_side import PrefillSide  # noqa: E402
from raw_prefill import RawPrefill  # noqa: E402

from spectrumkv_sglang.transfer import chunk_sender  # noqa: E402
from spectrumkv_sglang.transfer.control_keys import ControlKeys  # noqa: E402
from spectrumkv_sglang.transfer.shared_heads import RankHeads  # noqa: E402

POOL_PAGES = 400
MakeRank = Callable[..., PeerRank]
MakePrefill = Callable[..., PrefillSide]
MakeRaw = Callable[..., RawPrefill]


@pytest.fixture(scope="session")
def engine() -> Iterator[Any]:
    """This process's Mooncake engine over TCP."""
    from mooncake.engine import TransferEngine

    before = dict(os.environ)
    os.environ.update(MOONCAKE_ENVIRONMENT)
    engine = TransferEngine()
    assert engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == 0
    yield engine
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def peer(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DecodePeer]:
    """The decode process that most tests share, with its connection to ``engine`` already made."""
    peer = DecodePeer(tmp_path_factory.mktemp("decode") / "log")
    rank = PeerRank(peer, GEOMETRY, POOL_PAGES, {"slot_bytes": SLOT_BYTES})
    log = tmp_path_factory.mktemp("prefill") / "transfers.jsonl"
    source = PrefillSide(engine, GEOMETRY, POOL_PAGES, log, profile="native-packed", budget=1.0, slot_bytes=SLOT_BYTES)
    pages = source.some_pages(200)
    rank.open_room(1, len(pages))
    assert source.send(rank, 1, pages).reason == "tiered"
    source.rank.close()
    rank.ask("stop_rank")
    yield peer
    peer.end()


@pytest.fixture
def resources_return(peer: DecodePeer) -> Iterator[None]:
    """Both processes have no more threads and descriptors after the test than before it.

    Nor more sockets than Mooncake may keep of a dead peer: a connection for each write that was under way, which the
    kernel no longer lists once it was reset, so that it cannot be told from others.
    """

    def resources() -> dict[str, int]:
        counts = {"prefill": count_resources(), "decode": peer.ask("resources")}
        return {f"{kind} in {process}": n for process, kinds in counts.items() for kind, n in kinds.items()}

    before = resources()
    yield

    def leaked() -> dict[str, int]:
        more = {kind: n - before.get(kind, 0) for kind, n in resources().items()}
        kept = chunk_sender.MOST_WRITES
        return {kind: n for kind, n in more.items() if n > (kept if kind.startswith("socket ") else 0)}

    def leaked_for_good() -> dict[str, int]:
        gc.collect()  # each time: on a busy machine the last to hold a socket may be a thread that has yet to end
        peer.ask("collect_garbage")
        return leaked()

    if leaked():
        assert eventually(leaked_for_good, {}, 30) == {}


@pytest.fixture
def make_rank(peer: DecodePeer, resources_return: None) -> Iterator[MakeRank]:
    """Start a decode rank; at the end of the test it must hold no slot, chunk or room, and it is closed."""
    ranks: list[PeerRank] = []

    def make(
        geometry: Any = GEOMETRY,
        on: DecodePeer = peer,
        knows_rotation: bool = True,
        heads: RankHeads | None = None,
        **config: Any,
    ) -> PeerRank:
        settings = {
            "slot_bytes": SLOT_BYTES,
            "slots_per_chunk": 1,
            "quarantine_s": 0.5,
            "write_timeout_s": 15,
            "lease_s": 20,
            **config,
        }
        rank = PeerRank(on, geometry, POOL_PAGES // geometry.page_size, settings, knows_rotation, heads)
        if on is peer:
            ranks.append(rank)
        return rank

    yield make
    for rank in ranks:
        idle = {"free": rank.handshake.landing_slots, "in_use": 0, "quarantined": 0, "open_chunks": 0}
        assert eventually(lambda rank=rank: {**rank.state(), "rooms": 0}, {**idle, "rooms": 0}) == {**idle, "rooms": 0}
        rank.ask("stop_rank")


@pytest.fixture
def make_prefill(engine: Any, tmp_path: Path, resources_return: None) -> Iterator[MakePrefill]:
    """Start a prefill rank; at the end of the test it must hold no staging slot, and it is closed."""
    sources: list[PrefillSide] = []
    numbers = itertools.count()

    def make(geometry: Any = GEOMETRY, heads: RankHeads | None = None, **config: Any) -> PrefillSide:
        settings = {
            "slot_bytes": SLOT_BYTES,
            "profile": "native-packed",
            "budget": 1.0,
            "min_tokens": 0,
            "open_timeout_s": 5,
            "unpack_timeout_s": 10,
            "write_timeout_s": 15,
            "quarantine_s": 0.5,
            **config,
        }
        log = tmp_path / f"transfers-{next(numbers)}.jsonl"
        source = PrefillSide(engine, geometry, POOL_PAGES // geometry.page_size, log, heads, **settings)
        sources.append(source)
        return source

    yield make
    for source in sources:
        assert eventually(lambda source=source: source.staging()["in_use"], 0) == 0
        source.rank.close()


@pytest.fixture
def make_raw(make_rank: MakeRank, make_prefill: MakePrefill) -> Iterator[MakeRaw]:
    """Speak the control protocol by hand to a rank."""
    raws: list[RawPrefill] = []

    def make(source: PrefillSide, to: PeerRank, keys: ControlKeys | None = None) -> RawPrefill:
        raws.append(RawPrefill(source, to, keys))
        return raws[-1]

    yield make
    for raw in raws:
        raw.close()
