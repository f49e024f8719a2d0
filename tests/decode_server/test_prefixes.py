"""Prefixes over a pair: what is found here is not asked for again, and nobody keeps it for good.

What is asked, sent and computed is read from the messages of the real cores.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from common.layout.component import FULL, SLOT, Live, LiveKind
from common.protocol.peer import Abort, Heartbeat, TransferRequest
from common.protocol.worker import Send, Step
from common.request import Bootstrap
from common.scheduling.events import Effect, ToPeer, ToWorkers
from decode_server.scheduler import DecodeScheduler
from tests.sim.client import Client
from tests.sim.node import Node
from tests.sim.verdict import check_flush, judge
from tests.sim.world import World

PAGE_SIZE = 4
PROMPT = list(range(100, 140))
WINDOW = Live(LiveKind.WINDOW, 6)
TAIL = Live(LiveKind.TAIL, 4, 4)
BLOCK = Live(LiveKind.BLOCK, 4)
FAMILIES = {
    "plain": (FULL,),
    "window": (FULL, WINDOW),
    "hybrid": (FULL, SLOT),
    "compressed": (BLOCK, TAIL, WINDOW),
}


class Pair:
    """Prefill servers, a decode server, and all that they tell each other and their workers."""

    def __init__(
        self, lives: tuple[Live, ...] = (FULL,), *, prefill_count: int = 1, page_count: int = 200
    ) -> None:
        self.world = World(seed=1)
        self.world.lives = lives
        names = [f"p{index}" for index in range(prefill_count)]
        for name in names:
            self.world.add(name, "prefill", PAGE_SIZE, 200)
        self.decode = self.world.add("d0", "decode", PAGE_SIZE, page_count)
        self.decode.links = [f"{name}:1" for name in names]
        for node in self.world.nodes.values():
            counts = [node.pages if live.is_paged else 16 for live in lives]
            node.page_counts = tuple(counts)
            node.checkpoint_max = 8
        self.told: list[tuple[str, Effect]] = []
        self.world.watchers.append(lambda node, effect: self.told.append((node.name, effect)))

    def begin(self) -> None:
        self.world.begin()

    @property
    def core(self) -> DecodeScheduler:
        core = self.decode.core
        assert isinstance(core, DecodeScheduler)
        return core

    @property
    def prefill(self) -> Node:
        return self.world.nodes["p0"]

    def counted(self, name: str, counter: str) -> float:
        return self.world.nodes[name].state().counters[counter]

    def submit(self, prompt: list[int], count: int = 6, room: Bootstrap | None = None) -> Client:
        return self.world.submit(self.decode, prompt, count, room)

    def finish(self, *clients: Client) -> None:
        """Until all have their answers, which must be right."""
        self.world.run(self.world.now + 8.0)
        for client in clients:
            assert client.finals == ["finished"], client.failure
            assert client.output == client.expected(self.world.lives)

    def turn(self, prompt: list[int], count: int = 6) -> Client:
        client = self.submit(prompt, count)
        self.finish(client)
        return client

    @property
    def asked(self) -> list[tuple[str, TransferRequest]]:
        """Of whom, and what; self-tests aside."""
        return [
            (effect.link, effect.message)
            for _, effect in self.told
            if isinstance(effect, ToPeer)
            and isinstance(effect.message, TransferRequest)
            and not effect.message.is_self_test
        ]

    @property
    def sent(self) -> list[Send]:
        messages = [effect.message for _, effect in self.told if isinstance(effect, ToWorkers)]
        return [message for message in messages if isinstance(message, Send)]

    def computed_count(self, name: str) -> int:
        """Prompt tokens that a server has computed."""
        messages = [
            effect.message
            for at, effect in self.told
            if at == name and isinstance(effect, ToWorkers)
        ]
        steps = [message for message in messages if isinstance(message, Step)]
        return sum(chunk.stop - chunk.start for step in steps for chunk in step.chunks)

    def ask(self, prompt: list[int]) -> tuple[Client, str, TransferRequest]:
        """Submit a prompt that is asked for at once. Returns of whom as well, and what."""
        known = len(self.asked)
        client = self.submit(prompt)
        ((link, message),) = self.asked[known:]
        return client, link, message

    def end(self) -> None:
        self.world.run(self.world.now + 4.0)
        judge(self.world)
        check_flush(self.world)


def pair_of(lives: tuple[Live, ...] = (FULL,), **options: int) -> Pair:
    pair = Pair(lives, **options)
    pair.begin()
    return pair


# ---- only the rest is sent -----------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_turn_asks_from_where_its_blocks_end_and_moves_nothing_before(family: str) -> None:
    pair = pair_of(FAMILIES[family])
    first = pair.turn(PROMPT)
    sent_count = len(pair.sent)
    second = pair.turn([*PROMPT, *first.output, 7, 8, 9])
    known_count = len(PROMPT) + len(first.output) - 1  # the last token was never fed
    start = known_count // PAGE_SIZE * PAGE_SIZE
    assert pair.asked[-1][1].token_start == start
    sends = pair.sent[sent_count:]
    assert min(send.token_start for send in sends) == start
    assert sum(send.token_stop - send.token_start for send in sends) == len(second.prompt) - start
    assert pair.counted("d0", "transfer_tokens_spared") == start
    assert second.cached_count == start
    pair.end()


@pytest.mark.parametrize("family", FAMILIES)
def test_of_a_prompt_that_is_all_here_only_windows_tails_and_slots_are_sent(family: str) -> None:
    pair = pair_of(FAMILIES[family])
    pair.turn(PROMPT)
    sent_count = len(pair.sent)
    pair.turn(PROMPT)
    (send,) = pair.sent[sent_count:]
    assert (send.token_start, send.token_stop, send.is_final) == (len(PROMPT), len(PROMPT), True)
    growing = [index for index, live in enumerate(FAMILIES[family]) if live.is_streamable]
    assert all(pair.asked[-1][1].pages[index][1] == [] for index in growing)
    pair.end()


def test_a_source_that_sends_no_rest_is_asked_for_all() -> None:
    pair = pair_of()
    pair.turn(PROMPT)
    (source,) = pair.core.transfers.links.connections.sources()
    source.remote = replace(source.remote, sends_rest=False)
    pair.turn(PROMPT)
    assert [message.token_start for _, message in pair.asked] == [0, 0]
    pair.end()


# ---- nobody keeps it for good --------------------------------------------------------------------


def test_a_client_that_leaves_during_its_transfer_lets_go_of_what_was_held() -> None:
    pair = pair_of()
    pair.turn(PROMPT)
    assert pair.core.account.cache is not None
    tree = pair.core.account.cache.tree
    client, _, message = pair.ask([*PROMPT, 1, 2, 3])
    assert message.token_start == len(PROMPT)
    assert tree.locked_block_count == len(PROMPT) // PAGE_SIZE
    pair.world.cancel(client)
    assert tree.locked_block_count == 0
    assert any(isinstance(e, ToPeer) and isinstance(e.message, Abort) for _, e in pair.told)
    pair.end()


def test_a_retracted_request_asks_for_what_others_have_not_evicted() -> None:
    pair = Pair(page_count=40)
    pair.decode.expects_short_outputs = True
    pair.begin()
    prompts = [list(range(100 * index, 100 * index + 12)) for index in (3, 4)]
    clients = [pair.submit(prompt, 80) for prompt in prompts]
    pair.finish(*clients)
    assert pair.world.retraction_count > 0
    (again,) = [message for _, message in pair.asked if message.token_count > len(prompts[0])]
    assert again.token_start > len(prompts[0]), "the other one needed a few pages more"
    pair.end()


# ---- computed here -------------------------------------------------------------------------------


def quick_pair(*, computes_rests: bool) -> Pair:
    """Its decode server computes in a tenth of the time that asking takes."""
    pair = Pair()
    pair.decode.computes_rests = computes_rests
    pair.decode.prompt_token_s = 0.00001
    pair.begin()
    pair.turn(PROMPT)
    return pair


def test_a_short_rest_is_computed_here_when_that_is_quicker() -> None:
    pair = quick_pair(computes_rests=True)
    before = pair.computed_count("p0")
    second = pair.turn([*PROMPT, 7, 8, 9])
    assert len(pair.asked) == 1 and pair.computed_count("p0") == before
    assert pair.computed_count("d0") == 3 and second.cached_count == len(PROMPT)
    assert pair.counted("d0", "local_prefills") == 1
    pair.end()


def test_no_rest_is_computed_where_that_is_switched_off() -> None:
    pair = quick_pair(computes_rests=False)
    pair.turn([*PROMPT, 7, 8, 9])
    assert len(pair.asked) == 2 and pair.computed_count("d0") == 0
    pair.end()


def test_no_rest_is_computed_whose_other_half_waits_on_another_server() -> None:
    pair = quick_pair(computes_rests=True)
    prompt, room = [*PROMPT, 7, 8, 9], Bootstrap("p0", 1, 77)
    halves = [pair.world.submit(node, prompt, 6, room) for node in (pair.decode, pair.prefill)]
    pair.world.run(pair.world.now + 8.0)
    assert [half.finals for half in halves] == [["finished"]] * 2
    assert pair.asked[-1][1].room == 77 and pair.computed_count("d0") == 0
    pair.end()


# ---- who is asked --------------------------------------------------------------------------------


def knowing_pair() -> tuple[Pair, str]:
    """Two prefill servers, of which one has the prompt cached. Returns its link as well."""
    pair = Pair(prefill_count=2)
    pair.decode.prompt_token_s = 0.001
    other = pair.world.add("d1", "decode", PAGE_SIZE, 200)
    other.links, other.page_counts = pair.decode.links, (200,)
    pair.begin()
    pair.finish(pair.world.submit(other, PROMPT, 6))
    return pair, pair.asked[-1][0]


def test_a_prefill_server_that_has_the_prefix_is_preferred() -> None:
    for ending in range(2):
        pair, link = knowing_pair()
        assert pair.ask([*PROMPT, ending])[1] == link


def test_a_prefill_server_that_has_the_prefix_and_much_to_do_is_not() -> None:
    pair, link = knowing_pair()
    sources = pair.core.transfers.links.connections.sources()
    (source,) = [source for source in sources if source.link == link]
    source.liveness.queued_token_count = 10_000
    assert pair.ask([*PROMPT, 1])[1] != link


def test_a_server_tells_what_it_has_cached_once_and_again_after_a_change() -> None:
    pair = pair_of()
    told_counts: list[int] = []
    for prompt in (PROMPT, list(range(500, 540))):
        pair.turn(prompt)
        told_counts.append(len(marks_told(pair)))
        pair.world.run(pair.world.now + 3.0)
        assert len(marks_told(pair)) == told_counts[-1], "nothing has changed"
    told = marks_told(pair)
    assert 0 < told_counts[0] < told_counts[1]
    assert all(one != other for one, other in pairwise(told))
    assert len(told[-1]) > len(told[told_counts[0] - 1]) > 0


def marks_told(pair: Pair) -> list[bytes]:
    beats = [
        effect.message
        for _, effect in pair.told
        if isinstance(effect, ToPeer) and isinstance(effect.message, Heartbeat)
    ]
    return [beat.cached_prefixes for beat in beats if beat.cached_prefixes is not None]


# ---- together ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["plain", "hybrid"])
def test_equal_prompts_on_a_decode_server_alone_wait_for_one_another(family: str) -> None:
    world = World(seed=1)
    world.lives = FAMILIES[family]
    node = world.add("d0", "decode", PAGE_SIZE, 200)
    node.is_local, node.checkpoint_max = True, 8
    node.page_counts = tuple(200 if live.is_paged else 16 for live in world.lives)
    world.begin()
    chunks: list[int] = []

    def note(node: Node, effect: Effect) -> None:
        message = effect.message if isinstance(effect, ToWorkers) else None
        if isinstance(message, Step):
            chunks.extend(chunk.stop - chunk.start for chunk in message.chunks)

    world.watchers.append(note)
    clients = [world.submit(node, PROMPT, 6) for _ in range(3)]
    world.run(world.now + 5.0)
    assert [client.output for client in clients] == [clients[0].expected(world.lives)] * 3
    assert sum(chunks) == len(PROMPT) + 2 * PAGE_SIZE
    judge(world)


def test_equal_prompts_are_sent_once() -> None:
    pair = pair_of()
    pair.finish(*[pair.submit([*PROMPT, 1, 2, 3]) for _ in range(3)])
    starts = [message.token_start for _, message in pair.asked]
    assert starts == [0, len(PROMPT), len(PROMPT)]
    pair.end()
