"""How the soak judges answers, which errors its faults explain, and when a run passes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from soak_account import Account, Ended
from soak_client import Reply
from soak_judging import Expected, Limits, Verdict, first_difference, judge
from soak_prompts import SHARED_DOCUMENTS, soak_prompts
from soak_report import Soak
from soak_watch import Check
from soak_windows import Window, Windows, growth_of, latency_parts

LIMITS = Limits(tie_gap=1e-3, most_shift=0.02)
PLAIN = Expected((5, 6, 7), (-0.1, -0.7, -0.2), (9, 8, 3), (2.0, 5e-4, 1.0))


def verdict(tokens: tuple[int, ...], logprobs: tuple[float, ...] = PLAIN.logprobs, *, lossy: bool = False) -> Verdict:
    return judge([PLAIN], tokens, logprobs, LIMITS, lossy=lossy).verdict


@pytest.mark.parametrize(
    ("tokens", "logprobs", "expected"),
    [
        ((5, 6, 7), (-0.1, -0.7, -0.2), Verdict.RIGHT),
        ((5, 6, 7), (-0.1, -0.69, -0.2), Verdict.RIGHT),
        ((5, 6, 7), (-0.1, -0.6, -0.2), Verdict.WRONG),  # the tokens of a damaged cache, by luck
        ((5, 8, 1), (-0.1, -0.7, -3.0), Verdict.TIE),
        ((5, 8, 1), (-0.4, -0.7, -3.0), Verdict.WRONG),  # wrong before the tie
        ((5, 4, 7), (-0.1, -0.7, -0.2), Verdict.WRONG),  # neither of the two that are nearly equal
        ((9, 6, 7), (-0.1, -0.7, -0.2), Verdict.WRONG),  # the second choice, and far from the first
        ((5, 6), (-0.1, -0.7), Verdict.WRONG),
        ((5, 6, 7, 1), (-0.1, -0.7, -0.2, -1.0), Verdict.WRONG),
        ((), (), Verdict.WRONG),
    ],
)
def test_only_what_rounding_explains_is_not_wrong(
    tokens: tuple[int, ...], logprobs: tuple[float, ...], expected: Verdict
) -> None:
    assert verdict(tokens, logprobs) is expected


def test_the_best_of_several_plain_answers_counts() -> None:
    other = Expected((5, 8, 2), (-0.1, -0.7, -0.3), (9, 6, 3), (2.0, 5e-4, 1.0))
    found = judge([PLAIN, other], (5, 8, 2), (-0.1, -0.7, -0.3), LIMITS, lossy=False)
    assert found.verdict is Verdict.RIGHT


def test_a_lossy_profile_differs_where_native_would_be_wrong() -> None:
    assert verdict((5, 6, 7), (-0.5, -0.9, -0.2), lossy=True) is Verdict.RIGHT
    assert verdict((1, 2, 3), lossy=True) is Verdict.DIFFERS


@pytest.mark.parametrize(
    ("ours", "theirs", "position"),
    [((1, 2), (1, 2), -1), ((1, 2), (1, 3), 1), ((1,), (1, 2), 1), ((1, 2), (1,), 1), ((), (), -1)],
)
def test_first_difference(ours: tuple[int, ...], theirs: tuple[int, ...], position: int) -> None:
    assert first_difference(ours, theirs) == position


def test_an_error_is_explained_by_a_window_that_its_request_lived_in() -> None:
    windows = Windows()
    window = windows.open(Window("prefill killed", started=10.0))
    assert windows.explain("HTTP 500", 2.0, 9.0) is None
    assert windows.explain("HTTP 500", 2.0, 10.5) is window
    assert windows.explain("HTTP 500", 50.0, 51.0) is window  # it has not ended
    window.ended = 40.0
    assert windows.explain("HTTP 500", 41.0, 42.0) is None
    assert windows.explain("no answer in time", 39.0, 42.0) is window
    assert window.errors == {"HTTP 500": 2, "no answer in time": 1}


def test_a_window_explains_no_more_errors_than_its_fault_can_cause() -> None:
    windows = Windows()
    lost = windows.open(Window("COMMIT lost", 0.0, most_errors=1, ended=5.0))
    killed = windows.open(Window("decode killed", 4.0, ended=8.0))
    assert windows.explain("HTTP 500", 3.0, 4.5) is killed  # it explains any number: the other is kept for later
    assert windows.explain("HTTP 500", 1.0, 2.0) is lost
    assert windows.explain("HTTP 500", 1.0, 2.0) is None


def account() -> Account:
    return Account([[PLAIN]], Windows(), LIMITS)


def ended(reply: Reply, at: float = 1.0, *, own: bool = False) -> Ended:
    return Ended(0, at, at + 1.0, reply, own)


RIGHT = Reply(PLAIN.tokens, PLAIN.logprobs, ttft=0.25)
WRONG = Reply((1, 2, 3), PLAIN.logprobs, ttft=0.25)


def test_every_request_is_counted_once() -> None:
    books = account()
    books.windows.open(Window("decode stopped", 10.0, ended=20.0))
    ends = [
        ended(RIGHT),
        ended(RIGHT, 15.0),
        ended(WRONG, 15.0),
        ended(Reply(error="HTTP 500"), 15.0),
        ended(Reply(error="HTTP 500")),
        ended(Reply(error="HTTP 503"), own=True),
        ended(Reply(left=True)),
    ]
    verdicts = [books.add(one) for one in ends]
    assert verdicts[:4] == [Verdict.RIGHT, Verdict.RIGHT, Verdict.WRONG, Verdict.ERROR]
    assert books.verdicts == {"right": 2, "wrong": 1, "error": 3, "aborted by us": 1}
    assert books.in_windows == {"right": 1, "wrong": 1, "error": 1}
    assert books.errors == {"HTTP 500": 1, "HTTP 503": 1}
    assert books.unexpected == {"HTTP 500": 1}
    assert books.answered == 3
    assert books.to_repeat == [0]
    assert [hit for _, _, hit in books.first_tokens] == [False, True, True]


def soak(books: Account, **more: object) -> Soak:
    return Soak({}, {}, books, books.windows.all, **more)  # type: ignore[arg-type]


def test_a_run_without_faults_in_it_passes() -> None:
    books = account()
    books.add(ended(RIGHT))
    assert soak(books, checks=[Check(3.0)]).faults_found() == []


def test_what_makes_a_run_fail_is_said() -> None:
    empty = account()
    assert soak(empty).faults_found() == ["no answer was compared"]
    books = account()
    books.add(ended(WRONG))
    books.add(ended(Reply(error="HTTP 500")))
    books.windows.open(Window("link down", 5.0, ended=125.0, recovery_seconds=None))
    growing = growth_of("decode-3", [(5.0 * number, 1e9 + 1e7 * number) for number in range(60)])
    assert growing is not None
    held = Check(9.0, held={"slots in_use of decode": 2})
    found = soak(books, checks=[held], growth=[growing], unended=True, broken="prefill ended").faults_found()
    assert found == [
        "prefill ended",
        "1 wrong answers",
        "1 errors that no fault explains: HTTP 500 1",
        "held after 9 s: slots in_use of decode 2",
        "not well again after: link down",
        "requests that did not end",
        "memory of decode-3 grew by 42 %",
    ]


def test_a_lossy_run_needs_its_share_of_equal_answers() -> None:
    books = Account([[PLAIN]], Windows(), LIMITS, lossy=True)
    for reply in (RIGHT, RIGHT, WRONG):
        books.add(ended(reply))
    assert soak(books, least_agreement=0.6).faults_found() == []
    assert soak(books, least_agreement=0.8).faults_found() == ["66.7% of the answers agree, fewer than 80%"]


def test_both_files_hold_the_counts(tmp_path: Path) -> None:
    books = account()
    books.add(ended(RIGHT))
    books.windows.open(Window("OPEN lost", 0.5, 0, ended=3.0, recovery_seconds=0.5, errors=Counter()))
    text = soak(books, checks=[Check(3.0)], seconds=3.0).write(tmp_path)
    document = json.loads((tmp_path / "soak.json").read_text())
    assert document["verdicts"] == {"right": 1}
    assert document["faults"][0]["median_recovery_s"] == 0.5
    assert (tmp_path / "soak.md").read_text() == text
    assert "| OPEN lost | 1 | nothing | 0.5 | 0.5 |" in text
    assert text.endswith("passed\n")


def test_latency_leaves_requests_that_met_a_fault_out() -> None:
    samples = [(1.0, 0.1, False), (2.0, 9.0, True), (11.0, 0.3, False), (12.0, 0.5, False)]
    first, second = latency_parts(samples, parts=2)
    assert (first.requests, first.p50, second.requests, second.p50) == (1, 0.1, 2, 0.4)
    assert latency_parts([]) == []
    assert latency_parts([(4.0, 1.0, True)], parts=1)[0].p99 is None


def test_memory_is_compared_over_a_servers_life() -> None:
    assert growth_of("x", [(0.0, 1.0)] * 7) is None
    flat = growth_of("x", [(float(number), 100.0 if number else 180.0) for number in range(40)])
    assert flat is not None
    assert (flat.first, flat.last, flat.seconds) == (108.0, 100.0, 39.0)


def test_prompts_are_distinct_and_share_beginnings() -> None:
    prompts = soak_prompts(100, longest_words=200, seed=3)
    assert prompts == soak_prompts(100, longest_words=200, seed=3)
    assert prompts != soak_prompts(100, longest_words=200, seed=4)
    assert len({prompt.text for prompt in prompts}) == 100
    assert Counter(prompt.kind for prompt in prompts) == {"short": 30, "long": 30, "shared prefix": 40}
    beginnings = {" ".join(one.text.split()[:100]) for one in prompts if one.kind == "shared prefix"}
    assert len(beginnings) == SHARED_DOCUMENTS
    assert all(8 <= prompt.new_tokens <= 16 for prompt in prompts)
    assert max(len(prompt.text.split()) for prompt in prompts) <= 202
