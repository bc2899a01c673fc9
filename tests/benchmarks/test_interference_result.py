"""What `benchmarks/interference.py` makes of token times: windows, losses against quiet rounds and against plain."""

from __future__ import annotations

import threading
from dataclasses import asdict
from typing import Any

import pytest
from interference_report import interference_table
from interference_result import Round, Window, WindowError, rows_of, window_of
from interference_streams import Arrivals, tokens_so_far
from rich.console import Console

from spectrumkv_sglang.errors import SpectrumKVError

PACED = "paced"


def one_round(variant: str, kind: str, repeat: int, rate: float, *, arrivals: int = 0, seconds: float = 10.0) -> Round:
    return Round(
        variant=variant,
        kind=kind,
        repeat=repeat,
        window=Window(seconds=seconds, tokens=round(rate * seconds), itl_ms_p50=10.0, itl_ms_p99=20.0),
        arrivals=arrivals,
        late=0,
        arrival_seconds=0.5 if arrivals else None,
        link_bytes=0,
        cpu_seconds=5.0,
    )


def test_the_window_is_where_all_answers_are_under_way() -> None:
    first = [(0.0, 1), (1.0, 2), (2.0, 3), (3.0, 4)]
    second = [(1.0, 1), (2.0, 2), (3.0, 3), (4.0, 4)]
    window = window_of([first, second])
    assert window.seconds == 2.0  # from 1.0, when the second starts, to 3.0, when the first ends
    assert window.tokens == 4  # of the first: 2 to 4, of the second: 1 to 3
    assert window.itl_ms_p50 == pytest.approx(1000.0)


def test_tokens_that_come_in_one_chunk_share_its_gap() -> None:
    window = window_of([[(0.0, 1), (3.0, 4)], [(0.0, 1), (1.0, 2), (2.0, 3), (3.0, 4)]])
    assert window.tokens == 6
    assert window.itl_ms_p99 == pytest.approx(1000.0)


def test_answers_one_after_the_other_have_no_window() -> None:
    with pytest.raises(WindowError, match="--stream-tokens"):
        window_of([[(0.0, 1), (1.0, 2)], [(2.0, 1), (3.0, 2)]])


def test_a_loss_is_against_the_quiet_round_of_the_same_repetition() -> None:
    rounds = [
        one_round("int8", "quiet", 0, 100.0),
        one_round("int8", PACED, 0, 90.0),
        one_round("int8", "quiet", 1, 200.0),  # the machine was faster
        one_round("int8", PACED, 1, 190.0),
    ]
    quiet, paced = rows_of(rounds)
    assert quiet.loss is None
    assert paced.loss is not None
    assert (paced.loss.least, paced.loss.most) == pytest.approx((0.05, 0.1))
    assert paced.loss.median == pytest.approx(0.075)


def test_ours_is_compared_with_what_plain_keeps_under_the_same_transfers() -> None:
    rounds = [
        one_round("plain-tuned", "quiet", 0, 100.0),
        one_round("plain-tuned", PACED, 0, 80.0),
        one_round("int8", "quiet", 0, 50.0),
        one_round("int8", PACED, 0, 38.0),
    ]
    by_variant = {row.variant: row for row in rows_of(rounds) if row.kind == PACED}
    assert by_variant["int8"].of_base is not None
    assert by_variant["int8"].of_base.median == pytest.approx(0.76 / 0.80)


def test_a_repetition_without_a_quiet_round_counts_for_nothing() -> None:
    rounds = [
        one_round("int8", PACED, 0, 90.0),
        one_round("int8", PACED, 1, 80.0),
        one_round("int8", "quiet", 1, 100.0),
    ]
    paced = next(row for row in rows_of(rounds) if row.kind == PACED)
    assert paced.loss is not None
    assert paced.loss.median == pytest.approx(0.2)


def test_tokens_lost_are_shared_out_over_the_prompts_that_arrived() -> None:
    rounds = [one_round("int8", "quiet", 0, 100.0), one_round("int8", PACED, 0, 80.0, arrivals=4)]
    paced = next(row for row in rows_of(rounds) if row.kind == PACED)
    assert paced.lost_per_arrival == pytest.approx(50.0)  # 20 tokens a second for 10 s, 4 prompts


@pytest.mark.parametrize(("kept", "red"), [(79.5, False), (70.0, True)])
def test_the_table_marks_what_misses_the_target(kept: float, red: bool) -> None:
    rounds = [
        one_round("plain-tuned", "quiet", 0, 100.0),
        one_round("plain-tuned", PACED, 0, 80.0),
        one_round("int8", "quiet", 0, 100.0),
        one_round("int8", PACED, 0, kept),
    ]
    console = Console(width=200, force_terminal=True, color_system="standard")
    with console.capture() as captured:
        console.print(interference_table(rows_of(rounds)))
    line = next(line for line in captured.get().splitlines() if "int8" in line and f"{kept:.1f}" in line)
    assert ("\x1b[1;31m" in line) is red


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        (b'data: {"text":" a","output_ids":[5],"meta_info":{"completion_tokens":17,"e2e_latency":1.0}}\n', 17),
        (b'data: {"text":"say \\"completion_tokens\\"","meta_info":{"completion_tokens": 3}}\n', 3),
        (b"data: [DONE]\n", 0),
        (b"\n", 0),
    ],
)
def test_tokens_are_counted_without_reading_the_text(line: bytes, tokens: int) -> None:
    assert tokens_so_far(line) == tokens


def test_prompts_arrive_one_after_the_other_until_told_to_stop() -> None:
    third = threading.Event()
    at_once = []

    def send(number: int) -> None:
        at_once.append(number)
        if number == 2:
            third.set()

    arrivals = Arrivals(send, 0.0)
    arrivals.start()
    assert third.wait(10)
    arrivals.stop()
    assert at_once[:3] == [0, 1, 2]
    assert len(arrivals.seconds) == len(at_once)


def test_a_pace_that_is_not_kept_is_counted() -> None:
    slow = threading.Event()
    sent = threading.Event()

    def send(number: int) -> None:
        if number == 1:
            sent.set()
        slow.wait(0.05)

    arrivals = Arrivals(send, 0.01)
    arrivals.start()
    assert sent.wait(10)
    arrivals.stop()
    assert arrivals.late >= 1


def test_a_failed_prompt_is_raised_when_the_round_ends() -> None:
    def send(_number: int) -> None:
        raise SpectrumKVError("prefill is gone")

    arrivals = Arrivals(send, 0.0)
    arrivals.start()
    with pytest.raises(SpectrumKVError, match="prefill is gone"):
        arrivals.stop()


def test_a_round_survives_the_way_through_json() -> None:
    from interference import rounds_from

    before = one_round("int8", PACED, 1, 90.0, arrivals=3)
    document: dict[str, Any] = {"rounds": [asdict(before)]}
    assert rounds_from(document) == [before]
