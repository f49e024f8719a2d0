"""Halves of a routed request that do not meet: who is told, when, and what is held meanwhile."""

from __future__ import annotations

import pytest

from common.config import DEFAULT_BOOTSTRAP_TIMEOUT_S
from common.protocol.peer import TransferRequest
from common.request import Bootstrap
from common.scheduling.events import FromPeer
from prefill_server.rendezvous import GIVEN_UP_COUNT_MAX
from tests.sim.client import Client
from tests.sim.node import Node
from tests.sim.world import World, connected_pair

PROMPT = list(range(20, 60))
ROOM = Bootstrap("p0", 1, 77)
OTHER_ROOM = Bootstrap("p0", 1, 78)
HOLD_S = 7.0  # below the budget of the clients of a story, 20 s


def prefill(world: World) -> Node:
    return world.nodes["p0"]


def decode(world: World) -> Node:
    return world.nodes["d0"]


def bootstrap_failed_count(node: Node) -> float:
    return node.state().counters["bootstrap_failed"]


def used_count(world: World) -> int:
    return decode(world).core.account.pool.used_count(0)


def cancel_first_half(world: World, room: Bootstrap = ROOM) -> None:
    world.cancel(world.submit(prefill(world), PROMPT, 1, room))


def submit_second_half(world: World, room: Bootstrap = ROOM) -> Client:
    return world.submit(decode(world), PROMPT, 8, room)


def test_a_reservation_hears_at_once_that_its_request_was_cancelled(world: World) -> None:
    cancel_first_half(world)
    client = submit_second_half(world)
    world.run(world.now + 0.5)
    assert client.failure.startswith("other_half_aborted")
    assert used_count(world) == 0 and bootstrap_failed_count(decode(world)) == 1


def test_a_room_that_is_used_again_after_a_cancel_works(world: World) -> None:
    cancel_first_half(world)
    world.submit(prefill(world), PROMPT, 1, ROOM)
    client = submit_second_half(world)
    world.run(world.now + 5.0)
    assert client.output == client.expected()


def test_a_cancelled_room_is_forgotten_in_time(world: World) -> None:
    cancel_first_half(world)
    world.run(world.now + DEFAULT_BOOTSTRAP_TIMEOUT_S + 1)
    client = submit_second_half(world)
    world.run(world.now + 1.0)
    assert client.finals == []
    world.submit(prefill(world), PROMPT, 1, ROOM)
    world.run(world.now + 5.0)
    assert client.output == client.expected()


def test_only_so_many_cancelled_rooms_are_kept_the_newest(world: World) -> None:
    for number in range(GIVEN_UP_COUNT_MAX + 1):
        cancel_first_half(world, Bootstrap("p0", 1, 1000 + number))
    oldest = submit_second_half(world, Bootstrap("p0", 1, 1000))
    second = submit_second_half(world, Bootstrap("p0", 1, 1001))
    world.run(world.now + 0.5)
    assert oldest.finals == []
    assert second.failure.startswith("other_half_aborted")


def test_a_lone_request_hears_at_once_that_its_decode_half_gave_up(world: World) -> None:
    decode(world).core.account.pool.allocate(0, 60)  # so that no reservation can be made
    first = world.submit(prefill(world), PROMPT, 1, ROOM)
    second = submit_second_half(world)
    world.run(world.now + 0.5)
    assert first.finals == second.finals == []
    world.cancel(second)
    world.run(world.now + 0.1)
    assert first.failure.startswith("other_half_aborted")


def test_a_request_whose_decode_half_gave_up_before_it_came_is_answered_at_once(
    world: World,
) -> None:
    pages = decode(world).core.account.pool.allocate(0, 60)
    world.cancel(submit_second_half(world))
    world.run(world.now + 0.1)
    first = world.submit(prefill(world), PROMPT, 1, ROOM)
    assert first.failure.startswith("other_half_aborted")
    # The room was told of once: a router may use it again.
    decode(world).core.account.pool.release(0, pages)
    world.submit(prefill(world), PROMPT, 1, ROOM)
    client = submit_second_half(world)
    world.run(world.now + 5.0)
    assert client.output == client.expected()


def reserve_then_lose(world: World, how: str) -> None:
    """Have a decode server reserve for the room, and give that up before the first half comes."""
    second = submit_second_half(world)
    world.run(world.now + 0.1)
    assert prefill(world).core.meetings.rendezvous.holds_reservation(ROOM.room)
    match how:
        case "abort":
            world.cancel(second)
        case "timeout":
            world.run(world.now + HOLD_S + 0.5)
        case "crash":
            decode(world).crash()
    world.run(world.now + 0.1)
    assert not prefill(world).core.meetings.rendezvous.holds_reservation(ROOM.room)


@pytest.mark.parametrize(
    ("how", "kind"),
    [("abort", "other_half_aborted"), ("timeout", "other_half_aborted"), ("crash", "peer_lost")],
)
def test_a_request_whose_reservation_is_gone_before_it_came_is_answered_at_once(
    how: str, kind: str
) -> None:
    world = connected_pair(hold_s=HOLD_S)
    reserve_then_lose(world, how)
    first = world.submit(prefill(world), PROMPT, 1, ROOM)
    assert first.failure.startswith(kind)
    assert prefill(world).core.is_idle


def test_a_room_whose_reservation_was_given_up_may_be_reserved_again(world: World) -> None:
    reserve_then_lose(world, "abort")
    client = submit_second_half(world)
    world.run(world.now + 0.1)
    world.submit(prefill(world), PROMPT, 1, ROOM)
    world.run(world.now + 5.0)
    assert client.output == client.expected()


@pytest.mark.parametrize("comes_first", ["prefill", "decode"])
def test_a_request_whose_reservation_is_refused_is_answered_at_once(
    world: World, comes_first: str
) -> None:
    prefill(world).core.transfers.outgoing._token_max = len(PROMPT) - 1
    halves = [prefill(world), decode(world)]
    for node in halves if comes_first == "prefill" else reversed(halves):
        world.submit(node, PROMPT, 1 if node is prefill(world) else 8, ROOM)
        world.run(world.now + 0.1)
    kinds = {client.node: client.failure.partition(":")[0] for client in world.clients.values()}
    assert kinds == {"p0": "other_half_aborted", "d0": "bad_reservation"}


@pytest.mark.parametrize("comes_first", ["prefill", "decode"])
def test_a_reservation_whose_request_is_refused_is_answered_at_once(
    world: World, comes_first: str
) -> None:
    prefill(world).core.meetings._queue_max = 1
    world.submit(prefill(world), PROMPT, 1, OTHER_ROOM)
    halves = [prefill(world), decode(world)]
    for node in halves if comes_first == "prefill" else reversed(halves):
        world.submit(node, PROMPT, 1 if node is prefill(world) else 8, ROOM)
        world.run(world.now + 0.1)
    kinds = {client.node: client.failure.partition(":")[0] for client in world.clients.values()}
    assert kinds == {"p0": "queue_full", "d0": "other_half_aborted"} and used_count(world) == 0


@pytest.mark.parametrize("comes_first", ["prefill", "decode"])
def test_a_reservation_finds_no_room_only_if_it_would_wait(world: World, comes_first: str) -> None:
    """Then the other half, which comes later, is told at once."""
    prefill(world).core.meetings._queue_max = 1
    submit_second_half(world, OTHER_ROOM)
    world.run(world.now + 0.1)
    halves = [prefill(world), decode(world)]
    for node in halves if comes_first == "prefill" else reversed(halves):
        world.submit(node, PROMPT, 1 if node is prefill(world) else 8, ROOM)
        world.run(world.now + 0.1)
    world.run(world.now + 2.0)
    _, *clients = world.clients.values()
    if comes_first == "prefill":
        assert [client.finals for client in clients] == [["finished"], ["finished"]]
    else:
        kinds = {client.node: client.failure.partition(":")[0] for client in clients}
        assert kinds == {"p0": "other_half_aborted", "d0": "queue_full"}


def test_a_request_that_is_refused_for_its_room_ends_nobody_else_s(world: World) -> None:
    first = world.submit(prefill(world), PROMPT, 1, ROOM)
    again = world.submit(prefill(world), PROMPT, 1, ROOM)
    assert again.failure.startswith("bad_request") and first.finals == []
    client = submit_second_half(world)
    world.run(world.now + 5.0)
    assert client.output == client.expected() and first.finals == ["finished"]


def test_a_request_that_met_its_reservation_leaves_no_memory(world: World) -> None:
    first = world.submit(prefill(world), PROMPT, 1, ROOM)
    client = submit_second_half(world)
    world.run(world.now + 5.0)
    assert first.finals == client.finals == ["finished"]
    later = submit_second_half(world)
    world.run(world.now + 1.0)
    assert later.finals == []


@pytest.mark.parametrize("half", ["request", "reservation"])
def test_a_lone_half_waits_as_long_as_the_flag_says(half: str) -> None:
    """Whichever it is; --bootstrap-timeout is this test's HOLD_S."""
    world = connected_pair(hold_s=HOLD_S)
    if half == "request":
        client = world.submit(prefill(world), PROMPT, 1, ROOM)
    else:
        client = submit_second_half(world)
    world.run(world.now + HOLD_S - 1)
    assert client.finals == []
    assert used_count(world) > 0 or half == "request"
    world.run(world.now + 2.0)
    assert client.failure.startswith("rendezvous_timeout")
    assert used_count(world) == 0
    assert bootstrap_failed_count(decode(world)) == (half == "reservation")


def test_one_transfer_can_not_wait_in_two_rooms(world: World) -> None:
    """Whoever may reserve can name any id: its second room is not taken, and nothing breaks."""
    for room in (71, 72):
        request = TransferRequest(
            transfer_id=9,
            incarnation=decode(world).facts.incarnation,
            peer_incarnation=prefill(world).facts.incarnation,
            token_count=len(PROMPT),
            pages=[(0, list(range(1, 1 + len(PROMPT) // 4)))],
            budget_ms=20_000,
            writers=[0],
            room=room,
            attachment=1,
        )
        prefill(world).feed(FromPeer("d0", request))
    clients = [
        world.submit(prefill(world), PROMPT, 1, Bootstrap("p0", 1, room)) for room in (71, 72)
    ]
    world.run(world.now + DEFAULT_BOOTSTRAP_TIMEOUT_S + 1)
    assert [client.finals for client in clients] == [["finished"], ["failed"]]
