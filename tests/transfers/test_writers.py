"""What proves that processes which were let in earlier write no more, and what waits for that."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from common.protocol.frontend import Submit
from common.protocol.peer import Hello, Refuse, Welcome
from common.protocol.worker import PeerClosed, ReclaimPeer
from common.protocol.worker_values import PeerWriter
from common.request import SamplingParams
from common.scheduling.events import (
    Effect,
    FromFrontend,
    FromPeer,
    FromWorker,
    GiveUp,
    ProcessesGone,
    Tick,
    ToPeer,
    ToWorkers,
    WatchProcesses,
)
from common.scheduling.facts import SchedulerLimits, ServerFacts
from common.scheduling.peers import Outbox
from common.transfers.introduction import Introduction
from common.transfers.writers import EARLIER_TIMEOUT_S, Writers
from decode_server.scheduler import DecodeScheduler
from prefill_server.scheduler import PrefillScheduler
from tests.sim.node import Node
from tests.sim.world import World

HERE, ELSEWHERE = "boot-1 pid:[1]", "boot-2 pid:[1]"


def node_of(role: str) -> Node:
    """A server of a kind, whose facts are looked at alone."""
    world = World(seed=1)
    node = world.add("p0" if role == "prefill" else "d0", role, 4, 64)
    node.host_ids = (HERE,)
    node.boot()
    return node


def greeting(version: int = 2, incarnation: str = "p0-1", pid: int = 70) -> Welcome:
    """What a prefill server answers."""
    facts = facts_of(incarnation, pid)
    welcome = Introduction(facts, "prefill", True, False, 100).welcome(None, version)
    return structs.replace(welcome, version=version)


def facts_of(incarnation: str, pid: int) -> ServerFacts:
    return replace(node_of("prefill").facts, incarnation=incarnation, host_ids=(HERE,), pids=(pid,))


class Successor:
    """A decode server's core whose workers were let in by a scheduler before."""

    def __init__(self, *writers: PeerWriter) -> None:
        facts = replace(node_of("decode").facts, incarnation="d0-2", earlier_writers=writers)
        self.core = DecodeScheduler(facts, SchedulerLimits(64, 8, 64), ["p:1"], seed=1)
        self.now = 100.0
        self.effects: list[Effect] = []
        self.feed(Tick())
        sampling = SamplingParams(max_new_tokens=4, seed=0, temperature=0.0)
        self.feed(FromFrontend(Submit(1, [5, 6, 7], sampling, 60.0)))

    def feed(self, event: object) -> None:
        self.effects += self.core.handle(event, self.now)  # type: ignore[arg-type]
        self.effects += self.core.schedule(self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.effects += self.core.schedule(self.now)

    def told_workers(self, kind: type) -> list[object]:
        found = [one.message for one in self.effects if isinstance(one, ToWorkers)]
        return [message for message in found if isinstance(message, kind)]

    @property
    def trouble(self) -> str:
        return self.core.transfers.writers.trouble


WRITER = PeerWriter("p0-1", [HERE], [70])


@pytest.mark.parametrize(
    ("event", "is_proof"),
    [
        (FromPeer("p:1", greeting()), True),
        (FromPeer("p:1", greeting(version=1)), False),
        (FromPeer("p:1", greeting(incarnation="p0-2")), True),
        (FromPeer("p:1", greeting(incarnation="p0-2", pid=71)), False),
        (FromPeer("p:1", greeting(version=1, incarnation="p0-2")), True),
        (FromPeer("p:1", Refuse("p0-1", ["weights: differ"], is_closed=True)), True),
        (FromPeer("p:1", Refuse("p0-1", ["weights: differ"])), False),
        (FromPeer("p:1", Refuse("p0-2", ["weights: differ"], is_closed=True)), False),
        (ProcessesGone("p0-1"), True),
        (ProcessesGone("p0-7"), False),
    ],
    ids=["it greets", "an older one greets", "another scheduler of it greets", "a stranger greets",
         "an older one's next scheduler greets", "it refuses us", "an older one refuses us",
         "a stranger refuses us", "it has ended", "another has ended"],
)  # fmt: skip
def test_who_was_let_in_by_the_scheduler_before_is_waited_for(
    event: object, is_proof: bool
) -> None:
    """A process of which only the scheduler is another one has ended all that the last one began;
    one that greets us again has closed its end, from version 2 on."""
    successor = Successor(WRITER)
    assert "p0-1" in successor.trouble
    assert WatchProcesses("p0-1", (70,)) in successor.effects
    successor.feed(event)
    assert (successor.trouble == "") is is_proof
    assert (ReclaimPeer("p0-1") in successor.told_workers(ReclaimPeer)) is is_proof


def test_an_older_one_that_was_let_in_again_is_proved_by_its_end_once_it_is_shut_out() -> None:
    """Its greeting proves nothing, but begins a connection, which its end closes first."""
    successor = Successor(WRITER)
    successor.feed(FromPeer("p:1", greeting(version=1)))
    successor.feed(ProcessesGone("p0-1"))
    assert "p0-1" in successor.trouble
    for rank in range(successor.core.transfers.incoming._rank_count):
        successor.feed(FromWorker(PeerClosed("p0-1", rank)))
    assert successor.trouble == ""


def test_nothing_begins_before_and_everything_after() -> None:
    successor = Successor(PeerWriter("q0-1", [HERE], [80]))
    core = successor.core
    successor.feed(FromPeer("p:1", greeting()))
    before = [one for one in successor.effects if isinstance(one, ToPeer)]
    assert not core.is_ready and len(core.requests.queue) == 1
    assert all(type(one.message).__name__ != "TransferRequest" for one in before)
    used = [core.account.pool.used_count(group) for group in range(len(core.account.groups))]
    assert used == [0] * len(used)
    successor.feed(ProcessesGone("q0-1"))
    assert successor.trouble == ""


def test_one_that_cannot_be_proved_ends_the_server_which_then_starts_with_a_new_pool() -> None:
    successor = Successor(WRITER)
    successor.wait(EARLIER_TIMEOUT_S - 0.1)
    assert not any(isinstance(one, GiveUp) for one in successor.effects)
    successor.wait(0.2)
    (given_up,) = [one for one in successor.effects if isinstance(one, GiveUp)]
    assert "p0-1" in given_up.reason


def test_another_machine_is_fenced_by_what_our_workers_have_closed() -> None:
    successor = Successor(PeerWriter("p0-1", [ELSEWHERE], [70]))
    assert successor.trouble == ""


def test_a_process_without_a_name_is_proved_by_no_other_one() -> None:
    facts = node_of("decode").facts
    writers = Writers(facts, Outbox())
    writers.add_closed("a", ())
    anonymous = structs.replace(greeting(incarnation="b"), host_ids=[], pids=[])
    assert writers.take_greeted(anonymous) == []


def test_the_next_scheduler_of_a_peer_is_welcome_once_our_ranks_have_closed_the_last_one() -> None:
    """A prefill server whose decode server's scheduler crashed hears two incarnations of the same
    processes: what it answers tells the second that nothing of it writes there any more."""
    world = World(seed=1)
    prefill, decode = world.add("p0", "prefill", 4, 64), world.add("d0", "decode", 4, 64)
    decode.links = ["p0:1"]
    for node in (prefill, decode):
        node.boot()
    world.start_ticks()
    world.run(world.now + 1.0)
    core = prefill.core
    assert isinstance(core, PrefillScheduler)
    (connection,) = core.transfers.links.connections.targets()
    facts = replace(decode.facts, incarnation="d0-next")
    hello: Hello = Introduction(facts, "decode", False, True).hello()
    told = core.handle(FromPeer("another link", hello), world.now)
    assert connection.is_succeeded and not connection.is_open
    assert {one.link for one in told if isinstance(one, ToPeer)} == {connection.link}
    prefill.carry_out(told)
    world.run(world.now + 0.2)
    told = core.handle(FromPeer("another link", hello), world.now)
    answers = [one.message for one in told if isinstance(one, ToPeer)]
    assert any(isinstance(message, Welcome) for message in answers)
