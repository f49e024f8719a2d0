"""Requests that outgrow the pool: retracted, handed over again, and right to the last token."""

from __future__ import annotations

import pytest

from common.layout.component import FULL, SLOT, Live, LiveKind
from tests.sim.story import judge
from tests.sim.world import World

LIVES = (FULL, SLOT, Live(LiveKind.TAIL, 4, 4), Live(LiveKind.BLOCK, 4))
NEW_TOKENS = 100
PROMPTS = [[100 * index + token for token in range(7 + index)] for index in range(7)]


def world_of(seed: int, slot_count: int) -> World:
    """A pair in which four requests start to decode, and two of them have room to end."""
    world = World(seed)
    world.lives = LIVES
    prefill = world.add("p0", "prefill", 8, 64)
    prefill.page_counts = (64, 2, 2, 64)
    decode = world.add("d0", "decode", 4, 60)
    decode.page_counts = (60, slot_count, slot_count, 60)
    decode.links = ["p0:1"]
    for node in world.nodes.values():
        node.boot()
    world.start_ticks()
    world.run(3.0)
    return world


@pytest.mark.slow
@pytest.mark.parametrize("slot_count", [3, 8])
@pytest.mark.parametrize("seed", range(2))
def test_who_is_retracted_gives_all_pages_back_and_goes_on_from_another_slot(
    seed: int, slot_count: int
) -> None:
    world = world_of(seed, slot_count)
    clients = [world.submit(world.nodes["d0"], prompt, NEW_TOKENS) for prompt in PROMPTS]
    world.run(world.now + 25.0)
    assert [client.finals for client in clients] == [["finished"]] * len(clients)
    assert world.retraction_count > 0
    judge(world)


def test_with_one_slot_requests_take_turns() -> None:
    world = world_of(seed=1, slot_count=1)
    clients = [world.submit(world.nodes["d0"], prompt, 9) for prompt in PROMPTS]
    pool = world.nodes["d0"].core.account.pool
    while world.now < 10.0:
        world.run(world.now + 0.01)
        assert pool.used_count(LIVES.index(SLOT)) <= 1
    assert world.slots_ran_out and world.retraction_count == 0
    assert [client.output for client in clients] == [c.expected(LIVES) for c in clients]
    judge(world)
