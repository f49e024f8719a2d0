"""Whose turn it is: the more urgent first, then who has begun, then who was served least."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st

from common.request import Claim
from common.scheduling.waiting_queue import FIRST_COUNT, LOOK_COUNT_MAX, WaitingQueue
from tests.scheduling.test_fair_share import SlowShare

CLAIMS = [Claim(priority, client) for priority in (-1, 0, 7) for client in ("", "a", "b")]


@dataclass(frozen=True)
class Waits:
    request_id: int
    claim: Claim = field(default_factory=Claim)


def ids(queue: WaitingQueue[Waits]) -> list[int]:
    return [one.request_id for one in queue.in_order()]


class SlowQueue:
    """All that wait in one list, which is sorted whenever it is asked for."""

    def __init__(self) -> None:
        self.share = SlowShare()
        self.all: list[tuple[bool, int, Waits]] = []
        self.aside: set[int] = set()
        self.count = 0

    def add(self, one: Waits, *, is_new: bool) -> None:
        self.count += 1
        self.all.append((is_new, self.count, one))
        self.share.begin_waiting(one.claim.client)

    def discard(self, one: Waits) -> None:
        self.all = [entry for entry in self.all if entry[2] is not one]
        self.aside.discard(one.request_id)
        self.share.end_waiting(one.claim.client)

    def next_of(self, left: list[tuple[bool, int, Waits]]) -> tuple[bool, int, Waits]:
        """Of equal priority, of the client that was served least, and of those the first."""
        oldest = {
            client: min(entry[1] for entry in left if entry[0] and entry[2].claim == client)
            for client in {entry[2].claim for entry in left if entry[0]}
        }

        def key(entry: tuple[bool, int, Waits]) -> tuple[int, bool, int, int, int]:
            is_new, ticket, one = entry
            served = self.share.served[one.claim.client] if is_new else 0
            first = oldest[one.claim] if is_new else 0
            return -one.claim.priority, is_new, served, first, ticket

        return min(left, key=key)

    def in_order(self) -> list[int]:
        left = [entry for entry in self.all if entry[2].request_id not in self.aside]
        order = []
        while left:
            entry = self.next_of(left)
            left.remove(entry)
            order.append(entry[2].request_id)
        return order


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_it_is_the_order_of_a_list_that_is_sorted_anew(data: st.DataObject) -> None:
    queue, slow = WaitingQueue[Waits](), SlowQueue()
    waiting: list[Waits] = []
    for number in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["add", "add", "again", "gone", "aside", "back", "$"]))
        if action in ("add", "again"):
            one = Waits(number, data.draw(st.sampled_from(CLAIMS)))
            (queue.add if action == "add" else queue.add_again)(one)
            slow.add(one, is_new=action == "add")
            waiting.append(one)
        elif action == "$":
            client = data.draw(st.sampled_from(["", "a", "b"]))
            queue.share.charge(client, number)
            slow.share.charge(client, number)
        elif waiting:
            one = data.draw(st.sampled_from(waiting))
            if action == "gone":
                queue.discard(one)
                slow.discard(one)
                waiting.remove(one)
            elif action == "aside":
                queue.set_aside(one)
                slow.aside.add(one.request_id)
            else:
                queue.put_back(one)
                slow.aside.discard(one.request_id)
        assert ids(queue) == slow.in_order()
        assert len(queue) == len(waiting)
        assert sorted(one.request_id for one in queue) == sorted(w.request_id for w in waiting)
    assert not slow.in_order() or queue.first is not None


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(CLAIMS), st.integers(1, 50)), max_size=40))
def test_who_is_taken_and_charged_one_by_one_is_always_next(
    requests: list[tuple[Claim, int]],
) -> None:
    """A round that admits one after the other asks for the order once."""
    queue, slow = WaitingQueue[Waits](), SlowQueue()
    costs: dict[int, int] = {}
    for number, (claim, cost) in enumerate(requests):
        one, costs[number] = Waits(number, claim), cost
        queue.add(one)
        slow.add(one, is_new=True)
    for one in queue.in_order():
        (expected, *_) = slow.in_order()
        assert one.request_id == expected
        for each in (queue, slow):
            each.discard(one)
            each.share.charge(one.claim.client, costs[one.request_id])
    assert len(queue) == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(CLAIMS), min_size=1, max_size=40), st.sampled_from(CLAIMS))
def test_who_waits_is_before_one_that_comes_now_as_it_is_counted(
    claims: list[Claim], claim: Claim
) -> None:
    """Where all cost the same, and all clients were served the same, one more or less aside."""
    queue = WaitingQueue[Waits]()
    for number, each in enumerate(claims):
        queue.add(Waits(number, each))
    before = queue.count_before(claim)
    last = Waits(len(claims), claim)
    queue.add(last)
    served_before = 0
    for one in queue.in_order():
        if one is last:
            break
        served_before += 1
        queue.discard(one)
        queue.share.charge(one.claim.client, 1)
    # Those more urgent have charged their clients unevenly.
    uneven = sum(one.priority > claim.priority for one in claims)
    assert before - 3 - uneven <= served_before <= before + uneven


def test_what_comes_back_waits_before_what_is_new_and_in_its_own_order() -> None:
    queue, requests = WaitingQueue[Waits](), [Waits(number) for number in range(5)]
    for one in requests:
        queue.add(one)
    for one in requests[:3]:
        queue.discard(one)
    assert ids(queue) == [3, 4] and len(queue) == 2
    for one in requests[:3]:
        queue.add_again(one)
    queue.discard(requests[1])
    assert ids(queue) == [0, 2, 3, 4] and len(queue) == 4
    assert 2 in queue and 1 not in queue


def test_of_a_long_queue_the_first_are_looked_at_every_time_and_the_others_in_turn() -> None:
    queue = WaitingQueue[Waits]()
    for number in range(30):
        queue.add(Waits(number))
    others: list[int] = []
    for _ in range(6):
        # The one that a round stops at is the first of the next one.
        looked = [one.request_id for one in islice(queue.looks(), FIRST_COUNT + 5)][:-1]
        assert looked[:FIRST_COUNT] == list(range(FIRST_COUNT))
        others += looked[FIRST_COUNT:]
    assert others == [*range(8, 30), 8, 9]
    assert sorted(one.request_id for one in queue.looks()) == list(range(30))


def test_the_less_urgent_are_looked_at_after_those_that_are_more_so() -> None:
    queue = WaitingQueue[Waits]()
    for number in range(20):
        queue.add(Waits(number, Claim(0)))
        queue.add(Waits(100 + number, Claim(5)))
    for _ in range(5):
        looked = [one.request_id for one in queue.looks()]
        assert sorted(looked[:20]) == list(range(100, 120)) and len(looked) == 40


def test_a_round_is_bounded_for_each_priority() -> None:
    queue = WaitingQueue[Waits]()
    for number in range(500):
        queue.add(Waits(number, Claim(number % 2)))
    looked = [one.claim.priority for one in queue.looks()]
    assert looked == [1] * LOOK_COUNT_MAX + [0] * LOOK_COUNT_MAX


def test_who_leaves_is_not_counted_among_the_first() -> None:
    queue = WaitingQueue[Waits]()
    for number in range(40):
        queue.add(Waits(number))
    list(islice(queue.looks(), 30))  # so that others would be next in turn
    taken = []
    for one in islice(queue.looks(), 25):
        taken.append(one.request_id)
        queue.discard(one)
    assert taken == list(range(25))


def test_a_more_urgent_one_or_one_of_a_client_with_less_takes_the_place_of_the_last() -> None:
    queue = WaitingQueue[Waits]()
    for number in range(4):
        queue.add(Waits(number, Claim(0, "flood")))
    queue.add_again(Waits(10, Claim(-5, "begun")))
    queue.add(Waits(11, Claim(0, "few")))

    def displaced(claim: Claim) -> int | None:
        one = queue.displaced_by(claim)
        return one.request_id if one is not None else None

    assert displaced(Claim(0, "flood")) is None
    assert displaced(Claim(-1, "new")) is None
    assert displaced(Claim(0, "new")) == displaced(Claim(0, "few")) == 3
    assert displaced(Claim(1, "flood")) == 3
