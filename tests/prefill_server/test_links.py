"""Decode servers and the links they speak on, seen through the prefill server's core."""

from __future__ import annotations

import msgspec
import pytest

from common.protocol.frontend import GetState, State
from common.protocol.peer import (
    Attach,
    Detached,
    Heartbeat,
    Hello,
    Refuse,
    TransferFailed,
    TransferRequest,
    Welcome,
)
from common.protocol.worker import WorkerBeat
from common.request import SamplingParams
from common.scheduling.events import (
    Effect,
    FromFrontend,
    FromPeer,
    FromWorker,
    LinkDropped,
    LinkRefused,
    Report,
    ToPeer,
    UnreadableRequest,
)
from common.scheduling.events import ToFrontend as Told
from common.scheduling.log_rate_limiter import BURST
from common.transfers.connection import shown_link
from common.transfers.handshakes import SPOKEN_FOR, Handshakes
from common.transfers.refusals import REASON_COUNT_MAX
from decode_server.scheduler import DecodeScheduler
from tests.sim.node import Node
from tests.sim.world import World


def hear(world: World, link: str, message: Hello | Heartbeat | Detached) -> list[Effect]:
    return world.nodes["p0"].core.handle(FromPeer(link, message), world.now)


def state(node: Node, now: float) -> State:
    (effect,) = node.core.handle(FromFrontend(GetState(1)), now)
    assert isinstance(effect, Told) and isinstance(effect.message, State)
    return effect.message


def connected_count(world: World) -> int:
    peers = state(world.nodes["p0"], world.now).peers
    return sum(peer.state == "connected" for peer in peers)


def test_another_link_can_not_speak_for_a_peer(world: World) -> None:
    p0, d0 = world.nodes["p0"].facts, world.nodes["d0"].facts
    hello = Hello(1, 1, "decode", d0.incarnation, d0.fingerprint, d0.layout_bytes)
    effects = hear(world, "forger", hello)
    assert effects[0] == ToPeer("forger", Refuse(p0.incarnation, [SPOKEN_FOR], is_closed=True))
    assert hear(world, "forger", Detached(d0.incarnation, p0.incarnation, "a lie")) == []
    (effect,) = hear(world, "forger", Heartbeat(d0.incarnation, 9, 9, False))
    assert isinstance(effect, ToPeer) and effect.link == "forger"
    assert connected_count(world) == 1

    assert hear(world, "d0", Detached(d0.incarnation, p0.incarnation, "its own word")) != []
    assert connected_count(world) == 0


def reservation(
    world: World, transfer_id: int, token_ids: tuple[int, ...] = (5, 6, 7)
) -> TransferRequest:
    """As d0 would ask now."""
    p0, d0 = world.nodes["p0"], world.nodes["d0"]
    assert isinstance(d0.core, DecodeScheduler)
    peer = d0.core.transfers.links.connections.on_link("p0:1")
    assert peer is not None
    return TransferRequest(
        transfer_id=transfer_id,
        incarnation=d0.facts.incarnation,
        peer_incarnation=p0.facts.incarnation,
        token_count=len(token_ids),
        pages=[(0, list(range(1, -(-len(token_ids) // d0.page_size) + 1)))],
        budget_ms=9000,
        writers=[0],
        room=None,
        token_ids=list(token_ids),
        prompt_count=len(token_ids),
        sampling=SamplingParams(max_new_tokens=4, seed=0),
        attachment=peer.attachment,
    )


def unreadable(world: World, transfer_id: int, link: str = "d0") -> list[Effect]:
    """What the prefill server does about a reservation of d0's that it can't read."""
    p0, d0 = world.nodes["p0"], world.nodes["d0"]
    event = UnreadableRequest(link, transfer_id, d0.facts.incarnation, "sampling: no number")
    return p0.core.handle(event, world.now)


def test_a_reservation_that_can_not_be_read_is_answered_once(world: World) -> None:
    (effect,) = unreadable(world, 5)
    failed = TransferFailed(
        5, world.nodes["d0"].facts.incarnation, "bad_reservation", "sampling: no number", 400, True
    )
    assert effect == ToPeer("d0", failed)
    assert unreadable(world, 5) == []


def test_what_can_not_be_read_ends_nothing_that_was_begun_under_its_id(world: World) -> None:
    """Its answer would be taken for the proof that nobody writes the pages of that transfer."""
    p0 = world.nodes["p0"]
    p0.feed(FromPeer("d0", reservation(world, 1 << 40)))
    assert not p0.core.is_idle
    assert unreadable(world, 1 << 40) == []
    assert not p0.core.is_idle
    assert unreadable(world, 2 << 40) != []
    p0.feed(FromPeer("d0", reservation(world, 2 << 40)))
    assert len(list(p0.core.requests)) == 1, "what was refused is not begun when it comes again"  # type: ignore[union-attr]


def test_an_unreadable_reservation_on_a_link_that_is_not_its_own_is_not_answered(
    world: World,
) -> None:
    (effect,) = unreadable(world, 5, "forger")
    assert isinstance(effect, ToPeer) and isinstance(effect.message, Detached)


def test_who_spoke_on_a_dropped_link_is_lost_and_welcome_on_another(world: World) -> None:
    p0, d0 = world.nodes["p0"], world.nodes["d0"]
    p0.feed(FromPeer("d0", reservation(world, 1 << 40)))
    world.network.cut.add(frozenset(("p0", "d0")))
    effects = p0.core.handle(LinkDropped("d0", "16 malformed messages"), world.now)
    told = [e.message for e in effects if isinstance(e, ToPeer) and e.link == "d0"]
    assert any(isinstance(m, Detached) and "16 malformed" in m.reason for m in told)
    assert connected_count(world) == 0
    hello = Hello(1, 1, "decode", d0.facts.incarnation, d0.facts.fingerprint, d0.facts.layout_bytes)
    assert hear(world, "fresh", hello) == [], "its old connection is being closed"
    p0.carry_out(effects)
    world.run(world.now + 0.5)
    assert p0.core.is_idle, "its request has ended"
    (effect,) = hear(world, "fresh", hello)
    assert isinstance(effect, ToPeer) and isinstance(effect.message, Welcome)
    assert p0.core.handle(LinkDropped("nobody", "nonsense"), world.now) == []


def lose(world: World) -> None:
    """p0 hears that d0 has lost it."""
    p0, d0 = world.nodes["p0"], world.nodes["d0"]
    p0.feed(FromPeer("d0", Detached(d0.facts.incarnation, p0.facts.incarnation, "it is lost")))


def meet_anew(world: World) -> None:
    world.run(world.now + 3.0)
    assert connected_count(world) == 1


def test_a_reservation_that_came_while_its_peer_was_lost_is_not_begun_when_it_comes_again(
    world: World,
) -> None:
    """Its pages came back when the connection did, and may be somebody else's by now."""
    p0 = world.nodes["p0"]
    lost = reservation(world, 1 << 40)
    lose(world)
    p0.feed(FromPeer("d0", lost))
    meet_anew(world)
    attachment = reservation(world, 0).attachment
    p0.feed(FromPeer("d0", msgspec.structs.replace(lost, attachment=attachment)))
    assert p0.core.is_idle
    p0.feed(FromPeer("d0", reservation(world, 2 << 40)))
    assert not p0.core.is_idle, "one that is new is begun"


def test_a_reservation_that_comes_after_the_two_have_met_anew_is_not_begun(world: World) -> None:
    """It was on its way all the time, as in a connection that broke. Seed 10101 found it: its pages
    had come back with the fence of the first connection, and the second reaches them."""
    p0 = world.nodes["p0"]
    late = reservation(world, 1 << 40)
    lose(world)
    meet_anew(world)
    stale_count = state(p0, world.now).counters["stale_messages"]
    p0.feed(FromPeer("d0", late))
    assert p0.core.is_idle
    assert state(p0, world.now).counters["stale_messages"] == stale_count + 1
    assert connected_count(world) == 1


def test_what_is_connected_to_an_earlier_attach_is_given_up_and_dialled_anew(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An Attach that comes late tells of memory that is closed; Attached says which one it was."""
    heard: list[Attach] = []
    handle = Handshakes.handle_attach

    def hear_an_earlier_one(self: Handshakes, link: str, attach: Attach, now: float) -> None:
        heard.append(attach)
        if len(heard) == 1:
            attach = msgspec.structs.replace(attach, attachment=attach.attachment - 1)
        handle(self, link, attach, now)

    monkeypatch.setattr(Handshakes, "handle_attach", hear_an_earlier_one)
    lose(world)
    meet_anew(world)
    assert len(heard) == 2
    client = world.submit(world.nodes["d0"], [5, 6, 7], 2)
    world.run(world.now + 1.0)
    assert client.finals == ["finished"]


def test_refused_connections_are_counted_and_each_reason_is_told_once(world: World) -> None:
    core = world.nodes["p0"].core
    told: list[str] = []
    for round_index in range(3):
        for index in range(REASON_COUNT_MAX + 10):
            effects = core.handle(LinkRefused("", f"unknown key {index}"), world.now)
            told += [effect.text for effect in effects if isinstance(effect, Report)]
        assert len(told) == REASON_COUNT_MAX, f"in round {round_index}"
    counters = state(world.nodes["p0"], world.now).counters
    assert counters["refused_links"] == 3 * (REASON_COUNT_MAX + 10)


def test_a_link_is_shown_only_in_part() -> None:
    identity, key = "64" + "0123456789abcdef" * 2, "fedcba9876543210" * 4
    assert shown_link(identity) == "6401234567"
    assert shown_link(f"{identity}.{key}") == "6401234567.fedcba9876543210"


def test_a_flood_of_unknown_processes_is_told_in_few_lines_then_one_a_second(world: World) -> None:
    core, facts = world.nodes["p0"].core, world.nodes["d0"].facts
    told: list[str] = []
    for index in range(1000):
        fingerprint = {"model": "another"} if index % 2 else facts.fingerprint
        hello = Hello(1, 1, "decode", f"flood-{index}", fingerprint, facts.layout_bytes)
        world.now += 0.005
        effects = core.handle(FromWorker(WorkerBeat(0, 0)), world.now)
        effects += core.handle(FromPeer(f"link-{index}", hello), world.now)
        effects += core.schedule(world.now)
        told += [effect.text for effect in effects if isinstance(effect, Report)]
    refused = [line for line in told if line.startswith("refused decode server flood-")]
    lost = [line for line in told if line.startswith("lost decode server flood-")]
    for lines in (refused, lost):
        assert BURST + 4 <= len(lines) <= BURST + 5
        assert not any(line.endswith("more of this kind)") for line in lines[:BURST])
        assert all(line.endswith("more of this kind)") for line in lines[BURST:])
    assert len(told) == len(refused) + len(lost) + 1, "the one that was connected, and is silent"


def test_each_of_a_few_servers_that_do_not_fit_is_told_of(world: World) -> None:
    core, facts = world.nodes["p0"].core, world.nodes["d0"].facts
    told: list[str] = []
    for name in ("dtype", "model", "weights"):
        hello = Hello(1, 1, "decode", name, {name: "another"}, facts.layout_bytes)
        effects = core.handle(FromPeer(f"link-{name}", hello), world.now)
        told += [effect.text for effect in effects if isinstance(effect, Report)]
    assert [line.split()[3] for line in told] == ["dtype", "model", "weights"]
