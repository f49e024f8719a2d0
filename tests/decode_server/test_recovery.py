"""What a decode server does when prefill servers fail it: others, itself, or one clear answer."""

from __future__ import annotations

from itertools import pairwise

import pytest

from common.protocol.frontend import GetState, State
from common.protocol.peer import TransferFailed, TransferRequest
from common.request import Bootstrap
from common.scheduling.breaker import FAILURE_COUNT_MAX
from common.scheduling.events import Effect, FromFrontend, ToFrontend, ToPeer
from decode_server.missing_servers import FALLBACK_WAIT_S, PEER_WAIT_S
from decode_server.starvation import STARVED_END_S, STARVED_TROUBLE_S
from tests.sim.client import Client
from tests.sim.node import Node
from tests.sim.world import World

PROMPT = list(range(20, 60))


def make_world(*, may_fall_back: bool = False, has_prefill: bool = True) -> World:
    world = World(seed=1)
    world.add("p0", "prefill", 4, 64)
    world.add("d0", "decode", 4, 64).links = ["p0:1"]
    world.nodes["d0"].may_fall_back = may_fall_back
    for name in ("p0", "d0") if has_prefill else ("d0",):
        world.nodes[name].boot()
    world.start_ticks()
    world.run(3.0)
    return world


def ask(world: World, room: Bootstrap | None = None) -> Client:
    return world.submit(world.nodes["d0"], PROMPT, 4, room)


def state(node: Node) -> State:
    for effect in node.core.handle(FromFrontend(GetState(1)), node.world.now):
        if isinstance(effect, ToFrontend) and isinstance(effect.message, State):
            return effect.message
    raise AssertionError("GetState was not answered")


def test_a_prompt_is_computed_here_if_that_is_allowed_and_nobody_else_can() -> None:
    world = make_world(may_fall_back=True, has_prefill=False)
    assert state(world.nodes["d0"]).is_ready
    client, routed = ask(world), ask(world, Bootstrap("p0", 1, 5))
    world.run(world.now + FALLBACK_WAIT_S - 0.5)
    assert client.finals == []
    world.run(world.now + 1.0)
    assert client.finals == ["finished"] and client.output == client.expected()
    assert state(world.nodes["d0"]).counters["computed_here"] == 1
    # A router has its own other half to try again with.
    world.run(world.now + PEER_WAIT_S)
    assert routed.failure.startswith("no_prefill_server")


def test_without_the_fallback_it_is_answered_503() -> None:
    world = make_world(has_prefill=False)
    client = ask(world)
    world.run(world.now + PEER_WAIT_S + 0.5)
    assert client.failure.startswith("no_prefill_server")


def test_a_request_whose_transfer_broke_is_computed_here_within_its_time() -> None:
    world = make_world(may_fall_back=True)
    client = ask(world)
    world.nodes["p0"].crash()
    world.run(world.now + FALLBACK_WAIT_S + 1.0)
    assert client.finals == ["finished"] and client.output == client.expected()


def fail_transfers(world: World, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """p0 answers every reservation with a failure; when it was asked."""
    prefill, asked_at = world.nodes["p0"], []
    carry_out = Node.carry_out

    def fail(self: Node, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ToPeer) and isinstance(effect.message, TransferRequest):
                asked_at.append(world.now)
                message = effect.message
                failed = TransferFailed(
                    message.transfer_id,
                    message.incarnation,
                    "transfer_failed",
                    "broken",
                    500,
                    is_retryable=True,
                )
                world.post(prefill, self.name, failed)
            else:
                carry_out(self, [effect])

    monkeypatch.setattr(Node, "carry_out", fail)
    return asked_at


def test_a_server_that_fails_in_a_row_is_left_alone_and_probed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = make_world()
    asked_at = fail_transfers(world, monkeypatch)
    clients = [ask(world)]
    world.run(world.now + 0.3)
    assert len(asked_at) == FAILURE_COUNT_MAX and clients[0].failure.startswith("transfer_failed")
    told = state(world.nodes["d0"])
    assert (told.counters["retried"], told.counters["transfer_failed"]) == (2, 1)
    (peer,) = told.peers
    assert (peer.state, peer.breaker, peer.breaker_open_count) == ("connected", "open", 1)
    clients += [ask(world) for _ in range(4)]
    world.run(world.now + 7.0)
    gaps = [b - a for a, b in pairwise(asked_at[2:])]
    assert len(gaps) in (2, 3, 4) and gaps == sorted(gaps), "one at a time, ever more seldom"
    monkeypatch.undo()
    world.run(world.now + 12.0)
    assert state(world.nodes["d0"]).peers[0].breaker == "closed"
    assert clients[-1].finals == ["finished"]


def test_pages_in_quarantine_that_starve_the_server_are_said_and_end_it() -> None:
    world = make_world()
    decode, pool = world.nodes["d0"], world.nodes["d0"].core.account.pool
    pool.quarantine(0, pool.allocate(0, 60))
    client = ask(world)
    world.run(world.now + STARVED_TROUBLE_S + 0.5)
    assert state(decode).trouble.startswith("nothing fits beside the pages in quarantine")
    assert state(decode).counters["starved"] == 1 and not decode.given_up
    world.run(world.now + 20.0)
    assert client.failure.startswith("overloaded")
    # Nobody waits any more, since the frontend sends everybody away; it is no better for that.
    world.run(world.now + STARVED_END_S - 20.0)
    assert decode.given_up


def test_a_server_that_runs_something_is_not_starved() -> None:
    world = make_world()
    pool = world.nodes["d0"].core.account.pool
    pages = pool.allocate(0, 60)
    pool.quarantine(0, pages)
    client = ask(world)
    world.run(world.now + STARVED_TROUBLE_S + 1.0)
    pool.release_quarantined(0, pages)
    world.run(world.now + 1.0)
    assert client.finals == ["finished"] and state(world.nodes["d0"]).trouble == ""


def test_a_self_test_that_fails_turns_health_red_until_one_goes_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = make_world()
    decode, prefill = world.nodes["d0"], world.nodes["p0"]
    asked_at = fail_transfers(world, monkeypatch)
    world.run(world.now + 27.0)
    assert asked_at == [] and state(decode).is_ready
    world.run(world.now + 3.0)
    assert len(asked_at) == 1 and not state(decode).is_ready
    (peer,) = state(decode).peers
    assert (peer.state, peer.detail) == ("connected", "self-test: broken")
    assert peer.is_self_test_failing
    monkeypatch.undo()
    world.run(world.now + 6.0)
    assert state(decode).is_ready and state(decode).peers[0].detail == ""
    assert not state(decode).peers[0].is_self_test_failing
    tested = state(decode).counters
    assert (tested["self_tests"], tested["self_tests_failed"]) == (3, 1), "one when it connected"
    # It is nobody's request.
    for counters in (state(decode).counters, state(prefill).counters):
        assert counters["requests"] == counters["finished"] == 0
    assert state(decode).counters["failed"] == 0
    assert decode.core.account.pool.used_count(0) == 0


@pytest.mark.parametrize("interval_s", [30.0, 0.0])
def test_a_new_connection_is_ready_once_a_transfer_went_well_if_any_is_tried(
    interval_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(has_prefill=False)
    decode = world.nodes["d0"]
    decode.crash()
    decode.self_test_interval_s = interval_s
    asked_at = fail_transfers(world, monkeypatch)
    for name in ("d0", "p0"):
        world.nodes[name].boot()
    world.run(world.now + 4.0)
    assert state(decode).peers[0].state == "connected"
    assert (len(asked_at), state(decode).is_ready) == ((1, False) if interval_s else (0, True))
    monkeypatch.undo()
    world.run(world.now + 6.0)
    assert state(decode).is_ready


def test_a_client_s_transfer_mode_proves_a_connection_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = make_world(has_prefill=False)
    fail_transfers(world, monkeypatch)
    world.nodes["p0"].boot()
    world.run(world.now + 4.0)
    assert not state(world.nodes["d0"]).is_ready
    monkeypatch.undo()
    client = ask(world)
    world.run(world.now + 0.5)
    assert client.finals == ["finished"] and state(world.nodes["d0"]).is_ready


def test_a_self_test_that_finds_no_room_here_blames_nobody() -> None:
    world = make_world()
    pool = world.nodes["d0"].core.account.pool
    pages = pool.allocate(0, pool.free_count(0))
    world.run(world.now + 60.0)
    assert state(world.nodes["d0"]).is_ready
    assert state(world.nodes["d0"]).peers[0].detail == ""
    pool.release(0, pages)


def test_who_is_handed_caches_is_not_tested() -> None:
    world = make_world()
    tests = 0

    def count(node: Node, effect: Effect) -> None:
        nonlocal tests
        message = effect.message if isinstance(effect, ToPeer) else None
        tests += isinstance(message, TransferRequest) and message.is_self_test

    world.watchers.append(count)
    for _ in range(3):
        ask(world)
        world.run(world.now + 20.0)
    assert tests == 0
    world.run(world.now + 15.0)
    assert tests == 1
