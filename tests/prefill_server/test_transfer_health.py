"""A prefill server whose transfers all fail says so, until one of them arrives."""

from __future__ import annotations

import pytest

from common.protocol.frontend import GetState, State
from common.scheduling.breaker import FAILURE_COUNT_MAX
from common.scheduling.events import Effect, FromFrontend, Report, ToFrontend
from common.transfers.transfer_health import (
    LATELY_S,
    RECORD_COUNT_MAX,
    TransferHealth,
)
from tests.sim.sim_transfers import SimTransfers
from tests.sim.world import World
from tests.worker.whole_send import WholeSend

PROMPT = list(range(20, 60))


def failed(health: TransferHealth, peer: str, now: float = 0.0) -> None:
    for _ in range(FAILURE_COUNT_MAX):
        health.note_failure(peer, now)


def test_one_peer_that_is_reached_is_enough() -> None:
    health = TransferHealth()
    failed(health, "a")
    assert health.describe(["a"], 1.0) == "the last 3 transfers to each of 1 decode servers failed"
    assert health.describe(["a", "b"], 1.0) == "" == health.describe([], 1.0)
    health.note_success("a")
    assert health.describe(["a"], 1.0) == ""


def test_a_few_failures_and_old_ones_say_nothing() -> None:
    health = TransferHealth()
    for _ in range(FAILURE_COUNT_MAX - 1):
        health.note_failure("a", 5.0)
    assert health.describe(["a"], 5.0) == ""
    health.note_failure("a", 6.0)
    assert health.describe(["a"], 5.0 + LATELY_S) != ""
    assert health.describe(["a"], 6.0 + LATELY_S) == ""


def test_what_is_remembered_of_peers_is_bounded() -> None:
    health = TransferHealth()
    for index in range(RECORD_COUNT_MAX + 1):
        failed(health, f"peer-{index}")
    assert health.describe(["peer-0"], 0.0) == ""
    assert health.describe(["peer-1", f"peer-{RECORD_COUNT_MAX}"], 0.0) != ""


def reports(effects: list[Effect]) -> list[str]:
    return [effect.text for effect in effects if isinstance(effect, Report)]


def trouble(world: World) -> str:
    node = world.nodes["p0"]
    (effect,) = node.core.handle(FromFrontend(GetState(1)), world.now)
    assert isinstance(effect, ToFrontend) and isinstance(effect.message, State)
    return effect.message.trouble


@pytest.mark.parametrize("later_s", [0.1, LATELY_S])
def test_the_log_claims_no_success_that_nobody_saw(world: World, later_s: float) -> None:
    core, health = world.nodes["p0"].core, world.nodes["p0"].core.transfers.outgoing.health
    (target,) = core.transfers.links.connections.targets()
    peer = target.incarnation
    failed(health, peer, world.now)
    told = reports(core.schedule(world.now))
    assert len(told) == 1 and told[0].startswith(f"the last {FAILURE_COUNT_MAX} transfers")
    if later_s < LATELY_S:
        health.note_success(peer)
    told = reports(core.schedule(world.now + later_s))
    assert told[-1] == "transfers are not known to fail any more"


def test_health_is_red_while_puts_fail_and_green_after_a_self_test(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settle = SimTransfers._settle

    def fail(self: SimTransfers, send: WholeSend, error: str) -> None:
        settle(self, send, error or "no route to host")

    monkeypatch.setattr(SimTransfers, "_settle", fail)
    client = world.submit(world.nodes["d0"], PROMPT, 4)
    world.run(world.now + 1.0)
    assert client.failure.startswith("transfer_failed")
    assert trouble(world).startswith(f"the last {FAILURE_COUNT_MAX} transfers")
    assert world.nodes["d0"].core.handle(FromFrontend(GetState(1)), world.now)
    monkeypatch.undo()
    world.run(world.now + 40.0)
    assert trouble(world) == ""
