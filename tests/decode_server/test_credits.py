"""How much a prefill server takes, and where requests wait meanwhile: at the decode server."""

from __future__ import annotations

from collections import Counter

import pytest

from common.protocol.frontend import GetState, State
from common.protocol.peer import Heartbeat, TransferFailed, TransferRequest
from common.scheduling.events import Effect, FromFrontend, FromPeer, ToFrontend, ToPeer
from decode_server.scheduler import DecodeScheduler
from prefill_server.scheduler import PrefillScheduler
from tests.sim.client import Client
from tests.sim.node import Node
from tests.sim.verdict import judge
from tests.sim.world import World

PROMPT_TOKENS = 40


class Watched:
    """Servers at rest at time 3, and what their schedulers say to each other from then on."""

    def __init__(
        self,
        *,
        decode_count: int,
        prefill_count: int = 1,
        queue_max: int = 64,
        page_count: int = 4000,
    ) -> None:
        self.world = World(seed=1)
        names = [f"p{index}" for index in range(prefill_count)]
        for name in names:
            self.world.add(name, "prefill", 4, 400).queue_max = queue_max
        for index in range(decode_count):
            node = self.world.add(f"d{index}", "decode", 4, page_count)
            node.links = [f"{name}:1" for name in names]
        self.world.begin()
        self.refusals: list[TransferFailed] = []
        self.asked: Counter[str] = Counter()
        self.world.watchers.append(self._note)

    def _note(self, node: Node, effect: Effect) -> None:
        if isinstance(effect, ToPeer) and isinstance(effect.message, TransferFailed):
            self.refusals.append(effect.message)
        if isinstance(effect, ToPeer) and isinstance(effect.message, TransferRequest):
            self.asked[effect.link] += 1

    def submit(self, name: str, count: int) -> list[Client]:
        node = self.world.nodes[name]
        start = 1000 * len(self.world.clients)
        prompts = [
            list(range(start + 1000 * i, start + 1000 * i + PROMPT_TOKENS)) for i in range(count)
        ]
        return [self.world.submit(node, prompt, 2) for prompt in prompts]

    def decode(self, name: str) -> DecodeScheduler:
        core = self.world.nodes[name].core
        assert isinstance(core, DecodeScheduler)
        return core

    def prefill(self, name: str = "p0") -> PrefillScheduler:
        core = self.world.nodes[name].core
        assert isinstance(core, PrefillScheduler)
        return core


def all_finished(clients: list[Client]) -> bool:
    return all(client.finals == ["finished"] for client in clients)


def test_what_a_prefill_server_has_no_room_for_waits_and_is_not_refused() -> None:
    """Twelve decode servers bring half as many again at one moment as its queue takes."""
    watched = Watched(decode_count=12)
    clients = [c for index in range(12) for c in watched.submit(f"d{index}", 8)]
    watched.world.run(watched.world.now + 15.0)
    assert all_finished(clients) and watched.refusals == []
    judge(watched.world)


def test_a_decode_server_alone_is_soon_given_most_of_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(decode_count=4)
    monkeypatch.setattr(watched.world.nodes["p0"].worker, "handle", lambda *_: None)
    clients = watched.submit("d0", 60)
    watched.world.run(watched.world.now + 0.05)
    assert 32 < watched.asked["p0:1"] < 64 and watched.refusals == []
    other = watched.submit("d1", 8)
    assert watched.asked["p0:1"] - len(clients) < 8
    watched.world.run(watched.world.now + 0.05)
    assert len(watched.prefill().requests) <= 64 and not any(c.finals for c in clients + other)


def test_room_is_told_at_once_to_who_has_used_all_of_it() -> None:
    """And not with the next heartbeat: else a queue of four would take four in that time."""
    watched = Watched(decode_count=1, queue_max=4)
    clients = watched.submit("d0", 24)
    began_at = watched.world.now
    watched.world.run(began_at + 15.0)
    assert all_finished(clients) and watched.refusals == []
    # Each takes two steps of at most 20 ms, and some messages.
    assert max(client.answered_at for client in clients) - began_at < 24 * 0.06


def test_a_refusal_of_what_came_at_the_same_moment_is_no_attempt() -> None:
    """Two decode servers that were both told of more than there is."""
    watched = Watched(decode_count=2, prefill_count=2, queue_max=8)
    for name in ("d0", "d1"):
        for peer in watched.decode(name).transfers.links.connections:
            peer.credits = 8
    clients = watched.submit("d0", 14) + watched.submit("d1", 14)
    watched.world.run(watched.world.now + 10.0)
    assert {failed.kind for failed in watched.refusals} == {"queue_full"}
    assert len(watched.refusals) <= 20, "it is not asked again before it says that it has room"
    assert all_finished(clients)
    counters = [watched.decode(name).requests.counters for name in ("d0", "d1")]
    assert [count["retried"] for count in counters] == [0, 0]


def test_what_waits_goes_to_whichever_server_has_room_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(decode_count=1, prefill_count=2, queue_max=4)
    monkeypatch.setattr(watched.world.nodes["p0"].worker, "handle", lambda *_: None)
    clients = watched.submit("d0", 20)
    watched.world.run(watched.world.now + 1.5)
    assert watched.asked["p0:1"] <= 4
    assert sum(client.finals == ["finished"] for client in clients) >= 16


def test_who_can_not_begin_within_its_time_is_answered_503(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(decode_count=1, queue_max=4)
    monkeypatch.setattr(watched.world.nodes["p0"].worker, "handle", lambda *_: None)
    clients = watched.submit("d0", 4)
    late = watched.world.submit(watched.world.nodes["d0"], list(range(9)), 2, budget_s=1.0)
    watched.world.run(watched.world.now + 1.1)
    assert late.failure.startswith("overloaded") and not any(client.finals for client in clients)


@pytest.mark.parametrize(("queue_max", "page_count", "prealloc"), [(4, 4000, 0), (64, 40, 9)])
def test_operators_see_whether_pages_or_prefill_servers_are_short(
    monkeypatch: pytest.MonkeyPatch, queue_max: int, page_count: int, prealloc: int
) -> None:
    watched = Watched(decode_count=1, queue_max=queue_max, page_count=page_count)
    monkeypatch.setattr(watched.world.nodes["p0"].worker, "handle", lambda *_: None)
    watched.submit("d0", 12)
    watched.world.run(watched.world.now + 0.05)
    asked = FromFrontend(GetState(1))
    (told,) = watched.decode("d0").handle(asked, watched.world.now)
    assert isinstance(told, ToFrontend) and isinstance(told.message, State)
    assert told.message.queues["waiting"] == 12 - watched.asked["p0:1"] > 0
    assert told.message.queues["prealloc"] == prealloc


def test_credits_come_back_however_a_transfer_ends() -> None:
    watched = Watched(decode_count=1, queue_max=4)
    clients = watched.submit("d0", 12)
    watched.world.run(watched.world.now + 0.01)
    for client in clients[:6]:
        watched.world.cancel(client)
    watched.world.run(watched.world.now + 5.0)
    assert all_finished(clients[6:])
    (peer,) = watched.decode("d0").transfers.links.connections
    assert watched.decode("d0").transfers.incoming.open_count(peer.attachment) == 0
    assert not watched.prefill()._credits._open
    judge(watched.world)


def test_a_server_that_says_nothing_of_credits_is_asked_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(decode_count=1, queue_max=4)
    monkeypatch.setattr(watched.world.nodes["p0"].worker, "handle", lambda *_: None)
    (peer,) = watched.decode("d0").transfers.links.connections
    silent = Heartbeat(peer.incarnation, 10**6, 0, is_busy=False)
    watched.world.nodes["d0"].feed(FromPeer("p0:1", silent))
    watched.submit("d0", 12)
    assert watched.asked["p0:1"] == 12
