"""Requests that outgrow the pool: retracted, transferred again, and right to the last token."""

from __future__ import annotations

import pytest

from common.layout.component import FULL, SLOT, Live, LiveKind
from tests.sim.verdict import judge
from tests.sim.world import World

LIVES = (FULL, SLOT, Live(LiveKind.TAIL, 4, 4), Live(LiveKind.BLOCK, 4))
NEW_TOKENS = 100
PROMPTS = [[100 * index + token for token in range(7 + index)] for index in range(7)]


def world_of(seed: int, slot_count: int, prefill_slot_count: int = 2) -> World:
    """A pair in which four requests start to decode, and two of them have room to end."""
    world = World(seed)
    world.lives = LIVES
    prefill = world.add("p0", "prefill", 8, 64)
    prefill.page_counts = (64, prefill_slot_count, prefill_slot_count, 64)
    decode = world.add("d0", "decode", 4, 60)
    decode.page_counts = (60, slot_count, slot_count, 60)
    decode.links = ["p0:1"]
    decode.expects_short_outputs = True
    world.begin()
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


@pytest.mark.parametrize(("short", "prefill_slots", "decode_slots"), [("d0", 2, 1), ("p0", 1, 8)])
def test_with_one_slot_requests_take_turns(
    short: str, prefill_slots: int, decode_slots: int
) -> None:
    """On either side, whatever number of requests it may run: the slots are the limit."""
    world = world_of(1, decode_slots, prefill_slots)
    clients = [world.submit(world.nodes["d0"], prompt, 9) for prompt in PROMPTS]
    pool = world.nodes[short].core.account.pool
    slots_seen = set()
    while world.now < 10.0:
        world.run(world.now + 0.01)
        slots_seen.add(pool.used_count(LIVES.index(SLOT)))
    assert slots_seen == {0, 1}
    assert world.slots_ran_out and world.retraction_count == 0
    assert [client.output for client in clients] == [c.expected(LIVES) for c in clients]
    judge(world)


@pytest.mark.parametrize(
    ("slots", "tails", "asked", "running_max"),
    [(3, 5, None, 3), (5, 3, None, 3), (3, 5, 2, 2), (3, 5, 8, 3), (900, 900, None, 256)],
)
def test_no_more_requests_run_than_have_a_slot_and_a_tail(
    slots: int, tails: int, asked: int | None, running_max: int
) -> None:
    world = World(0)
    world.lives = LIVES
    node = world.add("p0", "prefill", 8, 64)
    node.page_counts = (64, slots, tails, 64)
    node.boot()
    assert node.facts.running_max(asked) == running_max


def test_pages_of_tokens_bound_no_number_of_requests() -> None:
    world = World(0)
    node = world.add("p0", "prefill", 8, 3)
    node.boot()
    assert node.facts.state_count is None
    assert node.facts.running_max(None) == 256 and node.facts.running_max(7) == 7
