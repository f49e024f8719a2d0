"""A paused server plans nothing and loses nothing; peers stay, and what is on its way arrives."""

from __future__ import annotations

import pytest

from common.config import DEFAULT_BOOTSTRAP_TIMEOUT_S
from common.protocol.frontend import CallDone, Continue, FlushCache, Pause
from common.protocol.peer import TransferRequest
from common.request import Bootstrap
from common.scheduling.events import DrainEnded, Effect, FromFrontend, ToFrontend, ToPeer
from tests.sim.client import Client
from tests.sim.node import Node
from tests.sim.pauses import go_on, pause
from tests.sim.verdict import judge
from tests.sim.world import World, connected_pair

PROMPT = list(range(20, 60))
TOKEN_COUNT = 40
PAUSE_S = 2 * DEFAULT_BOOTSTRAP_TIMEOUT_S
LONG_S = 4 * PAUSE_S


@pytest.fixture
def world() -> World:
    """A connected pair at rest, at time 3."""
    return connected_pair()


def running(world: World, prompt: list[int] = PROMPT) -> Client:
    """A request in the middle of its output."""
    client = world.submit(world.nodes["d0"], prompt, TOKEN_COUNT, budget_s=LONG_S)
    while not client.output:
        world.run(world.now + 0.001)
    assert len(client.output) < TOKEN_COUNT / 2
    return client


def used_count(node: Node) -> int:
    """Pages that a request holds; cached ones are free."""
    return node.state().page_groups[0].used


def calls_answered(world: World) -> list[CallDone]:
    answers: list[CallDone] = []

    def note(node: Node, effect: Effect) -> None:
        if isinstance(effect, ToFrontend) and isinstance(effect.message, CallDone):
            answers.append(effect.message)

    world.watchers.append(note)
    return answers


@pytest.mark.parametrize("retracts", [False, True])
def test_streams_stand_still_and_go_on_token_for_token(world: World, *, retracts: bool) -> None:
    decode, client = world.nodes["d0"], running(world)
    pause(decode, retracts=retracts)
    world.run(world.now + 0.25)  # steps in flight come back
    count, steps = len(client.output), decode.core.batcher.step_count
    world.run(world.now + PAUSE_S)
    assert (len(client.output), decode.core.batcher.step_count) == (count, steps)
    assert (used_count(decode) == 0) is retracts
    for node in world.nodes.values():
        state = node.state()
        assert (state.counters["peers_lost"], state.trouble) == (0, "")
    assert decode.state().is_paused and not world.nodes["p0"].state().is_paused
    go_on(decode)
    world.run(world.now + 3.0)
    assert client.output == client.expected() and client.finals == ["finished"]
    assert client.retraction_count == retracts
    judge(world)


def test_a_pair_that_stands_still_on_both_sides_loses_no_request(world: World) -> None:
    """Not even halves of routed ones, which wait for each other for a shorter time than that."""
    for node in world.nodes.values():
        pause(node)
    room = Bootstrap("p0", 1, 77)
    halves = [
        world.submit(world.nodes["p0"], PROMPT, 1, room, LONG_S),
        world.submit(world.nodes["d0"], PROMPT, 8, room, LONG_S),
    ]
    plain = [world.submit(world.nodes["d0"], [*PROMPT, n], 8, budget_s=LONG_S) for n in range(3)]
    world.run(world.now + PAUSE_S)
    assert not any(client.finals for client in (*halves, *plain))
    for node in reversed(world.nodes.values()):
        go_on(node)
        world.run(world.now + 5.0)
    assert [client.finals for client in (*halves, *plain)] == [["finished"]] * 5
    assert [client.output for client in plain] == [client.expected() for client in plain]
    judge(world)


def test_a_paused_prefill_server_is_asked_for_nothing_while_another_one_is_there() -> None:
    world = World(seed=2)
    for name in ("p0", "p1"):
        world.add(name, "prefill", 4, 64)
    world.add("d0", "decode", 4, 64).links = ["p0:1", "p1:1"]
    world.begin()
    pause(world.nodes["p0"])
    world.run(world.now + 1.0)  # a heartbeat tells of it
    asked: list[str] = []

    def note(node: Node, effect: Effect) -> None:
        if isinstance(effect, ToPeer) and isinstance(effect.message, TransferRequest):
            asked.append(effect.link)

    world.watchers.append(note)
    clients = [world.submit(world.nodes["d0"], [n, *PROMPT], 4) for n in range(8)]
    world.run(world.now + 5.0)
    assert [client.finals for client in clients] == [["finished"]] * 8
    assert set(asked) == {"p1:1"}
    go_on(world.nodes["p0"])
    world.run(world.now + 1.0)
    clients = [world.submit(world.nodes["d0"], [n, 5, *PROMPT], 4) for n in range(8)]
    world.run(world.now + 5.0)
    assert set(asked) == {"p0:1", "p1:1"}


def test_what_is_on_its_way_arrives_in_a_pause(world: World) -> None:
    decode, prefill = world.nodes["d0"], world.nodes["p0"]
    client = world.submit(decode, PROMPT, 8)
    while not decode.core.transfers.incoming.under_way_count:
        world.run(world.now + 0.0005)
    pause(decode)
    world.run(world.now + 2.0)
    assert decode.core.transfers.is_settled and prefill.core.transfers.is_settled
    assert len(client.output) == 1, "its first token is the prefill server's"
    go_on(decode)
    world.run(world.now + 2.0)
    assert client.output == client.expected()


def test_requests_run_out_of_time_in_a_pause_as_ever(world: World) -> None:
    decode, client = world.nodes["d0"], running(world)
    pause(decode)
    hurried = world.submit(decode, [3, *PROMPT], 4, budget_s=2.0)
    world.run(world.now + 4.0)
    assert hurried.failure.startswith("overloaded")
    assert client.finals == []


def test_a_pause_says_nothing_of_how_fast_the_queue_drains() -> None:
    """Else whoever comes in it, or after it, would be told that it waits too long."""
    world = connected_pair(decode_page_count=40)
    decode = world.nodes["d0"]
    for number in range(40):
        world.submit(decode, [number, *PROMPT], 30, budget_s=LONG_S)
    drain_rate = decode.core.requests.drain_rate  # type: ignore[union-attr]
    while drain_rate.wait_s(1, world.now) is None:
        world.run(world.now + 0.05)
    pause(decode)
    world.run(world.now + 10.0)
    client = world.submit(decode, [77, *PROMPT], 4, budget_s=15.0)
    world.run(world.now + 0.5)
    assert client.finals == []


def test_a_pause_is_answered_once_nothing_is_computed(world: World) -> None:
    decode = world.nodes["d0"]
    running(world)
    answers = calls_answered(world)
    while not decode.core.batcher.is_computing:
        world.run(world.now + 0.0005)
    decode.feed(FromFrontend(Pause(7)))
    assert answers == []
    world.run(world.now + 0.5)
    assert answers == [CallDone(7, True, "")]
    decode.feed(FromFrontend(Continue(8)))
    assert answers[1:] == [CallDone(8, True, "")]


@pytest.mark.parametrize("retracts", [False, True])
def test_cached_prefixes_can_be_flushed_once_all_are_retracted(
    world: World, *, retracts: bool
) -> None:
    """In place their pages are being read, so to speak; as in SGLang."""
    decode, client = world.nodes["d0"], running(world)
    pause(decode, retracts=retracts)
    world.run(world.now + 0.5)
    answers = calls_answered(world)
    decode.feed(FromFrontend(FlushCache(7)))
    assert [answer.is_done for answer in answers] == [retracts]
    go_on(decode)
    world.run(world.now + 3.0)
    assert client.output == client.expected()


def test_who_leaves_workers_to_another_one_ends_what_is_on_its_way_and_no_more(
    world: World,
) -> None:
    """A request that waits is asked for again by its frontend, in the same room."""
    decode, prefill = world.nodes["d0"], world.nodes["p0"]
    pause(prefill)
    world.run(world.now + 0.5)
    waiting = world.submit(decode, PROMPT, 8)
    world.run(world.now + 0.5)
    routed = world.submit(decode, PROMPT, 8, Bootstrap("p0", 1, 77))
    world.run(world.now + 0.5)
    assert decode.core.transfers.incoming.under_way_count == 1, "a room is asked for at once"
    decode.feed(DrainEnded())
    world.run(world.now + 0.5)
    assert routed.failure.startswith("moved") and waiting.finals == []
    assert decode.core.transfers.is_settled and prefill.core.transfers.is_settled
