"""Parts of a prefix cache on their way to host memory and back: what is withdrawn meanwhile is in
neither, what is there already is not there twice, and nothing is left of it all."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from common.layout.component import FULL, SLOT, Live
from common.protocol.worker import MovePages, PagesMoved
from common.scheduling import host_tier
from common.scheduling.events import Report, ToWorkers
from common.scheduling.host_tier import LOAD_COUNT_MAX, SPILL_BLOCK_MAX, HostTier
from common.scheduling.peers import Outbox
from common.scheduling.prefix_cache import Match
from tests.scheduling.test_checkpoints import PAGE_SIZE, Rig, digests_of

PROMPT = list(range(100, 130))
RANK_COUNT = 2


@dataclass
class Asks:
    """A request that would begin."""

    request_id: int
    token_ids: list[int]

    @property
    def digests(self) -> bytes:
        return digests_of(self.token_ids)


@dataclass
class Aside:
    """A queue; those that were given up are not in it."""

    given_up: set[int] = field(default_factory=set)
    aside: list[int] = field(default_factory=list)

    def __contains__(self, request_id: int) -> bool:
        return request_id not in self.given_up

    def set_aside(self, request: Asks) -> None:
        self.aside.append(request.request_id)

    def put_back(self, request: Asks) -> None:
        self.aside.remove(request.request_id)


class World:
    """A server whose copies end when they are told to."""

    def __init__(
        self, *lives: Live, count: int = 40, host_count: int = 40, checkpoint_max: int = 4
    ) -> None:
        counts, host_counts = (count,) * len(lives), (host_count,) * len(lives)
        self.rig = Rig(
            *lives, counts=counts, checkpoint_max=checkpoint_max, host_counts=host_counts
        )
        self.account = self.rig.account
        self.queue, self.outbox = Aside(), Outbox()
        self.tier: HostTier[Asks] = HostTier(self.account, self.queue, self.outbox, RANK_COUNT)
        self.sent: list[MovePages] = []

    def compute(self, tokens: list[int]) -> None:
        """A prompt that ends with its first token."""
        sequence = self.rig.open(len(self.sent) + 1000, tokens)
        while not sequence.output_count:
            self.rig.plan()
            self.rig.end()
        self.rig.batcher.remove(sequence)
        while self.rig.sent:
            self.rig.end()

    def save(self) -> bool:
        """All of the pool, as far as one call begins to."""
        is_saving = self.tier.saves_for(self.account.pool.page_counts)
        self.note_sent()
        return is_saving

    def note_sent(self) -> None:
        for effect in self.outbox.take():
            if isinstance(effect, ToWorkers) and isinstance(effect.message, MovePages):
                self.sent.append(effect.message)

    def end_copies(self, error: str = "") -> None:
        """Of all that are under way. Only the last rank has the error."""
        sent, self.sent = self.sent, []
        for move in sent:
            for rank in range(RANK_COUNT):
                is_last = rank == RANK_COUNT - 1
                self.tier.note_moved(PagesMoved(move.move_id, rank, error if is_last else ""))

    def save_all(self) -> None:
        while self.save():
            self.end_copies()

    def load(self, tokens: list[int], *, is_received: bool = False) -> bool:
        """Whether a request waits for it."""
        asks = Asks(len(tokens), tokens)
        waits = self.tier.holds_up(asks, len(tokens) - 1, is_received=is_received)
        self.note_sent()
        return waits

    def in_host(self, tokens: list[int]) -> Match:
        assert self.account.host is not None
        return self.account.host.match(digests_of(tokens), tokens, len(tokens) - 1)

    def check_empty(self) -> None:
        assert self.account.flush_cache() and not self.tier.is_moving and not self.queue.aside
        for pool in (self.account.pool, self.account.host_pool):
            assert pool is not None
            pool.check()
            assert not any(map(pool.used_count, range(len(pool.page_counts))))


KINDS = pytest.mark.parametrize("lives", [(FULL,), (FULL, SLOT)], ids=["full", "hybrid"])


@KINDS
def test_what_leaves_the_pool_is_found_in_host_memory_and_comes_back(
    lives: tuple[Live, ...],
) -> None:
    world = World(*lives)
    world.compute(PROMPT)
    longer = [*PROMPT, 1, 2]
    known = world.rig.match(longer)
    world.save_all()
    assert not world.rig.match(longer).token_count
    assert world.in_host(longer).token_count == known.token_count == len(PROMPT)
    assert world.load(longer) and world.queue.aside
    assert not world.rig.match(longer).token_count, "it is not there yet"
    world.end_copies()
    assert world.rig.match(longer).token_count == known.token_count
    assert not world.load(longer), "all that is known is in the pool"
    world.check_empty()


@KINDS
@pytest.mark.parametrize("is_saved", [False, True], ids=["under way", "saved"])
def test_what_came_out_wrong_is_found_nowhere(lives: tuple[Live, ...], is_saved: bool) -> None:
    """Its sequence is told late, when blocks of it are on their way or in host memory."""
    world = World(*lives)
    sequence = world.rig.open(1, PROMPT)
    while sequence.computed_count < 24:
        world.rig.plan()
        world.rig.end()
    # Another one behind its blocks ends, so that the path to there is saved.
    world.compute([*PROMPT[:24], 7, 8, 9, 7, 8, 9])
    world.save()
    assert world.sent
    if is_saved:
        world.end_copies()
        assert world.in_host(PROMPT).block_count >= 6
    world.account.cached.withdraw(sequence)
    world.end_copies()
    assert not world.in_host(PROMPT).block_count
    assert not world.in_host([*PROMPT[:24], 7, 8, 9, 7, 8, 9, 1]).token_count
    world.rig.batcher.remove(sequence)
    while world.rig.sent:
        world.rig.end()
    world.check_empty()


@KINDS
def test_what_has_changed_in_host_memory_is_forgotten_there(lives: tuple[Live, ...]) -> None:
    world = World(*lives)
    world.compute(PROMPT)
    world.save_all()
    assert world.load([*PROMPT, 1])
    world.end_copies("host memory has changed: page 3 of group full")
    told = [effect for effect in world.outbox.take() if isinstance(effect, Report)]
    assert ["page 3" in one.text and one.is_warning for one in told] == [True]
    assert not world.rig.match([*PROMPT, 1]).token_count
    assert not world.in_host([*PROMPT, 1]).token_count
    assert world.tier.counters["host_failed_loads"] == 1 and not world.queue.aside
    world.check_empty()


def test_a_path_longer_than_a_copy_is_saved_bit_by_bit() -> None:
    block_count = 2 * SPILL_BLOCK_MAX + 5
    world = World(FULL, count=block_count + 2, host_count=block_count + 2)
    tokens = list(range(5, 5 + block_count * PAGE_SIZE))
    world.compute(tokens)
    sizes = []
    while world.save():
        sizes.append(len(world.sent[0].pages[0].source_ids))
        world.end_copies()
    assert sizes == [SPILL_BLOCK_MAX, SPILL_BLOCK_MAX, 5]
    assert world.in_host([*tokens, 1]).block_count == block_count
    world.check_empty()


def test_what_is_computed_while_it_is_loaded_is_not_there_twice() -> None:
    world = World(FULL)
    world.compute(PROMPT)
    world.save_all()
    assert world.load([*PROMPT, 1])
    world.compute(PROMPT)
    used = world.account.pool.used_count(0)
    world.end_copies()
    assert world.account.pool.used_count(0) < used
    world.check_empty()


def test_equal_requests_wait_for_one_copy() -> None:
    world = World(FULL)
    world.compute(PROMPT)
    world.save_all()
    assert world.load([*PROMPT, 1]) and world.load([*PROMPT, 1, 2])
    assert len(world.sent) == 1 and len(world.queue.aside) == 2
    world.queue.given_up.add(len(PROMPT) + 2)
    world.end_copies()
    assert world.queue.aside == [len(PROMPT) + 2], "who was given up is not put back"
    world.queue.aside.clear()
    world.check_empty()


def test_a_request_whose_blocks_others_take_again_is_computed_in_the_end() -> None:
    world = World(FULL)
    world.compute(PROMPT)
    world.save_all()
    for _ in range(LOAD_COUNT_MAX):
        assert world.load([*PROMPT, 1])
        world.end_copies()
        world.save_all()
    assert not world.load([*PROMPT, 1])
    world.queue.given_up.add(len(PROMPT) + 1)
    world.tier.save_ahead()
    world.queue.given_up.clear()
    assert world.load([*PROMPT, 1]), "it has been through the queue since"
    world.end_copies()
    world.check_empty()


def test_a_tier_without_room_loses_what_it_can_not_hold_and_nothing_waits() -> None:
    world = World(FULL, host_count=2)
    world.compute(PROMPT)
    assert not world.save() and not world.sent
    assert not world.rig.match([*PROMPT, 1]).token_count
    world.check_empty()


def test_what_goes_next_is_saved_ahead_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "SAVED_SHARE", 0.9)
    world = World(FULL)
    world.compute(PROMPT)
    world.tier.save_ahead()
    world.note_sent()
    assert world.sent
    world.end_copies()
    world.tier.save_ahead()
    world.note_sent()
    assert not world.sent, "once is enough"
    assert world.rig.match([*PROMPT, 1]).token_count == len(PROMPT)
    used = world.account.pool.used_count(0)
    assert not world.save() and used, "its pages are free at once"
    assert not world.account.pool.used_count(0)
    world.check_empty()
