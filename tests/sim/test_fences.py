"""Pages that a lost writer could still reach come back, whatever transport it wrote through.

Two servers, four transfers under way, and one thing that happens then. Every byte that lands is
checked against the pages that the decode server still has set aside for it.
"""

from __future__ import annotations

import pytest

from tests.sim.node import Node
from tests.sim.world import TICK_S, World

PAGES_COUNT = 200
PROMPT = list(range(20, 99))  # 79 tokens and the one to come: 20 pages of 4
TRANSFER_COUNT = 4
# The longest way to a proof: a peer is missed, all is closed, an Abort is said again.
PROOF_MAX_S = 4.0
BETWEEN_HOSTS = ("tcp", "rc_mlx5", "cuda_copy,tcp")
ON_ONE_HOST = (*BETWEEN_HOSTS, "posix", "cuda_ipc", "cuda_ipc,tcp")


def pair(transport: str, *, is_one_host: bool) -> World:
    """p0 and d0, connected."""
    world = World(seed=1)
    world.is_honest = True
    world.transport = transport
    world.add("p0", "prefill", 4, PAGES_COUNT)
    world.add("d0", "decode", 4, PAGES_COUNT).links = ["p0:1"]
    if not is_one_host:
        world.nodes["p0"].host_ids = ("there",)
    for node in world.nodes.values():
        node.self_test_interval_s = 0.0
    world.begin()
    return world


def quarantined_count(world: World) -> int:
    return world.nodes["d0"].core.account.pool.quarantined_count(0)


def run_into_transfers(world: World) -> None:
    """Until some bytes of several transfers are on the way, and none has all."""
    for _ in range(TRANSFER_COUNT):
        world.submit(world.nodes["d0"], PROMPT, 8)
    begun_at = world.now
    writer = world.nodes["p0"].worker.transfers
    while not writer.is_under_way:
        world.run(world.now + 0.001)
        assert world.now < begun_at + 2.0, "nothing is ever on the way"


def run_until_back(world: World) -> float:
    """Until no page is in quarantine; how long that took."""
    began_at = world.now
    while quarantined_count(world) or world.nodes["d0"].core.transfers.incoming.abandoned_count:
        world.run(world.now + TICK_S)
        assert world.now < began_at + PROOF_MAX_S, f"{quarantined_count(world)} pages stay"
    return world.now - began_at


@pytest.mark.parametrize("transport", BETWEEN_HOSTS)
def test_a_writer_on_another_host_dies_and_every_page_comes_back(transport: str) -> None:
    world = pair(transport, is_one_host=False)
    run_into_transfers(world)
    world.nodes["p0"].crash()
    world.run(world.now + 1.5)  # it is missed by its silence
    run_until_back(world)
    assert world.nodes["d0"].core.account.pool.used_count(0) == 0


@pytest.mark.parametrize("transport", ON_ONE_HOST)
def test_a_writer_on_this_host_dies_and_every_page_comes_back(transport: str) -> None:
    world = pair(transport, is_one_host=True)
    run_into_transfers(world)
    world.nodes["p0"].crash()
    world.run(world.now + 0.1)
    run_until_back(world)


@pytest.mark.parametrize("transport", ON_ONE_HOST)
def test_a_connection_between_two_that_live_breaks_and_every_page_comes_back(
    transport: str,
) -> None:
    world = pair(transport, is_one_host=True)
    run_into_transfers(world)
    world.nodes["p0"].worker.transfers.break_off(world.nodes["d0"].facts.incarnation)
    world.run(world.now + 0.1)
    run_until_back(world)
    world.run(world.now + 5.0)
    assert all(client.finals == ["finished"] for client in world.clients.values())


@pytest.mark.parametrize("transport", ON_ONE_HOST)
def test_they_come_back_although_the_two_never_meet_again(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the prefill server welcomes nobody, because its engine stands still."""
    world = pair(transport, is_one_host=True)
    run_into_transfers(world)
    deafen(world.nodes["p0"], monkeypatch)
    world.nodes["p0"].worker.transfers.break_off(world.nodes["d0"].facts.incarnation)
    world.run(world.now + 0.1)
    run_until_back(world)


def deafen(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hears no Hello any more."""
    shakes = node.core.transfers.links.handshakes
    monkeypatch.setattr(shakes, "handle_hello", lambda *_: None)


@pytest.mark.parametrize("transport", ["posix", "cuda_ipc", "cuda_ipc,tcp"])
def test_a_frozen_writer_that_stores_itself_keeps_its_pages_in_quarantine(transport: str) -> None:
    """Nothing but its own word or its end is proof, and it says nothing."""
    world = pair(transport, is_one_host=True)
    run_into_transfers(world)
    node = world.nodes["p0"]
    node.freeze()
    node.worker.stop()
    world.run(world.now + 10.0)
    assert quarantined_count(world) > 0
    node.crash()
    world.run(world.now + 0.1)
    run_until_back(world)
