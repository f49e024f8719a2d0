"""Whose turn it is: first come, first served, and those that had begun before all others."""

from __future__ import annotations

import pytest

from common.protocol.peer import TransferRequest
from common.request import SamplingParams
from common.scheduling.events import Effect, ToPeer
from decode_server.request import DecodeRequest
from decode_server.waiting import WaitingQueue
from tests.sim.node import Node
from tests.sim.world import World


def make_request(request_id: int) -> DecodeRequest:
    sampling = SamplingParams(max_new_tokens=1, seed=0)
    return DecodeRequest(request_id, [1], 1, sampling, None, arrived_at=0.0, deadline=9.0)


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


def test_requests_of_a_lost_server_are_asked_for_again_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(seed=1)
    world.add("p0", "prefill", 4, 64)
    world.add("d0", "decode", 4, 256).links = ["p0:1"]
    for node in world.nodes.values():
        node.boot()
    world.start_ticks()
    world.run(3.0)
    asked: list[int] = []
    carry_out = Node.carry_out

    def note(self: Node, effects: list[Effect]) -> None:
        messages = [effect.message for effect in effects if isinstance(effect, ToPeer)]
        asked.extend(m.token_ids[0] for m in messages if isinstance(m, TransferRequest))
        carry_out(self, effects)

    monkeypatch.setattr(Node, "carry_out", note)
    prefill = world.nodes["p0"]
    for index in range(6):
        world.submit(world.nodes["d0"], list(range(20 + index, 60)), 1)
    prefill.crash()
    prefill.boot()
    world.run(world.now + 3.0)
    assert [first for first in asked if first] == [*range(20, 26), *range(20, 26)]
