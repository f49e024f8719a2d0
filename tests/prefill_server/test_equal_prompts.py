"""Prompts that begin alike and arrive together: what one computes, the others wait for."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from common.failures import Failure, FailureKind
from common.protocol.worker import Step
from common.scheduling.events import Effect, FromPeer, ToWorkers
from prefill_server.scheduler import PrefillScheduler
from tests.prefill_server.test_links import reservation
from tests.sim.client import Client
from tests.sim.node import Node
from tests.sim.world import World

PAGE_SIZE = 4
CHUNK_TOKENS = 24  # as simulated servers have it
PROMPT_TOKENS = 200
PAGE_COUNT = 1000


class Watched:
    """A pair with room for all, and what its prefill server computes."""

    def __init__(self) -> None:
        self.world = World(seed=1)
        self.world.add("p0", "prefill", PAGE_SIZE, PAGE_COUNT)
        self.world.add("d0", "decode", PAGE_SIZE, PAGE_COUNT).links = ["p0:1"]
        self.world.begin()
        self.steps: list[Step] = []
        self.world.watchers.append(self._note)

    def _note(self, node: Node, effect: Effect) -> None:
        if node.name == "p0" and isinstance(effect, ToWorkers) and isinstance(effect.message, Step):
            self.steps.append(effect.message)

    @property
    def core(self) -> PrefillScheduler:
        core = self.world.nodes["p0"].core
        assert isinstance(core, PrefillScheduler)
        return core

    def submit(self, prompts: list[list[int]]) -> list[Client]:
        return [self.world.submit(self.world.nodes["d0"], prompt, 2) for prompt in prompts]

    def finish(self, clients: list[Client]) -> None:
        self.world.run(self.world.now + 10.0)
        for client in clients:
            assert client.finals == ["finished"] and client.output == client.expected()

    @property
    def counts(self) -> list[int]:
        """Tokens of each step."""
        return [sum(c.stop - c.start for c in step.chunks) for step in self.steps]

    @property
    def by_request(self) -> Counter[int]:
        counts: Counter[int] = Counter()
        for step in self.steps:
            counts.update({c.request_id: c.stop - c.start for c in step.chunks})
        return counts


@pytest.fixture
def watched() -> Watched:
    return Watched()


def prompt_of(index: int, count: int = PROMPT_TOKENS) -> list[int]:
    return list(range(1000 * index, 1000 * index + count))


@pytest.mark.parametrize("count", [2, 8])
def test_equal_prompts_that_arrive_together_are_computed_once(watched: Watched, count: int) -> None:
    watched.finish(watched.submit([prompt_of(1)] * count))
    assert sum(watched.counts) == PROMPT_TOKENS + (count - 1) * PAGE_SIZE


def test_prompts_wait_for_what_they_share_and_no_longer(watched: Watched) -> None:
    shared = prompt_of(1, 100)
    long, short = shared + prompt_of(2, 300), shared + prompt_of(3, 20)
    clients = watched.submit([long, short])
    watched.finish(clients)
    assert sum(watched.counts) == 100 + 300 + 20
    assert clients[1].answered_at < clients[0].answered_at


def test_prompts_that_share_little_are_computed_side_by_side(watched: Watched) -> None:
    """And what each has beyond is found by those that come later."""
    template, rests = list(range(900, 900 + PAGE_SIZE)), (prompt_of(1, 8), prompt_of(2, 8))
    prompts = [template + rest * 5 for rest in rests]
    watched.finish(watched.submit(prompts))
    assert sum(watched.counts) == sum(map(len, prompts))
    watched.finish(watched.submit([[*prompt, 1, 2] for prompt in prompts]))
    assert sum(watched.counts) == sum(map(len, prompts)) + 2 * 2


def test_a_step_is_filled_with_others_while_equal_ones_wait(watched: Watched) -> None:
    prompts = [prompt_of(1), prompt_of(1), prompt_of(1), *map(prompt_of, range(2, 7))]
    watched.finish(watched.submit(prompts))
    assert sum(watched.counts) == 6 * PROMPT_TOKENS + 2 * PAGE_SIZE
    assert watched.counts[:-3] == [CHUNK_TOKENS] * (len(watched.counts) - 3)


def test_those_that_wait_go_on_from_where_one_was_given_up(watched: Watched) -> None:
    clients = watched.submit([prompt_of(1)] * 3)
    while sum(watched.counts) < 4 * CHUNK_TOKENS:
        watched.world.run(watched.world.now + 0.001)
    (first, *_) = watched.core.requests
    failure = Failure(FailureKind.BAD_LOGITS, "given up")
    watched.core.meetings.fail(first, failure, watched.world.now)
    watched.world.run(watched.world.now + 10.0)
    assert [client.finals for client in clients] == [["failed"], ["finished"], ["finished"]]
    computed = watched.by_request
    assert computed[first.request_id] >= 4 * CHUNK_TOKENS
    assert sum(computed.values()) <= PROMPT_TOKENS + 2 * PAGE_SIZE + 2 * CHUNK_TOKENS


def test_a_prompt_that_others_wait_for_is_not_kept_waiting_by_an_older_long_one(
    watched: Watched,
) -> None:
    """Else those would be as late as it is, however short they are."""
    shared = prompt_of(1, 60)
    prompts = [prompt_of(2, 480), shared + prompt_of(3, 400), shared + prompt_of(4, 20)]
    clients = watched.submit(prompts)
    watched.finish(clients)
    assert sum(watched.counts) == 480 + 60 + 400 + 20
    assert clients[2].answered_at < clients[0].answered_at
    assert clients[2].answered_at < clients[1].answered_at


def test_only_what_the_next_steps_compute_is_admitted(watched: Watched) -> None:
    """So that all others find what is computed until then, and the pages are not held idle."""
    watched.submit([prompt_of(index) for index in range(1, 9)])
    while len(watched.core.requests) < 8:
        watched.world.run(watched.world.now + 0.0005)
    admitted = [request for request in watched.core.requests if request.sequence is not None]
    assert 1 <= len(admitted) <= 2
    assert len(watched.core.requests.queue) >= 6


def test_short_prompts_pass_all_long_ones_that_wait(watched: Watched) -> None:
    long = watched.submit([prompt_of(index, 450) for index in range(1, 4)])
    watched.world.run(watched.world.now + 0.05)
    short = watched.submit([prompt_of(index, 20) for index in range(10, 13)])
    watched.finish([*long, *short])
    assert max(c.answered_at for c in short) < min(c.answered_at for c in long)


def test_a_long_prompt_advances_however_many_short_ones_keep_coming(watched: Watched) -> None:
    world = watched.world
    (long,) = watched.submit([prompt_of(1, 480)])
    while not watched.steps:
        world.run(world.now + 0.0005)
    (long_id,) = watched.by_request
    for index in range(10, 40):
        watched.submit([prompt_of(index, 20)])
        world.run(world.now + 0.01)
    watched.finish([long])
    shares = [
        sum(chunk.stop - chunk.start for chunk in step.chunks if chunk.request_id == long_id)
        for step in watched.steps
    ]
    while shares[-1] == 0:
        shares.pop()
    assert min(shares[:-1]) >= CHUNK_TOKENS // 2
    assert len(shares) <= 480 // (CHUNK_TOKENS // 2)
    assert any(share < CHUNK_TOKENS for share in shares[:-1]), "short ones have passed it"


def test_prompts_whose_log_probabilities_are_asked_for_wait_for_nobody(watched: Watched) -> None:
    """They compute all of it themselves, whoever else does."""
    world = watched.world
    plain = reservation(world, 5, tuple(prompt_of(1)))
    assert plain.sampling is not None
    told = msgspec.structs.replace(plain.sampling, return_logprob=True, logprob_start_len=0)
    asking = msgspec.structs.replace(plain, transfer_id=6, sampling=told)
    for message in (plain, asking):
        world.nodes["p0"].feed(FromPeer("d0", message))
    world.run(world.now + 5.0)
    assert sum(watched.counts) == 2 * PROMPT_TOKENS and watched.core.is_idle
