"""Which prefill servers are asked: by their load, told and asked since, and by chance among equals.

What is asked of whom is read from the messages that the real cores send.
"""

from __future__ import annotations

from collections import Counter

import pytest

from common.protocol.peer import TransferRequest
from common.scheduling.events import Effect, ToPeer
from decode_server.scheduler import DecodeScheduler
from tests.sim.node import Node
from tests.sim.world import World

PROMPT_COUNT = 40
SERVER_COUNT = 8


def prompt_of(index: int) -> list[int]:
    """Prompts that have nothing in common, so that none waits for another or is found cached."""
    return [20 + index % 900, *range(20, 19 + PROMPT_COUNT)]


def make_world(decode_count: int, prefill_count: int = SERVER_COUNT) -> World:
    """Every decode server uses all prefill servers; all are at rest at time 3."""
    world = World(seed=1)
    names = [f"p{index}" for index in range(prefill_count)]
    for name in names:
        world.add(name, "prefill", 4, 256)
    for index in range(decode_count):
        world.add(f"d{index}", "decode", 4, 256).links = [f"{name}:1" for name in names]
    world.begin()
    return world


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Requests that each prefill server is asked for, self-tests aside."""
    counts: Counter[str] = Counter()
    carry_out = Node.carry_out

    def count(self: Node, effects: list[Effect]) -> None:
        for effect in effects:
            message = effect.message if isinstance(effect, ToPeer) else None
            if isinstance(message, TransferRequest) and not message.is_self_test:
                assert isinstance(effect, ToPeer)
                counts[effect.link] += 1
        carry_out(self, effects)

    monkeypatch.setattr(Node, "carry_out", count)
    return counts


def test_decode_servers_that_know_the_same_do_not_all_ask_the_same(asked: Counter[str]) -> None:
    world = make_world(decode_count=SERVER_COUNT)
    for index in range(SERVER_COUNT):
        world.submit(world.nodes[f"d{index}"], prompt_of(index), 2)
    assert asked.total() == SERVER_COUNT
    assert len(asked) >= SERVER_COUNT // 2 and max(asked.values()) <= 3


def test_what_was_asked_since_a_server_was_heard_counts_as_its_load(asked: Counter[str]) -> None:
    """All before any heartbeat could tell of it."""
    world = make_world(decode_count=1)
    for index in range(SERVER_COUNT):
        world.submit(world.nodes["d0"], prompt_of(index), 2)
    assert asked.total() == SERVER_COUNT and max(asked.values()) <= 2


def test_a_server_that_says_it_is_busy_is_asked_less(asked: Counter[str]) -> None:
    world = make_world(decode_count=1, prefill_count=2)
    core = world.nodes["d0"].core
    assert isinstance(core, DecodeScheduler)
    core.transfers.links.connections.sources()[1].liveness.queued_token_count = 3 * PROMPT_COUNT + 1
    for index in range(6):
        world.submit(world.nodes["d0"], prompt_of(index), 2)
    assert asked == {"p0:1": 5, "p1:1": 1}


@pytest.mark.slow
def test_over_time_all_get_their_share(asked: Counter[str]) -> None:
    world = make_world(decode_count=4)
    for index in range(400):
        world.submit(world.nodes[f"d{index % 4}"], prompt_of(index), 1)
        world.run(world.now + 0.02)
    assert asked.total() == 400
    assert all(40 <= asked[f"p{index}:1"] <= 60 for index in range(SERVER_COUNT)), asked
