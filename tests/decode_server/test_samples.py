"""Samples of one prompt on the real cores of a pair: one cache, and an end for each sample."""

from __future__ import annotations

from itertools import combinations

import pytest

from common.layout.component import FULL, SLOT, Live, LiveKind
from common.protocol.peer import TransferRequest
from common.protocol.worker import PrefillChunk, Step
from common.request import Bootstrap
from common.scheduling.events import Effect, ToPeer, ToWorkers
from decode_server.scheduler import DecodeScheduler
from tests.sim.client import Client
from tests.sim.verdict import check_flush, judge
from tests.sim.world import World

PAGE_SIZE = 4
COUNT = 4
OUTPUT_COUNT = 12
PROMPT = list(range(100, 130))
WINDOW = Live(LiveKind.WINDOW, 6)
TAIL = Live(LiveKind.TAIL, 4, 4)
FAMILIES = {
    "plain": (FULL,),
    "window": (FULL, WINDOW),
    "hybrid": (FULL, SLOT),
    "compressed": (Live(LiveKind.BLOCK, 4), TAIL, WINDOW),
}


class Pair:
    """A prefill and a decode server, and what they tell each other and their workers."""

    def __init__(self, lives: tuple[Live, ...] = (FULL,), page_count: int = 200) -> None:
        self.world = World(seed=1)
        self.world.lives = lives
        self.prefill = self.world.add("p0", "prefill", PAGE_SIZE, 200)
        self.decode = self.world.add("d0", "decode", PAGE_SIZE, page_count)
        self.decode.links = ["p0:1"]
        for node in self.world.nodes.values():
            node.page_counts = tuple(node.pages if live.is_paged else 16 for live in lives)
            node.checkpoint_max = 8
        self.told: list[tuple[str, Effect]] = []
        self.world.watchers.append(lambda node, effect: self.told.append((node.name, effect)))

    @property
    def core(self) -> DecodeScheduler:
        core = self.decode.core
        assert isinstance(core, DecodeScheduler)
        return core

    def submit(self, count: int = COUNT, room: Bootstrap | None = None) -> list[Client]:
        return self.world.submit_samples(self.decode, PROMPT, OUTPUT_COUNT, count, room)

    def asked(self) -> list[TransferRequest]:
        """What the decode server asked for of its clients."""
        messages = [effect.message for _, effect in self.told if isinstance(effect, ToPeer)]
        found = [message for message in messages if isinstance(message, TransferRequest)]
        return [request for request in found if not request.is_self_test]

    def chunks(self, name: str) -> list[PrefillChunk]:
        steps = [
            effect.message
            for node, effect in self.told
            if node == name and isinstance(effect, ToWorkers) and isinstance(effect.message, Step)
        ]
        return [chunk for step in steps for chunk in step.chunks]

    def end(self, *finished: Client) -> None:
        """All are answered, these with whole outputs; nothing is left anywhere."""
        self.world.run(self.world.now + 8.0)
        for client in finished:
            assert client.finals == ["finished"], client.failure
        judge(self.world)
        check_flush(self.world)


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> Pair:
    pair = Pair(FAMILIES[request.param])
    pair.world.begin()
    return pair


def test_one_cache_is_asked_for_and_computed_and_drawn_from_once_for_each(pair: Pair) -> None:
    clients = pair.submit()
    pair.end(*clients)
    (asked,) = pair.asked()
    assert asked.seeds == [client.sample_seed for client in clients]
    drawing = [chunk for chunk in pair.chunks("p0") if chunk.samples]
    assert [[one.seed for one in chunk.samples] for chunk in drawing] == [asked.seeds]
    assert not pair.chunks("d0"), "nothing is computed again"
    assert len({tuple(client.output) for client in clients}) == COUNT, "each draws for itself"


@pytest.mark.parametrize("moment", ["waiting", "transferring", "begun", "running"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_of_the_samples_may_be_given_up_at_any_time(
    pair: Pair, moment: str, count: int
) -> None:
    """Every subset of one size, one prompt after the other."""
    for left in combinations(range(COUNT), count):
        pair.core.account.flush_cache()
        clients = pair.submit()
        if moment != "waiting":
            run_until(pair, clients, moment)
        for index in left:
            pair.world.cancel(clients[index])
        stayed = [client for index, client in enumerate(clients) if index not in left]
        pair.world.run(pair.world.now + 3.0)
        assert all(client.finals == ["finished"] for client in stayed)
    pair.end()


def run_until(pair: Pair, clients: list[Client], moment: str) -> None:
    output_count = {"transferring": 0, "begun": 1, "running": 3}[moment]
    while len(clients[-1].output) < output_count or not pair.asked():
        pair.world.run(pair.world.now + 0.0005)


def test_when_all_are_given_up_nothing_is_computed_for_them_any_more(pair: Pair) -> None:
    clients = pair.submit()
    for client in clients:
        pair.world.cancel(client)
    pair.end()
    assert all(client.finals == ["failed"] for client in clients)


@pytest.mark.parametrize("known_count", [1, 3])
def test_samples_that_the_other_half_knows_nothing_of_ask_for_themselves(
    pair: Pair, known_count: int
) -> None:
    room = Bootstrap("p0", 1, 77)
    clients = pair.submit(room=room)
    firsts = pair.world.submit_samples(pair.prefill, PROMPT, 1, known_count, room)
    pair.end(*clients, *firsts)
    routed, *others = pair.asked()
    assert routed.room == 77 and not routed.seeds
    assert [request.sampling.seed for request in others if request.sampling] == [
        client.sample_seed for client in clients[known_count:]
    ]


def test_a_pool_that_never_holds_all_samples_holds_some_after_the_other() -> None:
    pair = Pair((FULL, SLOT), page_count=200)
    pair.decode.page_counts = (200, 3)  # slots
    pair.decode.checkpoint_max = 0
    pair.world.begin()
    clients = pair.submit(8)
    pair.end(*clients)
    assert [len(request.seeds) for request in pair.asked()] == [3, 3, 2]


def test_without_a_prefix_cache_blocks_are_shared_while_samples_run() -> None:
    pair = Pair((FULL, WINDOW))
    pair.decode.has_prefix_cache = False
    pair.world.begin()
    clients = pair.submit()
    run_until(pair, clients, "running")
    used = pair.core.account.pool.used_count(0)
    whole = len(PROMPT) // PAGE_SIZE
    assert used <= whole + COUNT * 2, "blocks once, and an open page or two for each"
    pair.end(*clients)
    assert pair.core.account.pool.used_count(0) == 0, "nothing is kept"


def test_samples_of_a_prompt_that_is_computed_here_are_forked_here() -> None:
    pair = Pair((FULL, WINDOW, SLOT))
    pair.decode.is_local, pair.decode.links = True, []
    pair.world.begin()
    clients = pair.submit()
    pair.end(*clients)
    assert [len(chunk.samples) for chunk in pair.chunks("d0") if chunk.is_last] == [COUNT]
