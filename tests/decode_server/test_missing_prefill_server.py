"""Prefill servers that can't be used: operators and clients are told which, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.prefix_digests import DIGEST_NBYTES
from common.protocol.frontend import GetState, PeerState, State
from common.request import Bootstrap
from common.scheduling.batcher import Batcher
from common.scheduling.events import (
    Dial,
    Effect,
    FromFrontend,
    HangUp,
    LinkRefused,
    Report,
    ToFrontend,
    ToPeer,
)
from common.scheduling.facts import SchedulerLimits
from common.scheduling.log_rate_limiter import BURST
from common.scheduling.peers import REFUSED_RETRY_S
from common.scheduling.transitions import DecodeState
from common.transfers.refusals import SHOWN_COUNT_MAX, SHOWN_S
from decode_server.missing_servers import PEER_WAIT_S
from decode_server.output_lengths import REMEMBERED_COUNT
from prefill_server.scheduler import PrefillScheduler
from tests.sim.client import Client
from tests.sim.node import Node
from tests.sim.world import World

PROMPT = list(range(20, 60))
DIFFERENCE = "model: ours another, theirs sim"


@pytest.fixture
def world() -> World:
    """A decode server that dials p0, which is not up yet, at time 1."""
    world = World(seed=1)
    world.add("p0", "prefill", 4, 64)
    world.add("d0", "decode", 4, 64).links = ["p0:1"]
    world.nodes["d0"].boot()
    world.start_ticks()
    return world


def boot_another_model(world: World) -> Node:
    node = world.nodes["p0"]
    node.boot()
    facts = replace(node.facts, fingerprint={"model": "another"})
    node.core = PrefillScheduler(facts, SchedulerLimits(24, 8, 64))
    return node


def peers(node: Node) -> list[PeerState]:
    for effect in node.core.handle(FromFrontend(GetState(1)), node.world.now):
        if isinstance(effect, ToFrontend) and isinstance(effect.message, State):
            return effect.message.peers
    raise AssertionError("GetState was not answered")


def test_a_request_that_found_nobody_is_told_whom_was_looked_for(world: World) -> None:
    client = world.submit(world.nodes["d0"], PROMPT, 4)
    world.run(world.now + PEER_WAIT_S + 1)
    assert client.failure.startswith("no_prefill_server: ")
    assert "p0:1 connecting" in client.failure


def test_a_connection_that_is_refused_is_told_and_tried_anew(world: World) -> None:
    node = world.nodes["d0"]
    client = world.submit(node, PROMPT, 4)
    effects: list[Effect] = []
    for _ in range(3):
        effects += node.core.handle(LinkRefused("p0:1", "it does not know our key"), world.now)
    told = [effect.text for effect in effects if isinstance(effect, Report)]
    assert told == ["can't connect to prefill server p0:1: it does not know our key"]
    assert [(p.state, p.detail) for p in peers(node)] == [("refused", "it does not know our key")]
    world.run(world.now + 1.0)
    later = node.core.schedule(world.now + REFUSED_RETRY_S)
    assert [type(effect) for effect in later[:3]] == [HangUp, Dial, ToPeer]
    world.run(world.now + PEER_WAIT_S + 1)
    assert client.failure.startswith("no_prefill_server: ")
    assert "p0:1 refused (it does not know our key)" in client.failure


def test_addresses_that_clients_name_fill_no_log(world: World) -> None:
    node = world.nodes["d0"]
    told: list[str] = []
    for index in range(200):
        world.submit(node, PROMPT, 4, Bootstrap(f"host-{index}", 1, index))
        effects = node.core.handle(LinkRefused(f"host-{index}:1", "no way to it"), world.now)
        told += [effect.text for effect in effects if isinstance(effect, Report)]
    line = "can't connect to prefill server host-{}:1: no way to it"
    assert told == [line.format(index) for index in range(BURST)]


def test_a_routed_request_is_told_of_the_server_that_its_body_names(world: World) -> None:
    client = world.submit(world.nodes["d0"], PROMPT, 4, Bootstrap("p9", 7, 1))
    world.run(world.now + PEER_WAIT_S + 1)
    assert "p9:7 connecting" in client.failure
    assert "p0:1" not in client.failure


def wait_for_answer(world: World, client: Client) -> float:
    """When a client is told that no prefill server is there, in s from now."""
    began_at = world.now
    world.run(began_at + PEER_WAIT_S + 1)
    assert client.failure.startswith("no_prefill_server: "), client.failure
    return client.answered_at - began_at


def test_the_wait_for_a_server_begins_when_the_last_one_is_lost(world: World) -> None:
    """However long a request had waited for pages before."""
    world.nodes["p0"].boot()
    world.run(world.now + 3.0)
    pages = world.nodes["d0"].core.account.pool.allocate(0, 64)
    client = world.submit(world.nodes["d0"], PROMPT, 4)
    world.run(world.now + PEER_WAIT_S / 2)
    world.nodes["p0"].crash()
    assert PEER_WAIT_S <= wait_for_answer(world, client) < PEER_WAIT_S + 1
    world.nodes["d0"].core.account.pool.release(0, pages)


def test_a_server_that_comes_back_begins_the_wait_anew(world: World) -> None:
    client = world.submit(world.nodes["d0"], PROMPT, 4, Bootstrap("p0", 1, 1))
    world.run(world.now + PEER_WAIT_S - 3)
    pages = world.nodes["d0"].core.account.pool.allocate(0, 64)
    world.nodes["p0"].boot()
    world.run(world.now + 2)
    assert [peer.state for peer in peers(world.nodes["d0"])] == ["connected"]
    world.nodes["p0"].crash()
    assert PEER_WAIT_S <= wait_for_answer(world, client) < PEER_WAIT_S + 1
    world.nodes["d0"].core.account.pool.release(0, pages)


def test_a_retracted_request_waits_no_longer_for_a_server_than_a_new_one(world: World) -> None:
    decode = world.nodes["d0"]
    for _ in range(REMEMBERED_COUNT):
        decode.core.requests.answers.lengths.note_end(1)
    world.nodes["p0"].boot()
    world.run(world.now + 3.0)
    seeds = [bytes([i]) * DIGEST_NBYTES for i in range(2)]  # not one: no shared pages
    clients = [world.submit(decode, PROMPT, 100, budget_s=60.0, seed=seed) for seed in seeds]
    while not all(client.output for client in clients):
        world.run(world.now + 0.05)
    world.nodes["p0"].crash()
    while not decode.core.requests.counters["retracted"]:
        world.run(world.now + 0.05)
    requests = decode.core.requests
    (waiting,) = [request for request in requests if request.state is DecodeState.WAITING]
    retracted = world.clients[waiting.request_id]
    assert PEER_WAIT_S - 0.1 <= wait_for_answer(world, retracted) < PEER_WAIT_S + 1


def test_a_server_that_a_request_names_is_dialled_while_the_batch_is_full(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = world.nodes["d0"]
    monkeypatch.setattr(Batcher, "ready_count", 1)
    world.submit(node, PROMPT, 4, Bootstrap("p9", 7, 1))
    world.run(world.now + 1.0)
    assert [peer.address for peer in peers(node)] == ["p0:1", "p9:7"]


def test_a_refused_pair_shows_the_differences_on_both_sides(world: World) -> None:
    prefill = boot_another_model(world)
    client = world.submit(world.nodes["d0"], PROMPT, 4)
    world.run(world.now + PEER_WAIT_S + 1)
    (ours,), (theirs,) = peers(world.nodes["d0"]), peers(prefill)
    assert (theirs.state, theirs.detail) == ("refused", DIFFERENCE)
    # What is ours to the one who says it is theirs to the one who shows it.
    said = f"in the other server's words: {DIFFERENCE}"
    assert (ours.state, ours.detail) == ("refused", said)
    assert theirs.incarnation == "d0-1"
    assert ours.detail in client.failure


def test_a_refused_decode_server_that_is_gone_is_no_longer_shown(world: World) -> None:
    prefill = boot_another_model(world)
    world.run(world.now + 3)
    assert len(peers(prefill)) == 1
    world.nodes["d0"].crash()
    world.run(world.now + SHOWN_S + 1)
    assert peers(prefill) == []


def test_only_the_last_refused_decode_servers_are_shown(world: World) -> None:
    prefill = boot_another_model(world)
    for _ in range(SHOWN_COUNT_MAX + 3):
        world.nodes["d0"].boot()
        world.run(world.now + 0.5)
    shown = [peer.incarnation for peer in peers(prefill)]
    assert shown == [f"d0-{life}" for life in range(5, SHOWN_COUNT_MAX + 5)]
