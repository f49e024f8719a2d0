"""Deadlines are reported once, and a server that runs for ever holds no more than it needs."""

from __future__ import annotations

from common.scheduling.deadlines import TIDY_COUNT_MIN, Deadlines


def test_a_deadline_is_reported_once_when_its_time_has_come() -> None:
    deadlines = Deadlines()
    deadlines.add(1, 5.0)
    deadlines.add(2, 3.0)
    assert deadlines.take_expired(2.9) == [] and deadlines.next_at == 3.0
    assert deadlines.take_expired(5.0) == [2, 1]
    assert deadlines.take_expired(9.0) == [] and deadlines.next_at is None


def test_a_forgotten_request_is_not_reported() -> None:
    deadlines = Deadlines()
    deadlines.add(1, 5.0)
    deadlines.add(1, 2.0)
    deadlines.add(2, 3.0)
    deadlines.forget(1)
    deadlines.forget(99)
    assert deadlines.take_expired(10.0) == [2]


def test_an_earlier_deadline_leaves_the_later_one_standing() -> None:
    deadlines = Deadlines()
    deadlines.add(1, 5.0)
    deadlines.add(1, 2.0)
    assert deadlines.take_expired(2.0) == [1]
    assert deadlines.take_expired(5.0) == [1]


def test_ended_requests_do_not_pile_up() -> None:
    deadlines = Deadlines()
    for request_id in range(10_000):
        deadlines.add(request_id, 600.0 + request_id)
        deadlines.add(request_id, 10.0 + request_id)
        deadlines.forget(request_id)
        assert len(deadlines) <= TIDY_COUNT_MIN + 2
