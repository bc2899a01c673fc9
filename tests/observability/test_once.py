"""Repeated log lines are shown once, then counted, in bounded memory."""

from __future__ import annotations

import logging
import threading

import pytest

from spectrumkv_sglang.observability.once import OnceLog

logger = logging.getLogger("spectrumkv.test")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def _capture_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


def test_a_cause_is_logged_at_once_and_its_repeats_are_counted(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    log = OnceLog(interval_s=60, clock=clock)
    assert log.log(logger, logging.WARNING, "mla", "room 1 goes native")
    for room in range(2, 7):
        clock.now += 1
        assert not log.log(logger, logging.WARNING, "mla", f"room {room} goes native")
    clock.now += 60
    assert log.log(logger, logging.WARNING, "mla", "room 7 goes native")
    assert caplog.messages == ["room 1 goes native", "room 7 goes native (5 more in the last 65 s)"]


def test_the_count_starts_again_after_it_was_reported(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    log = OnceLog(interval_s=10, clock=clock)
    for _ in range(3):
        log.log(logger, logging.INFO, "a", "x")
        clock.now += 10
    assert caplog.messages == ["x", "x", "x"]


def test_causes_and_loggers_do_not_hide_each_other(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    log = OnceLog(clock=clock)
    log.log(logger, logging.WARNING, "a", "a")
    log.log(logger, logging.WARNING, "b", "b")
    log.log(logging.getLogger("spectrumkv.other"), logging.ERROR, "a", "other a")
    assert caplog.messages == ["a", "b", "other a"]
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.WARNING, logging.ERROR]


def test_a_message_with_percent_signs_is_not_a_format(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    OnceLog(clock=clock).log(logger, logging.WARNING, "a", "budget 55% of %s")
    assert caplog.messages == ["budget 55% of %s"]


def test_flush_reports_what_no_later_line_would(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    log = OnceLog(clock=clock)
    for _ in range(4):
        log.log(logger, logging.WARNING, "a", "a")
    log.log(logger, logging.WARNING, "b", "b")
    clock.now += 5
    log.flush()
    log.flush()
    assert caplog.messages == ["a", "b", "a (3 more in the last 5 s)"]


def test_a_flood_of_new_causes_shares_one_line(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    log = OnceLog(interval_s=60, max_causes=3, clock=clock)
    for cause in range(1000):
        log.log(logger, logging.WARNING, f"cause {cause}", f"message {cause}")
    assert caplog.messages == ["message 0", "message 1", "message 2", "message 3"]
    clock.now += 60
    log.log(logger, logging.WARNING, "a late cause", "late")
    assert caplog.messages[4:] == ["late"]
    assert len(log._causes) <= 4


def test_a_forgotten_cause_reports_its_repeats(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    log = OnceLog(interval_s=60, max_causes=1, clock=clock)
    for _ in range(3):
        log.log(logger, logging.WARNING, "old", "old")
    clock.now += 100
    log.log(logger, logging.WARNING, "new", "new")
    assert caplog.messages == ["old", "old (2 more in the last 100 s)", "new"]


def test_threads_lose_no_repeat(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    log = OnceLog(clock=clock)
    threads = [
        threading.Thread(target=lambda: [log.log(logger, logging.WARNING, "a", "a") for _ in range(500)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.flush()
    assert caplog.messages == ["a", "a (1999 more in the last 0 s)"]
