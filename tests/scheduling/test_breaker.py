"""A peer that fails is left alone, longer each time, and tried with one request at a time."""

from __future__ import annotations

import random

from common.scheduling.breaker import (
    FAILURE_COUNT_MAX,
    OPEN_S,
    OPEN_S_MAX,
    PROBE_S,
    Breaker,
    BreakerState,
)


def opened(at: float = 0.0) -> Breaker:
    breaker = Breaker(random.Random(1))
    for _ in range(FAILURE_COUNT_MAX):
        assert breaker.allows(at)
        breaker.note_failure(at)
    return breaker


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    breaker = Breaker(random.Random(1))
    for _ in range(10):
        breaker.note_failure(0.0)
        breaker.note_failure(0.0)
        breaker.note_success()
    assert breaker.state is BreakerState.CLOSED
    assert not opened().allows(0.0)


def test_one_probe_goes_through_and_its_success_closes_it() -> None:
    breaker = opened()
    assert breaker.allows(OPEN_S)
    breaker.note_asked(OPEN_S)
    assert breaker.state is BreakerState.HALF_OPEN and not breaker.allows(OPEN_S)
    breaker.note_success()
    assert breaker.allows(OPEN_S)


def test_every_probe_that_fails_makes_the_wait_longer_up_to_a_bound() -> None:
    breaker, now, waits = opened(), 0.0, []
    for _ in range(10):
        started = now
        while not breaker.allows(now):
            now += 0.01
        waits.append(now - started)
        breaker.note_asked(now)
        breaker.note_failure(now)
    assert waits[0] <= OPEN_S + 0.01
    assert OPEN_S_MAX / 2 <= waits[-1] <= OPEN_S_MAX + 0.01
    assert breaker.open_count == 11


def test_a_probe_without_an_answer_is_replaced() -> None:
    breaker = opened()
    breaker.note_asked(OPEN_S)
    assert not breaker.allows(OPEN_S + PROBE_S - 0.1)
    assert breaker.allows(OPEN_S + PROBE_S)


def test_late_answers_to_what_was_asked_before_do_not_open_it_further() -> None:
    breaker = opened()
    for _ in range(20):
        breaker.note_failure(0.0)
    assert breaker.open_count == 1 and breaker.allows(OPEN_S)
