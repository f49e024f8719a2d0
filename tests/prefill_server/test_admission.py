"""Who is computed next where pages are short, and what it costs to find out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.failures import Failure, FailureKind
from common.protocol.worker import WorkerBeat
from common.request import Bootstrap
from common.scheduling.events import FromPeer, FromWorker, Tick
from common.scheduling.facts import PASSED_OVER_MAX_S
from common.scheduling.page_account import PageAccount
from common.scheduling.transitions import PrefillState
from prefill_server.request import PrefillRequest
from prefill_server.requests import UNDISTURBED_S
from prefill_server.scheduler import PrefillScheduler
from tests.prefill_server.test_links import reservation
from tests.sim.sim_transfers import SimTransfers
from tests.sim.world import World

FILLING = 200  # tokens; the pool of the prefill server has 256
QUEUED_COUNT = 40
STEP_S = 0.02


def core_of(world: World) -> PrefillScheduler:
    core = world.nodes["p0"].core
    assert isinstance(core, PrefillScheduler)
    return core


def ask(world: World, transfer_id: int, token_count: int) -> PrefillRequest:
    """Ask for a prompt that shares nothing with any other."""
    tokens = tuple(range(1000 * transfer_id, 1000 * transfer_id + token_count))
    world.nodes["p0"].feed(FromPeer("d0", reservation(world, transfer_id, tokens)))
    transfer = core_of(world).transfers.outgoing.get(transfer_id)
    request = core_of(world).requests.get(transfer.owner) if transfer is not None else None
    assert request is not None
    return request


@pytest.fixture
def filled(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """The pages of one prompt can't leave, and what is left holds no long one."""
    monkeypatch.setattr(SimTransfers, "_settle", lambda self, send, error: None)
    filling = ask(world, 1, FILLING)
    world.run(world.now + 0.6)
    assert filling.state is PrefillState.SENDING
    return world


def counted(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """Calls of these methods of the page account, as they happen."""
    calls: list[str] = []

    def wrap(name: str, method: Callable[..., object]) -> None:
        def call(self: PageAccount, *arguments: object, **more: object) -> object:
            calls.append(name)
            return method(self, *arguments, **more)

        monkeypatch.setattr(PageAccount, name, call)

    for name in names:
        wrap(name, getattr(PageAccount, name))
    return calls


def test_nobody_is_looked_at_again_while_nothing_changes(
    filled: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    p0, core = filled.nodes["p0"], core_of(filled)
    for index in range(QUEUED_COUNT):
        ask(filled, 10 + index, 100)
    looks = counted(monkeypatch, "open", "match", "can_allocate")
    for index in range(100):
        filled.now += 0.001
        p0.carry_out(core.handle(FromWorker(WorkerBeat(0, index)), filled.now))
        p0.carry_out(core.schedule(filled.now))
        p0.carry_out(core.handle(Tick(), filled.now))
        p0.carry_out(core.schedule(filled.now))
    assert looks == []
    ask(filled, 100, 110)
    assert looks == [], "it is longer than those that do not fit"


def test_an_arrival_is_looked_at_alone(filled: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(QUEUED_COUNT):
        ask(filled, 10 + index, 100)
    looks = counted(monkeypatch, "open")
    shorter = ask(filled, 100, 90)
    assert looks == ["open"] and shorter.state is PrefillState.QUEUED
    fitting = ask(filled, 101, 20)
    assert len(looks) == 2 and fitting.state is PrefillState.PREFILLING


def test_prefixes_that_are_cached_and_in_vain_are_looked_at_once(
    filled: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To find out that the rest does not fit moves no page, so nobody is looked at for that."""
    core, cached = core_of(filled), tuple(range(500, 508))
    room = Bootstrap("p0", 1, 70, filled.nodes["p0"].facts.incarnation)
    filled.submit(filled.nodes["p0"], list(cached), 1, room)
    filled.run(filled.now + 0.5)
    held = core.requests.of_room(70)
    assert held is not None and held.state is PrefillState.HELD
    core.meetings.fail(held, Failure(FailureKind.ABORTED, "it is in the way"), filled.now)
    assert core.account.cache is not None and core.account.cache.evictable_count(0) == 2
    looks = counted(monkeypatch, "open")
    for index in range(3):
        tokens = (*cached, *range(1000 * index, 1000 * index + 90 - index))
        filled.nodes["p0"].feed(FromPeer("d0", reservation(filled, 10 + index, tokens)))
    assert len(looks) == 3


def test_pages_that_come_back_are_given_to_the_oldest(
    filled: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [ask(filled, 10 + index, 100 - index) for index in range(QUEUED_COUNT)]
    looks = counted(monkeypatch, "open")
    monkeypatch.setattr(SimTransfers, "_settle", SETTLE)
    transfers = filled.nodes["p0"].worker.transfers
    for send in list(transfers._sends_open.values()):
        transfers._settle(send, "")
    states = [request.state for request in requests]
    assert states[0] is PrefillState.PREFILLING
    assert len(looks) <= 2 + sum(state is not PrefillState.QUEUED for state in states)


SETTLE = SimTransfers._settle


def test_shorter_ones_pass_a_prompt_that_does_not_fit_for_a_while_and_no_longer(
    filled: World,
) -> None:
    ask(filled, 10, 100)
    passing = ask(filled, 11, 20)
    assert passing.state is PrefillState.PREFILLING
    filled.run(filled.now + PASSED_OVER_MAX_S + 0.1)
    waiting = ask(filled, 12, 20)
    assert waiting.state is PrefillState.QUEUED


def test_a_prompt_that_waits_too_long_gets_the_pages_of_the_oldest_held_cache(
    world: World,
) -> None:
    rooms = [
        Bootstrap("p0", 1, 70 + index, world.nodes["p0"].facts.incarnation) for index in (0, 1)
    ]
    for index, room in enumerate(rooms):
        world.submit(world.nodes["p0"], list(range(500 * index, 500 * index + 100)), 1, room)
        world.run(world.now + 0.5)
    held = [request for request in core_of(world).requests if request.state is PrefillState.HELD]
    assert len(held) == 2
    waiting = ask(world, 10, 150)
    world.run(held[0].computed_at + UNDISTURBED_S - 0.1)
    assert waiting.state is PrefillState.QUEUED
    world.run(held[0].computed_at + UNDISTURBED_S + 0.5)
    assert waiting.state is not PrefillState.QUEUED
    assert [request.state for request in held] == [PrefillState.FAILED, PrefillState.HELD]
