"""When a decode server dials a link anew, seen through its core."""

from __future__ import annotations

import pytest

from common.protocol.peer import Hello
from common.scheduling.events import Dial, Effect, HangUp, LinkDropped, ToPeer
from common.scheduling.peers import HELLO_INTERVAL_S, REFUSED_RETRY_S
from common.transfers.addresses import UNANSWERED_HELLO_COUNT_MAX
from decode_server.scheduler import DecodeScheduler
from tests.sim.world import World

LINK = "p0:1"
PROMPT = list(range(20, 60))


@pytest.fixture
def world() -> World:
    """A connected pair at rest, at time 3."""
    world = World(seed=1)
    world.add("p0", "prefill", 4, 64)
    world.add("d0", "decode", 4, 64).links = [LINK]
    world.begin()
    assert is_connected(world)
    return world


def decode(world: World) -> DecodeScheduler:
    core = world.nodes["d0"].core
    assert isinstance(core, DecodeScheduler)
    return core


def is_connected(world: World) -> bool:
    return [peer.link for peer in decode(world).transfers.links.connections.sources()] == [LINK]


class Watch:
    """What the decode server's core wants done about links from here on."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dialled: list[Effect] = []
        self.hello_count = 0
        schedule = decode(world).schedule

        def watched(now: float) -> list[Effect]:
            effects = schedule(now)
            self.dialled += [effect for effect in effects if isinstance(effect, Dial | HangUp)]
            self.hello_count += sum(
                isinstance(effect, ToPeer) and isinstance(effect.message, Hello)
                for effect in effects
            )
            return effects

        monkeypatch.setattr(decode(world), "schedule", watched)


def test_a_link_on_which_no_hello_is_answered_is_dialled_anew(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.nodes["p0"].crash()
    world.run(world.now + 2.0)
    watch = Watch(world, monkeypatch)
    while watch.hello_count < 4 * UNANSWERED_HELLO_COUNT_MAX:
        world.run(world.now + HELLO_INTERVAL_S)
    assert watch.dialled == [HangUp(LINK), Dial(LINK)] * 4


def test_a_server_that_refuses_is_not_dialled_anew(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    p0 = world.nodes["p0"]
    p0.crash()
    p0.boot()
    p0.facts.fingerprint["model"] = "another"
    world.run(world.now + 1.0)
    watch = Watch(world, monkeypatch)
    world.run(world.now + 4 * REFUSED_RETRY_S)
    assert not is_connected(world)
    assert watch.hello_count >= 3 and watch.dialled == []


def test_a_link_that_says_nonsense_is_given_up_and_dialled_anew(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = world.submit(world.nodes["d0"], PROMPT, 4)
    core, watch = decode(world), Watch(world, monkeypatch)
    assert core.transfers.incoming.under_way_count == 1
    world.nodes["d0"].feed(LinkDropped(LINK, "16 malformed messages"))
    assert not is_connected(world) and core.transfers.incoming.abandoned_count == 1
    assert "16 malformed messages" in world.nodes["d0"].state().peers[0].detail
    world.run(world.now + 5.0)
    assert watch.dialled == [HangUp(LINK), Dial(LINK)]
    assert is_connected(world) and client.finals == ["finished"]
    assert core.transfers.incoming.abandoned_count == 0


def test_a_server_that_says_nothing_but_nonsense_is_left_alone_for_a_while(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.nodes["p0"].crash()
    world.run(world.now + 2.0)
    core, watch = decode(world), Watch(world, monkeypatch)
    assert core.handle(LinkDropped(LINK, "16 malformed messages"), world.now) == []
    world.run(world.now + 0.9 * REFUSED_RETRY_S)
    assert watch.dialled == [] and watch.hello_count == 0
    world.run(world.now + 0.2 * REFUSED_RETRY_S)
    assert watch.dialled == [HangUp(LINK), Dial(LINK)] and watch.hello_count > 0
    assert core.handle(LinkDropped("unknown:1", "nonsense"), world.now) == []
