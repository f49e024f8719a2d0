"""A link that was dropped for nonsense is dialled anew and serves again: the real cores and the
real channel between them, under the simulation's clock."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from common.channel.peer import PeerListener
from common.channel.poller import Poller
from common.config import Role
from common.protocol.peer import PeerMessage
from common.runtime.peer_endpoint import MALFORMED_COUNT_MAX, PeerEndpoint
from common.scheduling.events import Dial, Effect, HangUp
from decode_server.scheduler import DecodeScheduler
from prefill_server.scheduler import PrefillScheduler
from tests.common.test_peer_endpoint import NONSENSE, endpoint
from tests.sim.client import Client
from tests.sim.node import Node
from tests.sim.world import World

PROMPT = list(range(20, 60))
STEP_S = 0.02
POLL_S = 0.005  # what a message may take on the loopback, of a beat of the simulation
STEP_COUNT_MAX = 5000  # only a failing test takes so many


class WiredWorld(World):
    """p0 and d0, whose schedulers speak over ZMQ in place of the simulated network."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.lines: list[str] = []
        self.ends: dict[str, PeerEndpoint] = {}
        self._poller = Poller()
        for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
            end = endpoint(role, self.lines)
            self.ends[name] = end
            self._poller.register(end.links)
            self._wire(self.add(name, role.value, 4, 64), end)
        listener = self.ends["p0"].links
        assert isinstance(listener, PeerListener)
        self.link = f"127.0.0.1:{listener.port}"
        self.nodes["d0"].links = [self.link]
        for node in self.nodes.values():
            node.boot()
        self.start_ticks()

    def _wire(self, node: Node, end: PeerEndpoint) -> None:
        """What a node does about links is done to its sockets."""
        carry_out = node.carry_out

        def carry_out_links(effects: list[Effect]) -> None:
            for effect in effects:
                if isinstance(effect, Dial):
                    assert end.dial(effect.link) is None
                elif isinstance(effect, HangUp):
                    end.hang_up(effect.link)
            carry_out(effects)

        node.carry_out = carry_out_links  # type: ignore[method-assign]

    def post(self, sender: Node, link: str, message: PeerMessage) -> None:
        assert self.ends[sender.name].send(link, message) is None

    def step(self) -> None:
        self.run(self.now + STEP_S)
        self._poller.poll(POLL_S)
        for name, end in self.ends.items():
            for event in end.receive():
                self.nodes[name].feed(event)

    @property
    def connected_links(self) -> list[str]:
        """As the prefill server names them."""
        core = self.nodes["p0"].core
        assert isinstance(core, PrefillScheduler)
        return [peer.link for peer in core.transfers.links.connections if peer.phase == "connected"]

    @property
    def is_connected(self) -> bool:
        core = self.nodes["d0"].core
        assert isinstance(core, DecodeScheduler)
        return bool(core.transfers.links.connections.sources()) and bool(self.connected_links)

    def wait_connected(self) -> str:
        """The link by which the two are connected, as the prefill server names it."""
        for _ in range(STEP_COUNT_MAX):
            if self.is_connected:
                return self.connected_links[0]
            self.step()
        raise AssertionError("never connected")

    def ask(self) -> Client:
        """A request that has ended."""
        client = self.submit(self.nodes["d0"], PROMPT, 4)
        for _ in range(STEP_COUNT_MAX):
            if client.finals:
                return client
            self.step()
        raise AssertionError("never answered")


@pytest.fixture
def world() -> Iterator[WiredWorld]:
    world = WiredWorld()
    with contextlib.ExitStack() as stack:
        for end in world.ends.values():
            stack.callback(end.close)
        yield world


def until_dropped(world: WiredWorld, speaker: str, link: str) -> None:
    """Have a server say nonsense until the other one has had enough."""
    for _ in range(STEP_COUNT_MAX):
        if f"{MALFORMED_COUNT_MAX} malformed" in "".join(world.lines):
            return
        world.ends[speaker].links.send(link, NONSENSE)
        world.step()
    raise AssertionError("never dropped")


@pytest.mark.slow
def test_a_prefill_server_that_dropped_a_link_is_found_again(world: WiredWorld) -> None:
    first = world.wait_connected()
    assert world.ask().finals == ["finished"]
    until_dropped(world, "d0", world.link)
    assert world.ask().finals == ["finished"]
    assert world.wait_connected() != first


@pytest.mark.slow
def test_a_decode_server_that_dropped_a_link_finds_its_server_again(world: WiredWorld) -> None:
    first = world.wait_connected()
    assert world.ask().finals == ["finished"]
    until_dropped(world, "p0", first)
    assert world.ask().finals == ["finished"]
    assert world.wait_connected() != first
