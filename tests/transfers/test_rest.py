"""Only the rest of a cache moves: a borrower that has its beginning asks from there on."""

from __future__ import annotations

import pytest

from common.config import TransferMode
from common.layout.component import FULL, SLOT, Live, LiveKind
from common.protocol.worker import Send
from common.transfers.introduction import Introduction
from tests.sim.world import World
from tests.transfers.lending import LendingNode
from tests.transfers.test_one_role import (
    BLOCK,
    MODES,
    ROOM,
    check_lent,
    connected,
    used_counts,
)

# Pages of the first server have 4 tokens, of the second 8.
PROMPT = [7 + 5 * place for place in range(24)]
ITEM_NBYTES = 8
ALL_KINDS = (FULL, BLOCK, Live(LiveKind.WINDOW, 6), Live(LiveKind.TAIL, 5, 2), SLOT)


def borrow(
    world: World, lender: LendingNode, borrower: LendingNode, token_start: int, tokens: list[int]
) -> list[Send]:
    """Have a cache come behind a prefix, and wait; returns what the lender's ranks were sent."""
    lender.hold(ROOM, tokens)
    sends: list[Send] = []
    send = lender.worker.transfers.send

    def send_noted(message: Send, finished_step: int) -> None:
        sends.append(message)
        send(message, finished_step)

    lender.worker.transfers.send = send_noted  # type: ignore[method-assign]
    prefix = borrower.keep_prefix(token_start)
    borrower.lending.ask(lender.facts.incarnation, ROOM, tokens, prefix)
    world.run(world.now + 3.0)
    return sends


@pytest.mark.parametrize("token_start", [0, 8, 24])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_dialler", [False, True])
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_cache_comes_behind_a_prefix_that_no_byte_touches(
    role: str, is_dialler: bool, mode: TransferMode, token_start: int
) -> None:
    """Compared as well: digests of both sides begin where the transfer does."""
    world, first, second = connected(role, mode)
    lender, borrower = (second, first) if is_dialler else (first, second)
    before = used_counts(borrower)
    borrow(world, lender, borrower, token_start, PROMPT)
    assert [lent.transfer.token_start for lent in borrower.lending.arrived] == [token_start]
    counters = borrower.lending.transfers.incoming.counters
    assert counters["verified"] == 1.0
    assert counters["transfer_tokens_spared"] == token_start
    assert counters["transfer_nbytes_spared"] == ITEM_NBYTES * (token_start + token_start // 4)
    check_lent(world, borrower)
    borrower.drop_prefixes()
    world.run(world.now + 1.0)
    assert used_counts(borrower) == before


@pytest.mark.parametrize("token_start", [0, 8, 16, 24])
@pytest.mark.parametrize("mode", MODES)
def test_windows_tails_and_slots_come_whole_behind_any_prefix(
    mode: TransferMode, token_start: int
) -> None:
    world, first, second = connected("prefill", mode, lives=ALL_KINDS)
    borrow(world, first, second, token_start, PROMPT)
    assert [lent.transfer.token_start for lent in second.lending.arrived] == [token_start]
    check_lent(world, second)
    second.drop_prefixes()


def test_what_a_borrower_has_is_in_no_send_and_the_final_send_always_goes() -> None:
    """Sends that end at 5, 16 and 20 of 24 tokens are asked for."""
    ranges: dict[int, list[tuple[int, int, bool]]] = {}
    for token_start in (0, 16, 24):
        world, lender, borrower = connected("prefill")
        lender.lending.early_stops = [5, 16, 20]
        sends = borrow(world, lender, borrower, token_start, PROMPT)
        ranges[token_start] = [(s.token_start, s.token_stop, s.is_final) for s in sends]
        assert len(borrower.lending.arrived) == 1
        assert not lender.worker.transfers.transfers, "the workers forget the pages"
    assert ranges == {
        0: [(0, 5, False), (5, 16, False), (16, 20, False), (20, 24, True)],
        16: [(16, 20, False), (20, 24, True)],
        24: [(24, 24, True)],
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_crash", [False, True])
def test_a_transfer_that_fails_gives_back_its_own_pages_and_none_of_the_prefix(
    mode: TransferMode, is_crash: bool
) -> None:
    world, lender, borrower = connected("prefill", mode)
    before = used_counts(borrower)
    lender.hold(ROOM, PROMPT)
    prefix = borrower.keep_prefix(16)
    kept = used_counts(borrower)
    borrower.lending.ask(lender.facts.incarnation, ROOM, PROMPT, prefix)
    incoming = borrower.lending.transfers.incoming
    (transfer,) = incoming.under_way
    assert used_counts(borrower) == [count + 1 for count in kept], "a page of each group is new"
    while not lender.worker.transfers.transfers:
        world.run(world.now + 0.0005)
    if is_crash:
        lender.crash(0.5)
    else:
        incoming.abandon(transfer, "not needed any more")
    world.run(world.now + 6.0)
    assert used_counts(borrower) == kept and incoming.abandoned_count == 0
    assert incoming.counters["transfer_tokens_spared"] == 0.0
    borrower.drop_prefixes()
    assert used_counts(borrower) == before


def test_a_request_that_is_given_up_before_anything_is_left_to_send_ends() -> None:
    """Nothing was sent, so no rank of the lender knows the transfer."""
    world, lender, borrower = connected("prefill")
    prefix = borrower.keep_prefix(16)
    borrower.lending.ask(lender.facts.incarnation, ROOM, PROMPT, prefix)  # it holds no such room
    world.run(world.now + 1.0)
    assert [failure.kind for failure in borrower.lending.failed] == ["not_held"]
    assert not lender.worker.transfers.transfers
    borrower.drop_prefixes()


def test_a_server_says_whether_it_can_send_a_rest() -> None:
    _, first, second = connected("decode")
    connections = second.lending.transfers.links.connections
    source = connections.of_incarnation(first.facts.incarnation)
    assert source is not None and source.remote.sends_rest
    for sends in (False, True):
        introduction = Introduction(first.facts, "decode", sends=sends, receives=True)
        assert introduction.hello().sends_rest == introduction.welcome(None, 2).sends_rest == sends
