"""Who was served least is next, and an idle hour is not saved up."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.scheduling import fair_share
from common.scheduling.fair_share import FairShare

NAMES = ("", "a", "b", "c")


class SlowShare:
    """Algorithm 2 as it is written, with a list of all that wait. Nobody is forgotten."""

    def __init__(self) -> None:
        self.served: Counter[str] = Counter()
        self.waiting: list[str] = []
        self.floor = 0
        self.left_last = ""

    def begin_waiting(self, client: str) -> None:
        if client not in self.waiting:
            others = [self.served[one] for one in self.waiting]
            least = min(others) if others else self.served[self.left_last]
            self.floor = max(self.floor, least)
            self.served[client] = max(self.served[client], self.floor)
        self.waiting.append(client)

    def end_waiting(self, client: str) -> None:
        self.waiting.remove(client)
        if client not in self.waiting:
            self.left_last = client

    def charge(self, client: str, count: int, cost: int = 1) -> None:
        self.served[client] = max(0, self.served[client] + count * cost)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("+-$"), st.sampled_from(NAMES), st.integers(-5, 50))))
def test_it_counts_as_the_published_algorithm_does(calls: list[tuple[str, str, int]]) -> None:
    share, slow = FairShare(), SlowShare()
    for kind, client, count in calls:
        if kind == "+":
            share.begin_waiting(client)
            slow.begin_waiting(client)
        elif kind == "$":
            share.charge(client, count, 2)
            slow.charge(client, count, 2)
        elif client in slow.waiting:
            share.end_waiting(client)
            slow.end_waiting(client)
        assert all(share.served(one) == slow.served[one] for one in slow.waiting)
        assert share.waiting == Counter(slow.waiting)


def test_who_was_idle_is_lifted_to_the_least_that_waits() -> None:
    share = FairShare()
    for client in "ab":
        share.begin_waiting(client)
    share.charge("a", 100)
    share.charge("b", 70)
    share.begin_waiting("c")
    assert share.served("c") == 70


def test_where_nobody_waits_who_begins_is_even_with_the_last_that_did() -> None:
    share = FairShare()
    share.begin_waiting("a")
    share.end_waiting("a")
    share.charge("a", 100)
    share.begin_waiting("b")
    assert share.served("b") == 100


def test_a_client_that_waits_keeps_its_count_however_small() -> None:
    share = FairShare()
    share.begin_waiting("a")
    share.begin_waiting("b")
    share.charge("b", 500)
    share.begin_waiting("a")
    assert (share.served("a"), share.waiting["a"]) == (0, 2)


def test_clients_that_were_idle_for_long_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_share, "IDLE_COUNT_MAX", 10)
    share = FairShare()
    share.begin_waiting("always")
    share.charge("ahead", 10**6)
    for number in range(1000):
        share.begin_waiting(f"client {number}")
        share.charge(f"client {number}", number)
        share.end_waiting(f"client {number}")
    assert len(share) <= 12
    assert share.served("ahead") == 10**6, "who is farthest ahead is forgotten last"
    assert share.served("always") == 0
