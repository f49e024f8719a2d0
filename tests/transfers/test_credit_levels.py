"""How a queue is shared among decode servers: levels alone, without messages."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from common.transfers.credits import Credits


def levels(queue_max: int, counts: list[int], other_count: int = 0) -> list[int]:
    """Of decode servers with so many requests open each."""
    credits = Credits(queue_max)
    peers = [f"d{index}" for index in range(len(counts))]
    for peer, count in zip(peers, counts, strict=True):
        for _ in range(count):
            credits.begin(peer)
    credits.update(peers, sum(counts) + other_count)
    return [credits.report(peer) for peer in peers]


def test_one_alone_may_have_all_of_the_queue() -> None:
    assert levels(64, [0]) == [32] and levels(64, [32]) == [64] and levels(64, [64]) == [64]


def test_who_has_nothing_open_may_begin_at_once() -> None:
    assert levels(64, [0, 0, 0, 0]) == [8, 8, 8, 8]
    assert levels(64, [20, 0, 0, 0]) == [40, 8, 8, 8]


def test_all_that_have_something_open_get_the_same() -> None:
    assert levels(64, [8, 9, 10, 11]) == [16, 16, 16, 16]


def test_what_is_above_its_share_is_left_to_others_as_it_ends() -> None:
    assert levels(64, [60, 1]) == [60, 4]
    assert levels(64, [40, 16]) == [40, 24]


def test_a_level_at_most_doubles_for_others_are_told_at_the_same_time() -> None:
    assert levels(64, [1, 3, 12, 2]) == [9, 11, 16, 10]
    assert levels(64, [12, 0]) == [28, 16] and levels(64, [20, 0]) == [40, 16]


def test_what_routers_bring_is_nobodys() -> None:
    assert levels(64, [8, 8], other_count=32) == [16, 16]
    assert levels(64, [2, 0], other_count=62) == [2, 0]


@example(queue_max=12, counts=[0, 0, 9], other_count=0)
@given(
    st.integers(1, 100), st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(0, 40)
)
def test_levels_take_nothing_away_and_add_up_to_the_queue(
    queue_max: int, counts: list[int], other_count: int
) -> None:
    found = levels(queue_max, counts, other_count)
    room = max(0, queue_max - sum(counts) - other_count)
    for count, level in zip(counts, found, strict=True):
        assert count <= level <= count + room
    # Where the queue has fewer places than there are servers, each idle one may try for one.
    extra = sum(level - count for count, level in zip(counts, found, strict=True))
    assert extra <= max(room, counts.count(0))


def test_only_who_has_used_all_is_told_at_once() -> None:
    credits, peers = Credits(8), ["d0", "d1"]
    credits.update(peers, 0)
    assert [credits.report(peer) for peer in peers] == [2, 2]
    credits.begin("d0")
    assert credits.update(peers, 1) == []
    credits.begin("d0")
    assert credits.update(peers, 2) == ["d0"]
    assert credits.report("d0") == 4 and credits.update(peers, 2) == []


def test_who_was_refused_is_told_once_there_is_room() -> None:
    credits, peers = Credits(2), ["d0", "d1"]
    credits.update(peers, 0)
    for peer in peers:
        credits.report(peer)
    credits.begin("d0")
    credits.begin("d0")
    credits.update(peers, 2)
    credits.note_refused("d1")
    assert credits.update(peers, 2) == []
    credits.end("d0")
    assert credits.update(peers, 1) == ["d1"]
