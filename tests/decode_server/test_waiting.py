"""Whose turn it is: first come, first served, and those that had begun before all others."""

from __future__ import annotations

from itertools import islice

import pytest

from common.prefix_digests import DIGEST_NBYTES
from common.protocol.peer import TransferRequest
from common.request import SamplingParams
from common.scheduling.events import Effect, ToPeer
from common.scheduling.prefix_cache import Match, PrefixCache
from decode_server.admission import VAIN_COUNT_MAX
from decode_server.request import DecodeRequest
from decode_server.scheduler import DecodeScheduler
from decode_server.waiting import FIRST_COUNT, Turns, WaitingQueue
from tests.sim.node import Node
from tests.sim.world import connected_pair


def make_request(request_id: int) -> DecodeRequest:
    sampling = SamplingParams(max_new_tokens=1, seed=0)
    return DecodeRequest(request_id, [1], 1, sampling, None, b"", arrived_at=0.0, deadline=9.0)


def test_what_comes_back_waits_before_what_is_new_and_in_its_own_order() -> None:
    queue, requests = WaitingQueue(), [make_request(request_id) for request_id in range(5)]
    for request in requests:
        queue.add(request)
    for request in requests[:3]:
        queue.discard(request.request_id)
    assert [request.request_id for request in queue] == [3, 4] and len(queue) == 2
    for request in requests[:3]:
        queue.add_again(request)
    queue.discard(1)
    assert [request.request_id for request in queue] == [0, 2, 3, 4] and len(queue) == 4
    assert 2 in queue and 1 not in queue


def test_requests_of_a_lost_server_are_asked_for_again_in_their_order() -> None:
    world = connected_pair(decode_page_count=256)
    asked: list[int] = []

    def note(node: Node, effect: Effect) -> None:
        if isinstance(effect, ToPeer) and isinstance(effect.message, TransferRequest):
            asked.append(effect.message.token_ids[0])

    world.watchers.append(note)
    prefill = world.nodes["p0"]
    for index in range(6):
        world.submit(world.nodes["d0"], list(range(20 + index, 60)), 1)
    prefill.crash()
    prefill.boot()
    world.run(world.now + 3.0)
    assert [first for first in asked if first] == [*range(20, 26), *range(20, 26)]


def test_of_a_long_queue_the_first_are_looked_at_every_time_and_the_others_in_turn() -> None:
    turns, waiting = Turns(), [make_request(request_id) for request_id in range(30)]
    others: list[int] = []
    for _ in range(11):
        # The one that a round stops at is the first of the next one.
        looked = [one.request_id for one in islice(turns.of(waiting), FIRST_COUNT + 5)][:-1]
        assert looked[:FIRST_COUNT] == list(range(FIRST_COUNT))
        others += looked[FIRST_COUNT:]
    assert others == 2 * list(range(FIRST_COUNT, 30))
    everyone = [one.request_id for one in turns.of(waiting)]
    assert sorted(everyone) == list(range(30))


def test_a_round_ends_however_long_the_queue_is(monkeypatch: pytest.MonkeyPatch) -> None:
    world = connected_pair(decode_page_count=64)
    match, looks = PrefixCache.match, [0]

    def count_match(self: PrefixCache, *arguments: object) -> Match:
        looks[0] += 1
        return match(self, *arguments)  # type: ignore[arg-type]

    node = world.nodes["d0"]
    clients = [
        world.submit(
            node, list(range(20 + index, 60 + index)), 4, seed=bytes([index] * DIGEST_NBYTES)
        )
        for index in range(60)
    ]
    core = node.core
    assert isinstance(core, DecodeScheduler) and len(core.requests.queue) > 40
    monkeypatch.setattr(PrefixCache, "match", count_match)
    core.schedule(world.now)
    # Looked for what is here to go on from, and for what need not be sent.
    assert 0 < looks[0] <= 2 * VAIN_COUNT_MAX
    monkeypatch.undo()
    world.run(world.now + 60.0)
    assert all(client.finals == ["finished"] for client in clients)
