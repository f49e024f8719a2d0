"""Prompts that only some prefill servers, or none of them, have room for."""

from __future__ import annotations

import pytest

from common.scheduling.events import Tick
from decode_server.missing_servers import FALLBACK_WAIT_S, PEER_WAIT_S
from decode_server.scheduler import DecodeScheduler
from tests.sim.client import Client
from tests.sim.world import World

SMALL, LARGE = 64, 256  # tokens that fit p0's pool and p1's
LONG = list(range(20, 20 + SMALL + 1))
TOO_LONG = list(range(20, 20 + LARGE + 1))


@pytest.fixture
def world() -> World:
    """A decode server with room for more than both of its prefill servers; nobody is up yet."""
    world = World(seed=1)
    world.add("p0", "prefill", 4, SMALL // 4)
    world.add("p1", "prefill", 4, LARGE // 4)
    world.add("d0", "decode", 4, 128).links = ["p0:1", "p1:1"]
    return world


def start(world: World, *names: str) -> None:
    for name in names:
        world.nodes[name].boot()
    if len(names) == len(world.nodes):
        world.start_ticks()
        world.run(3.0)


def ask(world: World, prompt: list[int], count: int = 4) -> Client:
    return world.submit(world.nodes["d0"], prompt, count)


def test_a_prompt_goes_to_a_server_whose_pool_holds_it(world: World) -> None:
    """Whatever the model's context length is: that is the same on both."""
    start(world, "p0", "p1", "d0")
    clients = [ask(world, LONG) for _ in range(8)]
    world.run(world.now + 3.0)
    assert [client.finals for client in clients] == [["finished"]] * 8


def test_a_prompt_that_fits_nowhere_is_refused_at_once_and_told_the_limits(world: World) -> None:
    start(world, "p0", "p1", "d0")
    client = ask(world, TOO_LONG)
    assert client.failure == (
        "bad_request: prompt of 257 tokens: prefill servers take at most 64 (p0:1), 256 (p1:1)"
    )


def test_it_waits_for_a_server_that_comes_back_and_may_take_it(world: World) -> None:
    start(world, "p0", "p1", "d0")
    world.nodes["p1"].crash()
    world.run(world.now + 1.0)
    client = ask(world, LONG)
    world.run(world.now + PEER_WAIT_S / 2)
    assert client.finals == []
    world.nodes["p1"].boot()
    world.run(world.now + 2.0)
    assert client.finals == ["finished"] and client.output == client.expected()


def test_a_server_that_never_answered_may_take_anything(world: World) -> None:
    """When all start together, the small one may be connected first."""
    world.start_ticks()
    start(world, "p0", "d0")
    world.run(3.0)
    client = ask(world, TOO_LONG[:-1])
    assert client.finals == []
    world.nodes["p1"].boot()
    world.run(world.now + 2.0)
    assert client.finals == ["finished"] and client.output == client.expected()


def test_a_server_that_stays_away_is_missed_for_as_long_as_any_other(world: World) -> None:
    start(world, "p0", "p1", "d0")
    world.nodes["p1"].crash()
    world.run(world.now + 2 * PEER_WAIT_S)
    client = ask(world, LONG)
    world.run(world.now + PEER_WAIT_S - 0.5)
    assert client.finals == []
    world.run(world.now + 1.0)
    assert client.failure.startswith(
        "no_prefill_server: no prefill server that takes 65 tokens could be used for 10 s: "
    )
    assert "p1:1 connecting" in client.failure


def test_a_server_that_does_not_fit_is_not_waited_for(world: World) -> None:
    start(world, "p0", "p1", "d0")
    world.nodes["p1"].crash()
    core = world.nodes["d0"].core
    assert isinstance(core, DecodeScheduler)
    world.run(world.now + 1.0)
    core.transfers.links.addresses.note_link_refused("p1:1", "it does not know our key", world.now)
    assert ask(world, LONG).failure.startswith("bad_request: prompt of 65 tokens: ")


def test_a_prompt_is_not_called_too_long_because_the_only_server_refuses_us(world: World) -> None:
    start(world, "p0", "p1", "d0")
    core = world.nodes["d0"].core
    assert isinstance(core, DecodeScheduler)
    for name in ("p0", "p1"):
        world.nodes[name].crash()
    world.run(world.now + 1.0)
    for name in ("p0", "p1"):
        core.transfers.links.addresses.note_link_refused(
            f"{name}:1", "it does not know our key", world.now
        )
    client = ask(world, LONG[:8])
    assert client.finals == []
    world.run(world.now + PEER_WAIT_S + 0.5)
    assert client.failure.startswith("no_prefill_server: ")


@pytest.mark.parametrize(("prompt", "wait_s"), [(TOO_LONG, 0.0), (LONG, FALLBACK_WAIT_S)])
def test_it_is_computed_here_where_that_is_allowed(
    world: World, prompt: list[int], wait_s: float
) -> None:
    world.nodes["d0"].may_fall_back = True
    start(world, "p0", "p1", "d0")
    if prompt is LONG:
        world.nodes["p1"].crash()
        world.run(world.now + 1.0)
    client = ask(world, prompt)
    world.run(world.now + wait_s + 1.0)
    assert client.finals == ["finished"] and client.output == client.expected()


def test_an_answer_that_outgrew_every_server_ends_when_it_is_retracted(world: World) -> None:
    """Its client has done nothing wrong."""
    start(world, "p0", "d0", "p1")
    world.nodes["p1"].crash()
    prompt = list(range(20, 20 + SMALL - 2))
    client = ask(world, prompt, count=40)
    core = world.nodes["d0"].core
    assert isinstance(core, DecodeScheduler)
    while len(client.output) < 5:
        assert not client.finals, client.failure
        world.run(world.now + 0.001)
    (sequence,) = core.batcher._running.values()
    core.batcher.remove(sequence)
    core.requests.retract(core.requests.of_sequence(sequence), world.now)
    world.nodes["d0"].feed(Tick())
    world.run(world.now + PEER_WAIT_S + 1.0)
    assert client.failure.startswith("no_prefill_server: ")
