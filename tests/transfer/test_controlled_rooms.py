"""A prefill rank whose controller chooses for each room, over the real Mooncake engine to a decode process."""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MakePrefill, MakeRank, MakeRaw
from decode_peer import GEOMETRY, PeerRank
from prefill_side import Outcome, PrefillSide, assert_arrived, idle

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.observability.reasons import ProbeState
from spectrumkv_sglang.profiles.profile import load_profile
from spectrumkv_sglang.profiles.tier import Tier
from spectrumkv_sglang.transfer.messages import Close, encode
from spectrumkv_sglang.transfer.sending_policy import SendingPolicy, configured_policies, serve_candidates
from spectrumkv_sglang.verification.fingerprint import FingerprintError

pytestmark = pytest.mark.timeout(150)

GBPS = 1e9 / 8
SLOW = 1e-5 * GBPS
"""So slow that a room takes minutes: seconds that packing takes on a busy machine decide nothing."""
CANDIDATES = [
    {"profile": "native-packed", "budget": 1.0, "kl": 0.0},
    {"profile": "spectrum-safe", "budget": 0.52, "kl": 0.0001},
    {"profile": "spectrum-paper", "budget": 0.2, "kl": 0.005},
]


def unreadable() -> Any:
    raise FingerprintError("no model here")


def controlled(**controller: Any) -> dict[str, Any]:
    """Settings of a prefill side with a controller that does not explore."""
    return {
        "profile": "spectrum-safe",
        "budget": 0.52,
        "require_probe": False,
        "controller": {"enabled": True, "explore": 0.0, "candidates": CANDIDATES, **controller},
    }


def link_is(source: PrefillSide, rank: PeerRank, rate: float) -> None:
    """Let the controller believe in a link that has had ``rate`` bytes a second since just now.

    A far slower one comes between, so that the rate is a new one whatever the writes so far were seen to do, which on a
    busy machine may be nothing: what rooms were learnt to take over the former link is forgotten then.
    """
    decisions = source.rank.decisions
    assert decisions is not None
    for taught in (rate / 1e3, rate):
        for _ in range(3):
            decisions.controller.link_sample(rank.peer.session, 64e6, 64e6 / taught, False)
    assert decisions.controller.bandwidths() == pytest.approx((rate, rate))


def send(
    source: PrefillSide, rank: PeerRank, room: int, rows: int = 320, **chunk: Any
) -> tuple[Outcome, list[int], list[int]]:
    pages = source.some_pages(rows)
    room_pages = rank.open_room(room, len(pages))
    return source.send(rank, room, pages, **chunk), pages, room_pages


def plan_of(source: PrefillSide, rank: PeerRank, room: int, pages: list[int], profile: str, budget: float) -> Any:
    policy = SendingPolicy(load_profile(profile), budget, tuple(Tier))
    return source.rank._planner_of(source.view).plan(
        room=room,
        pages=np.array(pages, dtype=np.int64),
        first_position=0,
        prompt_tokens=len(pages),
        slot_bytes=rank.handshake.slot_bytes,
        policy=policy,
    )


def test_candidates_change_between_rooms_and_everything_arrives(make_rank: MakeRank, make_prefill: MakePrefill) -> None:
    rank, source = make_rank(), make_prefill(**controlled())
    outcome, pages, room_pages = send(source, rank, 1)
    assert outcome.record is not None
    assert (outcome.record["candidate"], outcome.record["decision"]) == ("spectrum-safe@0.52", "no_sample")
    assert_arrived(source, pages, rank, room_pages, plan_of(source, rank, 1, pages, "spectrum-safe", 0.52))
    rank.ask("close_room", room=1)

    link_is(source, rank, SLOW)
    outcome, pages, room_pages = send(source, rank, 2)
    assert outcome.record is not None
    assert (outcome.code, outcome.reason, outcome.failures) == (0, "tiered", {})
    assert (outcome.record["candidate"], outcome.record["profile"]) == ("spectrum-paper@0.2", "spectrum-paper")
    assert outcome.record["achieved_b"] <= 0.2
    assert_arrived(source, pages, rank, room_pages, plan_of(source, rank, 2, pages, "spectrum-paper", 0.2))
    rank.ask("close_room", room=2)

    link_is(source, rank, 1000 * GBPS)
    outcome, _, _ = send(source, rank, 3)
    assert outcome.record is not None
    assert (outcome.went_native, outcome.reason) == (True, "bypass")
    assert (outcome.record["candidate"], outcome.record["decision"]) == ("native", "bypass")


def test_a_requests_accuracy_holds_for_its_room_alone(make_rank: MakeRank, make_prefill: MakePrefill) -> None:
    rank, source = make_rank(), make_prefill(**controlled())
    decisions = source.rank.decisions
    assert decisions is not None
    send(source, rank, 1)
    chosen = []
    for room, parameters in ((2, {"max_kl": 0.001}), (3, {"max_kl": 0}), (4, {"max_kl": "0.001"}), (5, None)):
        request = decisions.expect(room, parameters)
        link_is(source, rank, SLOW)
        outcome, _, _ = send(source, rank, room, request=request)
        assert outcome.record is not None
        assert outcome.code == 0
        chosen.append((outcome.record["candidate"], outcome.record["decision"]))
        rank.ask("close_room", room=room)
    assert chosen[0] == ("spectrum-safe@0.52", "accuracy_floor")
    assert chosen[1][0] in ("native", "native-packed@1")
    assert chosen[2] == ("spectrum-safe@0.52", "bad_request")
    assert chosen[3] == ("spectrum-paper@0.2", "envelope")


def test_a_rooms_chunks_keep_its_candidate_and_the_next_room_of_the_id_does_not(
    make_rank: MakeRank, make_prefill: MakePrefill
) -> None:
    rank, source = make_rank(), make_prefill(**controlled())
    send(source, rank, 1)
    link_is(source, rank, SLOW)
    pages = source.some_pages(320)
    rank.open_room(2, len(pages))
    first = source.send(rank, 2, pages[:200], room_pages=320, last_chunk=False)
    link_is(source, rank, 1000 * GBPS)
    second = source.send(rank, 2, pages[200:], page_start=200, room_pages=320)
    for outcome in (first, second):
        assert outcome.record is not None
        assert (outcome.reason, outcome.record["candidate"]) == ("tiered", "spectrum-paper@0.2")
    aborted = source.send(rank, 2, pages[:200], room_pages=320, last_chunk=False)
    assert aborted.reason == "bypass"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_requests_of_one_room_id_keep_their_own_limits(
    make_rank: MakeRank, make_prefill: MakePrefill, order: tuple[int, int]
) -> None:
    """One comes while the other waits, of the same or another decode rank, and the first to be sent ends first."""
    ranks, source = (make_rank(), make_rank()), make_prefill(**controlled())
    decisions = source.rank.decisions
    assert decisions is not None
    limits = ({"max_kl": 0}, None)
    requests = [decisions.expect(7, parameters) for parameters in limits]
    chosen = {}
    for number in order:
        link_is(source, ranks[number], SLOW)
        outcome, _, _ = send(source, ranks[number], 7, request=requests[number])
        assert (outcome.code, outcome.failures) == (0, {})
        assert outcome.record is not None
        chosen[number] = outcome.record["candidate"]
    assert chosen[0] in ("native", "native-packed@1")
    assert chosen[1] == "spectrum-paper@0.2"


def test_what_an_aborted_request_sent_and_decided_is_not_the_next_ones_of_its_room_id(
    make_rank: MakeRank, make_prefill: MakePrefill
) -> None:
    rank, source = make_rank(), make_prefill(**controlled())
    decisions = source.rank.decisions
    assert decisions is not None
    send(source, rank, 1)
    link_is(source, rank, 1000 * GBPS)
    pages = source.some_pages(320)
    rank.open_room(7, len(pages))
    aborted = decisions.expect(7, None)
    begun = source.send(rank, 7, pages[:200], room_pages=320, last_chunk=False, request=aborted)
    assert begun.record is not None
    assert begun.reason == "bypass"
    assert aborted.sent[rank.peer.session].wire == begun.record["wire_bytes"]
    gone = weakref.ref(aborted)
    del aborted
    assert gone() is None  # nothing of this package keeps it
    rank.ask("close_room", room=7)

    outcomes = []
    for room in (7, 8):
        link_is(source, rank, SLOW)
        outcome, _, _ = send(source, rank, room, request=decisions.expect(room, None))
        assert outcome.record is not None
        outcomes.append((outcome.reason, *(outcome.record[name] for name in ("candidate", "achieved_b", "decision"))))
        rank.ask("close_room", room=room)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][:2] == ("tiered", "spectrum-paper@0.2")


def test_a_dry_run_decides_and_sends_natively(make_rank: MakeRank, make_prefill: MakePrefill) -> None:
    rank, source = make_rank(), make_prefill(**controlled(dry_run=True))
    link_is(source, rank, SLOW)
    outcome, _, _ = send(source, rank, 1)
    assert outcome.record is not None
    assert (outcome.went_native, outcome.reason) == (True, "dry_run")
    assert (outcome.record["candidate"], outcome.record["decision"]) == ("spectrum-paper@0.2", "envelope")
    assert rank.is_untouched()


def test_the_link_is_measured_by_the_writes_themselves(make_rank: MakeRank, make_prefill: MakePrefill) -> None:
    rank, source = make_rank(), make_prefill(**controlled())
    decisions = source.rank.decisions
    assert decisions is not None
    assert decisions.controller.bandwidths() is None
    rooms = 0
    # On a busy machine the end of a write may be noticed too late to say anything of the link.
    while (rates := decisions.controller.bandwidths()) is None and rooms < 20:
        rooms += 1
        outcome, _, _ = send(source, rank, rooms)
        assert outcome.record is not None
        assert outcome.record["decision"] == "no_sample"
    assert rates is not None
    # Loopback TCP of small payloads, the writer kept waiting for a core: anything below what memory can do.
    assert 1e-4 * GBPS < rates[0] < 400 * GBPS
    again, _, _ = send(source, rank, rooms + 1)
    assert again.record is not None
    assert again.record["decision"] != "no_sample"


def test_without_a_controller_every_room_travels_as_configured(make_rank: MakeRank, make_prefill: MakePrefill) -> None:
    rank = make_rank()
    source = make_prefill(profile="spectrum-safe", budget=0.52)
    assert source.rank.decisions is None
    outcome, _, _ = send(source, rank, 1)
    assert outcome.record is not None
    assert (outcome.record["profile"], outcome.record["candidate"]) == ("spectrum-safe", "")
    assert outcome.record["decision"] is None


def test_a_room_that_falls_back_counts_against_its_target(
    make_rank: MakeRank, make_prefill: MakePrefill, make_raw: MakeRaw
) -> None:
    """It went natively because decode had no slot: the candidate's speed is not judged, the missed target is."""
    rank = make_rank(slot_wait_s=0.2)
    source = make_prefill(**controlled(ttft_target_s=0.1), slot_wait_s=0.2)
    decisions = source.rank.decisions
    assert decisions is not None
    link_is(source, rank, GBPS)
    raw = make_raw(source, rank)
    rank.open_room(77, 4)
    raw.grants(77, 4, slots_wanted=16)
    outcome, _, _ = send(source, rank, 1)
    assert (outcome.went_native, outcome.reason) == (True, "pool_exhausted")
    assert outcome.seconds > 0.1
    assert decisions.controller.counts.violations == 1
    raw.send_frames(encode(Close(1, [])))
    assert idle(rank)


def test_a_controller_that_breaks_does_not_break_rooms(
    make_rank: MakeRank, make_prefill: MakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, source = make_rank(), make_prefill(**controlled())
    decisions = source.rank.decisions
    assert decisions is not None

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(decisions.controller, "finished", broken)
    outcome, _, _ = send(source, rank, 1)
    assert (outcome.code, outcome.reason) == (0, "tiered")
    monkeypatch.setattr(decisions.controller, "decide", broken)
    outcome, _, _ = send(source, rank, 2)
    assert (outcome.code, outcome.went_native, outcome.reason) == (0, True, "internal_error")


def test_a_decode_rank_that_forbids_the_low_tier_gets_none_of_it(
    make_rank: MakeRank, make_prefill: MakePrefill
) -> None:
    rank = make_rank(allowed_tiers=["high", "mid"], profile="int8", budget=0.6)
    source = make_prefill(**controlled(safe="native-packed@1"))
    link_is(source, rank, SLOW)
    outcome, pages, room_pages = send(source, rank, 1)
    assert outcome.record is not None
    assert (outcome.record["candidate"], outcome.reason) == ("spectrum-safe@0.52", "tiered")
    assert_arrived(source, pages, rank, room_pages, plan_of(source, rank, 1, pages, "spectrum-safe", 0.52))


# ---- which candidates a rank may use -----------------------------------------------------------------------------


def served(source: PrefillSide, **settings: Any) -> Any:
    config = SpectrumKVConfig(**{**controlled(), **settings})
    decision = config.decide_tiers(unreadable)
    return serve_candidates(config, config.restricted_to(decision.allowed_tiers), source.view, unreadable)


def test_candidates_that_no_probe_has_proven_are_left_out(
    make_prefill: MakePrefill, caplog: pytest.LogCaptureFixture
) -> None:
    source = make_prefill(replace(GEOMETRY, dtype="bfloat16"))
    candidates = [
        *CANDIDATES,
        {"profile": "near-lossless", "budget": 0.5, "kl": 0.0001},
        {"profile": "spectrum-paper", "budget": 0.6, "kl": 0.005},
    ]
    controller = {"enabled": True, "candidates": candidates}
    with caplog.at_level(logging.INFO):
        found = served(source, require_probe=True, profile="int8", budget=0.6, controller=controller)
    # Eight bits and their scales are .53 of a pool in bfloat16 with values of 32: LOW would be needed for less.
    assert [c.name for c in found.candidates] == ["native-packed@1", "spectrum-paper@0.6", "int8@0.6"]
    assert found.policies["spectrum-paper@0.6"].allowed_tiers == (Tier.HIGH, Tier.MID)
    assert found.safe.name == "int8@0.6"
    assert found.observe_attention
    for name in ("spectrum-safe@0.52", "spectrum-paper@0.2", "near-lossless@0.5"):
        assert f"candidate {name} is left out: tiers high, mid reach 0.5" in caplog.text


def test_what_is_unsafe_in_every_tier_is_left_out(make_prefill: MakePrefill, caplog: pytest.LogCaptureFixture) -> None:
    source = make_prefill()
    candidates = [{"profile": "aggressive", "budget": 0.2, "kl": 0.05}]
    controller = {"enabled": True, "candidates": candidates, "safe": "aggressive@0.2"}
    with caplog.at_level(logging.INFO):
        found = served(source, require_probe=True, profile="int8", budget=0.6, controller=controller)
    assert found.candidates == (found.safe,)
    assert found.safe.name == "int8@0.6"
    assert "candidate aggressive@0.2 is left out" in caplog.text
    assert ProbeState.MISSING.meaning in caplog.text


def test_the_servers_own_profile_has_the_loss_of_its_candidate(make_prefill: MakePrefill) -> None:
    source = make_prefill()
    assert served(source, profile="spectrum", budget=0.4).safe.kl == 0.005
    assert served(source, profile="balanced", budget=0.4).safe.kl == float("inf")
    stated = {"enabled": True, "safe_kl": 0.2, "candidates": CANDIDATES}
    assert served(source, profile="balanced", budget=0.4, controller=stated).safe.kl == 0.2
    assert served(source, profile="native-packed", budget=1.0).safe.kl == 0.0


def test_a_file_with_the_name_of_the_servers_profile_does_not_become_the_safe_candidate(
    make_prefill: MakePrefill, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: int8\ntiers:\n  high: {keys: int4, values: int4}\n")
    impostor = {"enabled": True, "candidates": [{"profile": str(path), "budget": 0.6, "kl": 3.0}]}
    found = served(make_prefill(), profile="int8", budget=0.6, controller=impostor)
    assert [c.name for c in found.candidates] == ["int8@0.6", "own:int8@0.6"]
    assert (found.safe.name, found.safe.kl) == ("own:int8@0.6", float("inf"))
    assert found.policies["own:int8@0.6"].profile == load_profile("int8")


def test_kernels_of_every_candidate_are_known_at_the_start(make_prefill: MakePrefill) -> None:
    source = make_prefill()
    config = SpectrumKVConfig(**controlled())
    names = [policy.profile.name for policy in configured_policies(config, source.view)]
    assert names == ["spectrum-safe", "native-packed", "spectrum-safe", "spectrum-paper"]
    assert len(configured_policies(SpectrumKVConfig(), source.view)) == 1
