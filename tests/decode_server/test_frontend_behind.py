"""A frontend that reads nothing holds the steps of its decode server back, and nothing else."""

from __future__ import annotations

import pytest

from common.scheduling.events import FrontendBehind
from tests.sim.client import Client
from tests.sim.world import World, connected_pair

PROMPT = list(range(20, 60))
TOKEN_COUNT = 40


@pytest.fixture
def world() -> World:
    """A connected pair at rest, at time 3."""
    return connected_pair()


def running(world: World) -> Client:
    """A request in the middle of its output."""
    client = world.submit(world.nodes["d0"], PROMPT, TOKEN_COUNT)
    while not client.output:
        world.run(world.now + 0.001)
    assert len(client.output) < TOKEN_COUNT / 2
    return client


def test_no_step_is_sent_until_the_output_has_left(world: World) -> None:
    decode, client = world.nodes["d0"], running(world)
    decode.feed(FrontendBehind(True))
    world.run(world.now + 0.25)  # steps in flight come back
    count, steps = len(client.output), decode.core.batcher.step_count
    world.run(world.now + 4.0)
    assert (len(client.output), decode.core.batcher.step_count) == (count, steps)
    decode.feed(FrontendBehind(False))
    world.run(world.now + 1.0)
    assert client.finals == ["finished"]
    assert client.output == client.expected()


def test_heartbeats_deadlines_and_transfers_go_on(world: World) -> None:
    decode, client = world.nodes["d0"], running(world)
    decode.feed(FrontendBehind(True))
    hurried = world.submit(decode, PROMPT, TOKEN_COUNT, budget_s=2.0)
    later = world.submit(decode, PROMPT, TOKEN_COUNT)
    world.run(world.now + 4.0)
    assert hurried.failure.startswith("timed_out") and len(hurried.output) == 1
    assert len(later.output) == 1, "its first token is the prefill server's"
    for node in world.nodes.values():
        state = node.state()
        assert (state.counters["peers_lost"], state.trouble) == (0, "")
    decode.feed(FrontendBehind(False))
    world.run(world.now + 1.0)
    assert [one.finals for one in (client, later)] == [["finished"]] * 2


def test_a_prefill_server_does_not_care(world: World) -> None:
    world.nodes["p0"].feed(FrontendBehind(True))
    client = world.submit(world.nodes["d0"], PROMPT, 4)
    world.run(world.now + 1.0)
    assert client.finals == ["finished"]
