"""Two servers of one role hand a cache from one to the other: the transfer half knows no roles."""

from __future__ import annotations

import pytest

from common.config import TransferMode, Verify
from common.layout.component import FULL, Live, LiveKind
from tests.sim.oracle import seen
from tests.sim.sim_cache import Known
from tests.sim.world import World
from tests.transfers.lending import POISON, LendingNode, lending_pair

PROMPT = [7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43]
ROOM = 3
# A running sequence moves its windows along, so what is lent are groups that only grow.
BLOCK = Live(LiveKind.BLOCK, 4)
MODES = (TransferMode.DIRECT, TransferMode.STAGED, TransferMode.AUTO)


def connected(
    role: str,
    mode: TransferMode = TransferMode.DIRECT,
    transport: str = "posix",
    lives: tuple[Live, ...] = (FULL, BLOCK),
) -> tuple[World, LendingNode, LendingNode]:
    world = World(11)
    world.lives = lives
    world.transport = transport
    world.is_honest = True
    pair = lending_pair(world, role)
    for node in pair:
        node.transfer_mode, node.verify = mode, Verify.FULL
    world.begin()
    return world, *pair


def used_counts(node: LendingNode) -> list[int]:
    pool = node.core.account.pool
    groups = range(len(pool.page_counts))
    return [pool.used_count(g) + pool.quarantined_count(g) for g in groups]


def check_lent(world: World, borrower: LendingNode) -> None:
    """What arrived is what the oracle says of its tokens, behind a prefix that is as it was. Its
    pages are given back."""
    for lent in borrower.lending.arrived:
        pages = [dict(enumerate(span.page_ids, span.first_index)) for span in lent.transfer.spans]
        known = Known(lent.tokens, pages)
        for group, live in enumerate(world.lives):
            items = live.items(len(lent.tokens))
            wanted = seen(lent.tokens, live)
            wanted = wanted[len(wanted) - len(items) :]
            if live.is_streamable:
                count = lent.transfer.token_start // max(1, live.size)
                wanted[:count] = [POISON] * count
            assert borrower.worker.cache.get(known, group, items) == wanted
    give_back(borrower)


def give_back(borrower: LendingNode) -> None:
    """Pages of a cache that came are its owner's, as those of a sequence are."""
    while borrower.lending.arrived:
        for group, (_, pages) in enumerate(borrower.lending.arrived.pop().transfer.pages):
            borrower.core.account.pool.release(group, pages)


@pytest.mark.parametrize("is_dialler", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_cache_goes_from_either_of_two_to_the_other(
    role: str, mode: TransferMode, is_dialler: bool
) -> None:
    world, first, second = connected(role, mode)
    lender, borrower = (second, first) if is_dialler else (first, second)
    before = used_counts(borrower)
    lender.hold(ROOM, PROMPT)
    borrower.lending.ask(lender.facts.incarnation, ROOM, PROMPT)
    world.run(world.now + 3.0)
    assert [lent.tokens for lent in borrower.lending.arrived] == [PROMPT]
    assert borrower.lending.transfers.incoming.counters["verified"] == 1.0
    check_lent(world, borrower)
    world.run(world.now + 1.0)
    assert used_counts(borrower) == before


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_both_directions_of_one_connection_carry_caches_at_once(role: str) -> None:
    world, first, second = connected(role)
    first.hold(ROOM, PROMPT)
    second.hold(ROOM + 1, PROMPT[::-1])
    second.lending.ask(first.facts.incarnation, ROOM, PROMPT)
    first.lending.ask(second.facts.incarnation, ROOM + 1, PROMPT[::-1])
    world.run(world.now + 3.0)
    for node, tokens in ((second, PROMPT), (first, PROMPT[::-1])):
        assert [lent.tokens for lent in node.lending.arrived] == [tokens]
        check_lent(world, node)


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_what_is_not_held_is_refused_and_its_pages_come_back(role: str) -> None:
    world, first, second = connected(role)
    before = used_counts(second)
    second.lending.ask(first.facts.incarnation, ROOM, PROMPT)
    world.run(world.now + 1.0)
    assert [failure.kind for failure in second.lending.failed] == ["not_held"]
    assert used_counts(second) == before


@pytest.mark.parametrize("linger_s", [0.0, 1.5])
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_pages_are_quarantined_until_a_lender_that_crashed_can_not_write(
    role: str, linger_s: float
) -> None:
    """Its worker may outlive it, stopped, with bytes on their way."""
    world, first, second = connected(role)
    before = used_counts(second)
    first.hold(ROOM, PROMPT)
    second.lending.ask(first.facts.incarnation, ROOM, PROMPT)
    while not first.worker.transfers.transfers:
        world.run(world.now + 0.0005)
    first.crash(linger_s)
    world.run(world.now + 1.2)
    if linger_s:
        assert used_counts(second) != before, "its writer may still write"
    world.run(world.now + 5.0)
    assert [failure.kind for failure in second.lending.failed] == ["peer_lost"]
    assert used_counts(second) == before


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_transfer_that_is_given_up_gives_its_pages_back_when_its_writer_is_quiet(
    role: str, mode: TransferMode
) -> None:
    world, first, second = connected(role, mode)
    before = used_counts(second)
    first.hold(ROOM, PROMPT)
    second.lending.ask(first.facts.incarnation, ROOM, PROMPT)
    incoming = second.lending.transfers.incoming
    (transfer,) = incoming.under_way
    world.run(world.now + 0.004)
    if incoming.get(transfer.transfer_id) is transfer:
        incoming.abandon(transfer, "not needed any more")
    assert used_counts(second) != before
    world.run(world.now + 5.0)
    give_back(second)
    world.run(world.now + 1.0)
    assert used_counts(second) == before and incoming.abandoned_count == 0
