"""Which transfers count as tried in vain, and how many of them a request may have."""

from __future__ import annotations

import pytest

from common.scheduling.events import Tick
from decode_server.recovery import ATTEMPT_COUNT_MAX
from decode_server.request import DecodeRequest
from decode_server.scheduler import DecodeScheduler
from tests.sim.client import Client
from tests.sim.node import Node
from tests.sim.world import World

PROMPT = list(range(20, 60))
STEP_S = 0.001


@pytest.fixture
def world() -> World:
    """Four prefill servers and a decode server that uses all, at rest at time 3."""
    world = World(seed=1)
    names = [f"p{index}" for index in range(4)]
    for name in names:
        world.add(name, "prefill", 4, 64)
    world.add("d0", "decode", 4, 64).links = [f"{name}:1" for name in names]
    world.begin()
    return world


def core_of(node: Node) -> DecodeScheduler:
    assert isinstance(node.core, DecodeScheduler)
    return node.core


def request_of(world: World, client: Client) -> DecodeRequest:
    assert not client.finals, client.failure
    return core_of(world.nodes["d0"]).requests.get(client.request_id)


def run_until_decoding(world: World, client: Client) -> None:
    count = len(client.output)
    while len(client.output) < count + 2:
        request_of(world, client)
        world.run(world.now + STEP_S)


def retract(world: World, client: Client) -> None:
    """As a pool does that is too full."""
    core = core_of(world.nodes["d0"])
    sequence = request_of(world, client).sequence
    assert sequence is not None
    core.batcher.remove(sequence)
    core.requests.retract(core.requests.of_sequence(sequence), world.now)
    world.nodes["d0"].feed(Tick())


def lose_the_writer(world: World, client: Client) -> None:
    """The prefill server that computes for a client dies, and does not come back."""
    request = request_of(world, client)
    while (transfer := request.transfer) is None:
        world.run(world.now + STEP_S)
    world.nodes[transfer.link.partition(":")[0]].crash()
    while request.transfer is transfer:
        world.run(world.now + STEP_S)


def test_retractions_use_up_no_attempts(world: World) -> None:
    client = world.submit(world.nodes["d0"], PROMPT, 30)
    for _ in range(ATTEMPT_COUNT_MAX):
        run_until_decoding(world, client)
        retract(world, client)
    lose_the_writer(world, client)
    world.run(world.now + 3.0)
    assert client.finals == ["finished"] and client.output == client.expected()


def test_attempts_are_counted_anew_once_a_request_has_run(world: World) -> None:
    """A long answer may outlive any number of servers, as long as each brings it further."""
    client = world.submit(world.nodes["d0"], PROMPT, 30)
    for _ in range(ATTEMPT_COUNT_MAX - 1):
        lose_the_writer(world, client)
    run_until_decoding(world, client)
    retract(world, client)
    lose_the_writer(world, client)
    run_until_decoding(world, client)
    world.run(world.now + 3.0)
    assert client.finals == ["finished"] and client.output == client.expected()


def test_a_request_that_fails_everywhere_ends_with_its_last_failure(world: World) -> None:
    client = world.submit(world.nodes["d0"], PROMPT, 30)
    for _ in range(ATTEMPT_COUNT_MAX):
        lose_the_writer(world, client)
    assert client.failure.startswith("peer_lost")
