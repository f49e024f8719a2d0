"""The pair under a virtual clock: every request ends once and right, every page comes back."""

from __future__ import annotations

from collections import Counter

import pytest

from common.config import Verify
from common.layout.component import SLOT, LiveKind
from common.protocol.frontend import GetState, State
from common.protocol.peer import TransferDone
from common.scheduling.events import FromFrontend, ToFrontend
from common.transfers.incoming import Incoming
from tests.sim.__main__ import has_moves, has_two_steps, problem_of, run_chunk
from tests.sim.mutations import MUTATIONS
from tests.sim.oracle import fold
from tests.sim.planted import Mutation
from tests.sim.replay import of_request
from tests.sim.sim_cache import UNWRITTEN, Known, SimCache
from tests.sim.sim_transfers import SimTransfers
from tests.sim.story import run_story
from tests.sim.tally import missing
from tests.worker.whole_send import WholeSend

# Of the stories below that pass as long as nothing is planted.
PLANTED_SEEDS = range(20)
# 240: a server takes on the other role while some may still write there, and gives itself up.
# 698: a retracted request of a router went beyond its server's credits.
STORY_SEEDS = (*range(60), 240, 251, 698)
MUTATION_SEED_COUNT = 100


@pytest.mark.parametrize("seed", range(20))
def test_without_accidents_every_request_is_answered_right(seed: int) -> None:
    world = run_story(seed, has_accidents=False)
    expected = [
        client
        for client in world.clients.values()
        if not client.is_cancelled and not client.is_orphan and client.role == "decode"
    ]
    failures = [client.failure for client in expected if client.finals != ["finished"]]
    # Three damaged transfers in a row are one too many.
    assert [text for text in failures if not text.startswith("transfer_corrupted")] == []
    assert len(failures) <= 1


def told_story(seed: int) -> Counter[str]:
    """What happened."""
    world = run_story(seed, has_two_steps=has_two_steps(seed), has_moves=has_moves(seed))
    return world.tally


# Of the stories below, what happened in each.
TALLIES: dict[int, Counter[str]] = {}


@pytest.mark.parametrize("seed", STORY_SEEDS)
def test_whatever_breaks_every_request_ends_once_and_no_page_is_lost(seed: int) -> None:
    TALLIES[seed] = told_story(seed)


def test_everything_that_stories_are_for_happens_in_some() -> None:
    for seed in STORY_SEEDS:
        if seed not in TALLIES:
            TALLIES[seed] = told_story(seed)
    assert missing([TALLIES[seed] for seed in STORY_SEEDS]) == []


def fails_somewhere(*, is_verified: bool = False) -> bool:
    for seed in PLANTED_SEEDS:
        try:
            run_story(seed, has_accidents=False, is_verified=is_verified)
        except AssertionError:
            return True
    return False


def test_window_pages_that_are_paired_by_their_place_in_the_list_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if both sides' lists began at the same page: what breaks when page sizes differ."""
    write = SimTransfers.write

    def write_by_place(
        self: SimTransfers, send: WholeSend, rows: list[tuple[int, int]], values: list[object]
    ) -> None:
        groups = self.facts.layout.groups
        places: dict[int, int] = {}
        for group, item in rows:
            places.setdefault(group, item)
        shifted = [
            (
                group,
                item - places[group] + send.target_pages[group][0] * groups[group].page_items,
            )
            if groups[group].live.kind is LiveKind.WINDOW
            else (group, item)
            for group, item in rows
        ]
        write(self, send, shifted, values)  # type: ignore[arg-type]

    monkeypatch.setattr(SimTransfers, "write", write_by_place)
    assert fails_somewhere()


def test_damage_that_nobody_looks_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    handle_done = Incoming.handle_done

    def handle_unseen(self: Incoming, link: str, done: TransferDone) -> object:
        transfer = self.get(done.transfer_id)
        if transfer is not None:
            transfer.verify = Verify.OFF
        return handle_done(self, link, done)

    monkeypatch.setattr(Incoming, "handle_done", handle_unseen)
    assert fails_somewhere(is_verified=True)


def test_damage_is_found_and_handed_over_again() -> None:
    counters = [
        node.core.handle(FromFrontend(GetState(1)), 0.0)
        for seed in range(6)
        for node in run_story(seed, has_accidents=False).nodes.values()
        if node.role == "decode"
    ]
    states = [effect.message for (effect,) in counters if isinstance(effect, ToFrontend)]
    counts = [state.counters for state in states if isinstance(state, State)]
    assert sum(count["mismatched"] for count in counts) > 3
    assert sum(count["verified"] for count in counts) > 30


def test_a_slot_that_is_read_by_its_next_owner_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    write = SimCache.write

    def write_stale(self: SimCache, known: Known, position: int) -> None:
        slots = [group for group, live in enumerate(self.lives) if live == SLOT]
        left = [self.get(known, group, range(1))[0] for group in slots]
        write(self, known, position)
        for group, value in zip(slots, left, strict=True):
            if position == 0 and value != UNWRITTEN:
                self.put(known, group, 0, fold(value, known.tokens[:1]))

    monkeypatch.setattr(SimCache, "write", write_stale)
    assert fails_somewhere()


def test_slots_run_out_in_some_stories() -> None:
    assert any(run_story(seed, has_accidents=False).slots_ran_out for seed in PLANTED_SEEDS)


def test_a_seed_is_the_same_story_among_many_and_when_it_is_replayed() -> None:
    seed, log = 1, list[str]()
    assert has_two_steps(seed)
    problems, tallies = run_chunk(range(seed, seed + 1))
    assert problem_of(seed, log=log) == "" and problems == []
    asked = [line for line in log if "ToPeer(" in line and "TransferRequest(" in line]
    assert tallies[0]["TransferRequest"] == len(asked)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_planted_bug_is_found(mutation: Mutation) -> None:
    index = MUTATIONS.index(mutation)
    # Stories change with the cores: where its seed does not find it any more, another must.
    seeds = [mutation.found_by, *range(MUTATION_SEED_COUNT)]
    assert any(problem_of(seed, index) for seed in seeds)


def test_a_failing_story_is_told_again_from_its_seed() -> None:
    logs: list[list[str]] = [[], []]
    for log in logs:
        run_story(1, log=log)
    assert logs[0] == logs[1]
    told = list(of_request(logs[0], 1))
    assert 0 < len(told) < len(logs[0])
    assert any("Submit(request_id=1," in line for line in told)
