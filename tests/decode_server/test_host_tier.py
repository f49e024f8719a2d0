"""A decode server with a tier in host memory: who was retracted comes back from there."""

from __future__ import annotations

import pytest

from common.layout.component import FULL, SLOT, Live, LiveKind
from tests.sim.client import Client
from tests.sim.verdict import judge
from tests.sim.world import World

HYBRID = (FULL, SLOT, Live(LiveKind.TAIL, 4, 4), Live(LiveKind.BLOCK, 4))
NEW_TOKENS = 100
PROMPTS = [[100 * index + token for token in range(27 + index)] for index in range(7)]


def run_world(lives: tuple[Live, ...], host_share: float) -> tuple[World, list[Client]]:
    """A pair whose decode server lets in more than has room to end, and computes short rests."""
    world = World(1)
    world.lives = lives
    prefill = world.add("p0", "prefill", 8, 64)
    decode = world.add("d0", "decode", 4, 70)
    for node, count in ((prefill, 64), (decode, 70)):
        node.page_counts = tuple(count if live.is_paged else 16 for live in lives)
    decode.links = ["p0:1"]
    decode.expects_short_outputs = decode.computes_rests = True
    decode.prompt_token_s, decode.checkpoint_max = 0.0002, 8
    decode.host_share = host_share
    world.begin()
    clients = [world.submit(world.nodes["d0"], prompt, NEW_TOKENS) for prompt in PROMPTS]
    world.run(world.now + 40.0)
    assert [client.output for client in clients] == [c.expected(lives) for c in clients]
    assert world.retraction_count > 0
    judge(world)
    return world, clients


@pytest.mark.parametrize("lives", [(FULL,), HYBRID], ids=["full", "hybrid"])
def test_who_is_retracted_comes_back_from_host_memory(lives: tuple[Live, ...]) -> None:
    """Prefill servers are asked less, for next to all of a cache is here."""
    world, clients = run_world(lives, 4.0)
    counters = world.nodes["d0"].state().counters
    assert counters["retracted"] > 0 and counters["host_loaded_tokens"] > 0
    _, others = run_world(lives, 0.0)
    again = [sum(client.asked_count - 1 for client in one) for one in (clients, others)]
    assert again[0] < again[1] / 2


def test_with_states_of_its_own_saved_as_well_nobody_is_asked_again() -> None:
    _, clients = run_world(HYBRID, 4.0)
    assert [client.asked_count for client in clients] == [1] * len(clients)


def test_a_tier_of_next_to_nothing_loses_nothing_else() -> None:
    world, _ = run_world(HYBRID, 0.02)
    assert world.nodes["d0"].facts.host_page_counts == (1, 1, 1, 1)
