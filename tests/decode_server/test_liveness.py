"""How soon a peer that can't go on is given up, and how soon it is used again."""

from __future__ import annotations

import pytest

from common.prefix_digests import DIGEST_NBYTES
from common.protocol.frontend import Drain
from common.scheduling.events import FromFrontend, LinkBroke
from tests.sim.client import Client
from tests.sim.world import World

PROMPT = list(range(20, 60))
TOLD_S = 0.6  # a beat, a tick of the simulation on either side, and the messages


@pytest.fixture
def world() -> World:
    """Two prefill servers and a decode server that uses both, at rest at time 3."""
    world = World(seed=1)
    for name in ("p0", "p1"):
        world.add(name, "prefill", 4, 64)
    world.add("d0", "decode", 4, 64).links = ["p0:1", "p1:1"]
    world.begin()
    assert connected(world) == ["p0:1", "p1:1"]
    return world


def connected(world: World) -> list[str]:
    core = world.nodes["d0"].core
    return sorted(peer.link for peer in core.transfers.links.connections.sources())  # type: ignore[union-attr]


def counters(world: World, node: str = "d0") -> dict[str, float]:
    return world.nodes[node].state().counters


def ask(world: World, count: int = 4) -> list[Client]:
    """Under salts of their own: equal prompts would wait for one another."""
    seeds = [bytes([index]) * DIGEST_NBYTES for index in range(count)]
    return [world.submit(world.nodes["d0"], PROMPT, 4, seed=seed) for seed in seeds]


def test_a_frozen_peer_is_given_up_in_a_second_and_its_requests_go_elsewhere(world: World) -> None:
    world.nodes["p0"].is_frozen = True
    clients = ask(world)
    world.run(world.now + 1.3)
    assert connected(world) == ["p1:1"]
    assert counters(world)["peers_lost"] == 1
    assert counters(world)["retried"] == 2, "those that it had been asked for"
    world.run(world.now + 1.0)
    assert [client.finals for client in clients] == [["finished"]] * 4


def test_a_peer_whose_workers_stand_still_is_given_up_although_it_is_heard(world: World) -> None:
    world.nodes["p0"].worker.stop()
    clients = ask(world)
    world.run(world.now + 2.0 + TOLD_S)
    assert connected(world) == ["p1:1"]
    world.run(world.now + 1.0)
    assert [client.finals for client in clients] == [["finished"]] * 4
    world.run(world.now + 10.0)
    assert connected(world) == ["p1:1"], "nobody dials a server that can't go on"
    world.nodes["p0"].worker.go_on()
    world.run(world.now + 1.5)
    assert connected(world) == ["p0:1", "p1:1"]


def test_a_scheduler_that_was_frozen_itself_blames_nobody(world: World) -> None:
    decode = world.nodes["d0"]
    decode.is_frozen = True
    world.run(world.now + 0.5)
    decode.thaw()
    assert connected(world) == ["p0:1", "p1:1"]
    world.run(world.now + 0.5)
    assert connected(world) == ["p0:1", "p1:1"]


def test_a_prefill_server_that_comes_back_is_used_again_in_two_seconds(world: World) -> None:
    world.nodes["p0"].crash()
    world.run(world.now + 0.5)
    assert connected(world) == ["p1:1"]
    world.nodes["p0"].boot()
    world.run(world.now + 1.5)
    assert connected(world) == ["p0:1", "p1:1"]


def test_a_prefill_server_that_drains_finishes_what_it_has_and_gets_nothing_new(
    world: World,
) -> None:
    before = ask(world, 2)
    world.run(world.now + 0.01)
    for name in ("p0", "p1"):
        world.nodes[name].feed(FromFrontend(Drain()))
    during = ask(world)
    world.run(world.now + 2.0)
    assert [client.finals for client in before] == [["finished"]] * 2
    assert connected(world) == [] and [client.finals for client in during] == [[]] * 4
    assert world.nodes["p0"].core.is_idle and world.nodes["p1"].core.is_idle
    # Another process at the same address takes what has waited.
    world.nodes["p0"].crash()
    world.nodes["p0"].boot()
    world.run(world.now + 3.0)
    assert [client.finals for client in during] == [["finished"]] * 4


def test_nothing_is_asked_of_a_peer_whose_connection_broke_until_it_is_heard(world: World) -> None:
    decode, prefill = world.nodes["d0"], world.nodes["p0"]
    world.nodes["p1"].crash()
    world.run(world.now + 0.5)
    decode.feed(LinkBroke("p0:1", is_refused=False))
    (client,) = ask(world, 1)
    world.run(world.now + 0.05)
    assert prefill.core.is_idle and client.finals == []
    world.run(world.now + 1.0)
    assert client.finals == ["finished"] and connected(world) == ["p0:1"]


def test_what_was_asked_over_a_connection_that_broke_is_asked_again(world: World) -> None:
    pair = frozenset(("p0", "d0"))
    world.nodes["p1"].crash()
    world.run(world.now + 0.5)
    world.network.cut.add(pair)
    (client,) = ask(world, 1)
    world.run(world.now + 0.05)
    world.network.cut.discard(pair)  # what was said is lost, and nobody was silent for long
    world.nodes["d0"].feed(LinkBroke("p0:1", is_refused=False))
    world.run(world.now + 3.0)
    assert client.finals == ["finished"] and connected(world) == ["p0:1"]


def test_a_peer_whose_address_answers_nobody_is_given_up_at_once(world: World) -> None:
    decode = world.nodes["d0"]
    clients = ask(world)
    world.nodes["p0"].is_frozen = True
    for is_refused in (False, True):
        decode.feed(LinkBroke("p0:1", is_refused=is_refused))
    assert connected(world) == ["p1:1"]
    world.run(world.now + 0.5)
    assert [client.finals for client in clients] == [["finished"]] * 4
    decode.feed(LinkBroke("gone:1", is_refused=True))  # one that is not known any more


@pytest.mark.parametrize(("name", "other"), [("p0", "d0"), ("d0", "p0")])
def test_a_server_that_stops_as_planned_is_not_counted_as_lost(
    world: World, name: str, other: str
) -> None:
    world.nodes[name].leave()
    world.run(world.now + 1.3)
    assert counters(world, other)["peers_lost"] == 0
    states = {peer.name: peer for peer in world.nodes[other].state().peers}
    assert all(peer.state != "connected" for shown, peer in states.items() if name in shown)


def test_requests_of_a_server_that_stops_go_to_another(world: World) -> None:
    clients = ask(world)
    world.nodes["p0"].leave()
    world.run(world.now + 2.0)
    assert [client.finals for client in clients] == [["finished"]] * 4
