"""Transfers whose connection broke with bytes under way: nothing is said of them until the peer has
fenced them, and nothing is kept of peers that never return."""

from __future__ import annotations

from common.protocol.peer import Abort, Quiesced
from common.protocol.worker import SendSettled
from common.scheduling.events import Effect, FromPeer, FromWorker, ToPeer
from common.transfers.outgoing import Outgoing
from prefill_server.scheduler import PrefillScheduler
from tests.sim.world import World

PROMPT = list(range(20, 100))
STEP_S = 0.0005


def break_transfer(world: World) -> int:
    """Ask for a transfer and break its connection; its id."""
    p0 = world.nodes["p0"]
    assert isinstance(p0.core, PrefillScheduler)
    world.submit(world.nodes["d0"], PROMPT, 4)
    while not p0.core.transfers.outgoing.open_count:
        world.run(world.now + STEP_S)
    (request,) = p0.core.requests
    assert request.transfer is not None
    transfer_id = request.transfer.transfer_id
    (send_id, *_) = request.transfer.sends_open
    settled = SendSettled(send_id, transfer_id, 0, "the connection broke", 0, 0, 0.0, False)
    p0.feed(FromWorker(settled))
    return transfer_id


def abort(world: World, transfer_id: int) -> list[Effect]:
    p0, d0 = world.nodes["p0"], world.nodes["d0"]
    message = Abort(transfer_id, d0.facts.incarnation, p0.facts.incarnation, "lost")
    return p0.core.handle(FromPeer("d0", message), world.now)


def remembered_count(outgoing: Outgoing) -> int:
    """Transfers and sends that have not ended."""
    return len(list(outgoing)) + outgoing.open_count


def test_nothing_is_remembered_of_peers_that_never_return(world: World) -> None:
    core, d0 = world.nodes["p0"].core, world.nodes["d0"]
    assert isinstance(core, PrefillScheduler)
    at_rest = remembered_count(core.transfers.outgoing)
    for _ in range(3):
        break_transfer(world)
        d0.crash()
        world.run(world.now + 1.0)
        d0.boot()
        world.run(world.now + 3.0)
    assert core.is_idle
    assert remembered_count(core.transfers.outgoing) == at_rest


def test_an_abort_of_a_broken_transfer_is_answered_once_its_peer_has_attached_anew(
    world: World,
) -> None:
    transfer_id = break_transfer(world)
    p0, d0 = world.nodes["p0"], world.nodes["d0"]
    d0.freeze()  # so that it does not attach anew
    world.run(world.now + 0.1)
    assert p0.core.is_idle, "the request has ended, and its peer is not connected"
    quiesced = ToPeer("d0", Quiesced(transfer_id, d0.facts.incarnation))
    assert quiesced not in abort(world, transfer_id)
    d0.thaw()
    world.run(world.now + 3.0)
    assert quiesced in abort(world, transfer_id)
