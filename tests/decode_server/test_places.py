"""What the limit of a batch bounds: the sequences that decode, and not the transfers under way."""

from __future__ import annotations

import pytest

from common.protocol.worker import Step
from common.scheduling.events import Effect, ToWorkers
from decode_server.scheduler import DecodeScheduler
from tests.sim.client import Client
from tests.sim.node import Node
from tests.sim.verdict import judge
from tests.sim.world import World

PLACE_COUNT = 4
REQUEST_COUNT = 14
OUTPUT_COUNT = 12


@pytest.fixture
def world() -> World:
    """A pair whose decode server computes four sequences at a time, at rest at time 3."""
    world = World(seed=1)
    world.add("p0", "prefill", 4, 400)
    decode = world.add("d0", "decode", 4, 800)
    decode.links, decode.running_max = ["p0:1"], PLACE_COUNT
    world.begin()
    return world


@pytest.fixture
def decoded(world: World) -> list[int]:
    """How many sequences each step decodes."""
    counts: list[int] = []

    def count(node: Node, effect: Effect) -> None:
        step = effect.message if isinstance(effect, ToWorkers) else None
        if node.role == "decode" and isinstance(step, Step):
            counts.append(len(step.decode))

    world.watchers.append(count)
    return counts


def core_of(world: World) -> DecodeScheduler:
    core = world.nodes["d0"].core
    assert isinstance(core, DecodeScheduler)
    return core


def submit(world: World, count: int) -> list[Client]:
    prompts = [list(range(1000 * index, 1000 * index + 30)) for index in range(count)]
    return [world.submit(world.nodes["d0"], prompt, OUTPUT_COUNT) for prompt in prompts]


def test_a_slow_prefill_server_is_asked_for_more_than_may_decode(
    world: World, decoded: list[int]
) -> None:
    """Else the batch would shrink by as many as are under way."""
    world.nodes["p0"].freeze()
    clients = submit(world, REQUEST_COUNT)
    assert core_of(world).transfers.incoming.under_way_count == REQUEST_COUNT
    world.run(world.now + 0.3)
    world.nodes["p0"].thaw()
    world.run(world.now + 5.0)
    assert [client.finals for client in clients] == [["finished"]] * REQUEST_COUNT
    assert max(decoded) == PLACE_COUNT
    judge(world)


def test_nobody_is_asked_for_more_while_what_has_come_waits_for_a_place(world: World) -> None:
    core = core_of(world)
    first = submit(world, REQUEST_COUNT)
    while not core.batcher.ready_count:
        world.run(world.now + 0.001)
    asked_count = core.transfers.incoming.under_way_count
    late = submit(world, 1)
    assert core.transfers.incoming.under_way_count == asked_count and len(core.requests.queue) == 1
    world.run(world.now + 5.0)
    assert [client.finals for client in first + late] == [["finished"]] * (REQUEST_COUNT + 1)


def test_places_are_given_in_the_order_of_arrival(world: World) -> None:
    core = core_of(world)
    submit(world, REQUEST_COUNT)
    while not core.batcher.ready_count:
        world.run(world.now + 0.0005)
    before = list(core.batcher._ready)
    while before:
        world.run(world.now + 0.0005)
        ready = list(core.batcher._ready)
        left_count = len(before) - len(set(before) & set(ready))
        assert ready[: len(before) - left_count] == before[left_count:]
        before = ready


def test_who_waits_for_a_place_can_leave(world: World) -> None:
    core = core_of(world)
    clients = submit(world, REQUEST_COUNT)
    while not core.batcher.ready_count:
        world.run(world.now + 0.001)
    (leaving, *_) = core.batcher._ready
    world.cancel(world.clients[leaving])
    assert leaving not in core.batcher._ready
    world.run(world.now + 5.0)
    assert [client.finals for client in clients if client.request_id != leaving] == [
        ["finished"]
    ] * (REQUEST_COUNT - 1)
    judge(world)
