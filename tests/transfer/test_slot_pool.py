"""Slots: never lent twice, generations only grow, quarantine lasts, and the counts add up, whatever is done."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from spectrumkv_sglang.transfer.slot_pool import Slot, SlotCounts, SlotPool

QUARANTINE_SECONDS = 90.0


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of calls, with time passing at will, against a plain model of the pool."""

    lent = Bundle("lent")

    @initialize(count=st.integers(1, 5))
    def start(self, count: int) -> None:
        self.now = 1000.0
        self.count = count
        self.pool = SlotPool(count, QUARANTINE_SECONDS, clock=lambda: self.now)
        self.held: dict[int, Slot] = {}
        self.resting: dict[int, float] = {}  # slot -> end of its quarantine
        self.newest: dict[int, int] = {}  # slot -> highest generation seen
        self.ended: list[Slot] = []

    def _end(self, slot: Slot) -> None:
        del self.held[slot.index]
        self.ended.append(slot)

    @rule(target=lent, wanted=st.integers(1, 6))
    def lend(self, wanted: int) -> object:
        slots = self.pool.lend(wanted)
        free = self.count - len(self.held) - sum(end > self.now for end in self.resting.values())
        assert len(slots) == min(wanted, free)
        for slot in slots:
            assert slot.index not in self.held
            assert self.resting.pop(slot.index, 0.0) <= self.now
            assert slot.generation > self.newest.get(slot.index, 0)
            self.newest[slot.index] = slot.generation
            self.held[slot.index] = slot
        return multiple(*slots)

    @rule(target=lent, slot=consumes(lent))
    def renew(self, slot: Slot) -> Slot:
        renewed = self.pool.renew(slot)
        assert renewed.index == slot.index
        assert renewed.generation > self.newest[slot.index]
        self.newest[slot.index] = renewed.generation
        self._end(slot)
        self.held[slot.index] = renewed
        return renewed

    @rule(slot=consumes(lent))
    def give_back(self, slot: Slot) -> None:
        self.pool.give_back(slot)
        self._end(slot)

    @rule(slot=consumes(lent))
    def quarantine(self, slot: Slot) -> None:
        self.pool.quarantine(slot)
        self._end(slot)
        self.resting[slot.index] = self.now + QUARANTINE_SECONDS

    @rule(seconds=st.sampled_from([0.001, 1.0, 45.0, 89.999, 90.0, 1000.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds

    @rule(data=st.data())
    def a_past_generation_is_refused(self, data: st.DataObject) -> None:
        if not self.ended:
            return
        slot = data.draw(st.sampled_from(self.ended))
        assert not self.pool.is_current(slot)
        for act in (self.pool.renew, self.pool.give_back, self.pool.quarantine):
            with pytest.raises(KeyError, match="not lent"):
                act(slot)

    @rule(index=st.sampled_from([-1, 5, 2**32 - 1]), generation=st.integers(0, 2**64))
    def a_slot_that_does_not_exist_is_refused(self, index: int, generation: int) -> None:
        assert not self.pool.is_current(Slot(index, generation))
        with pytest.raises(KeyError, match="not lent"):
            self.pool.give_back(Slot(index, generation))

    @invariant()
    def counts_add_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        resting = sum(end > self.now for end in self.resting.values())
        assert self.pool.counts() == SlotCounts(self.count - len(self.held) - resting, len(self.held), resting)

    @invariant()
    def what_is_lent_is_current(self) -> None:
        assert all(self.pool.is_current(slot) for slot in getattr(self, "held", {}).values())


TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_a_pool_has_at_least_one_slot() -> None:
    with pytest.raises(ValueError, match="at least 1 slot, got 0"):
        SlotPool(0, QUARANTINE_SECONDS)


def test_a_borrower_waits_for_a_slot_that_comes_back() -> None:
    pool = SlotPool(1, QUARANTINE_SECONDS)
    [slot] = pool.lend(1)
    threading.Timer(0.2, pool.give_back, [slot]).start()
    started = time.monotonic()
    [again] = pool.lend(1, timeout=10)
    assert again.generation > slot.generation
    assert 0.1 < time.monotonic() - started < 5


def test_a_borrower_waits_for_the_end_of_a_quarantine() -> None:
    pool = SlotPool(1, 0.2)
    pool.quarantine(pool.lend(1)[0])
    assert pool.lend(1) == []
    assert len(pool.lend(1, timeout=10)) == 1


def test_a_borrower_waits_no_longer_than_it_said() -> None:
    pool = SlotPool(1, QUARANTINE_SECONDS)
    pool.lend(1)
    started = time.monotonic()
    assert pool.lend(1, timeout=0.2) == []
    assert 0.2 <= time.monotonic() - started < 5


def test_a_borrower_does_not_wait_where_nothing_can_come_back() -> None:
    pool = SlotPool(2, QUARANTINE_SECONDS)
    for slot in pool.lend(2):
        pool.quarantine(slot)
    started = time.monotonic()
    assert pool.lend(1, timeout=30) == []
    assert time.monotonic() - started < 5


def test_no_slot_is_lent_to_two_threads() -> None:
    pool, mistakes = SlotPool(3, 0.0), []
    holders: list[object] = [None] * 3

    def borrow() -> None:
        me = object()
        for _ in range(300):
            for slot in pool.lend(2, timeout=5):
                if holders[slot.index] is not None:
                    mistakes.append(slot)
                holders[slot.index] = me
                slot = pool.renew(slot)
                if holders[slot.index] is not me:
                    mistakes.append(slot)
                holders[slot.index] = None
                pool.give_back(slot)

    threads = [threading.Thread(target=borrow) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert mistakes == []
    assert pool.counts() == SlotCounts(free=3, in_use=0, quarantined=0)
