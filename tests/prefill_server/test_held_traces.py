"""What is told of a prompt that was computed before any decode server asked for it."""

from __future__ import annotations

import pytest

from common.protocol.frontend import Tokens, ToldFrontend
from common.protocol.peer import PeerMessage, TransferDone
from common.request import Bootstrap
from common.scheduling.peers import Outbox
from tests.sim.world import World

PROMPT = list(range(20, 60))


def test_its_chunks_are_told_to_its_client_and_not_to_who_did_not_wait_for_them(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[object] = []
    to_frontend, to_peer = Outbox.to_frontend, Outbox.to_peer

    def tell_frontend(self: Outbox, message: ToldFrontend) -> None:
        told.append(message)
        to_frontend(self, message)

    def tell_peer(self: Outbox, link: str, message: PeerMessage) -> None:
        told.append(message)
        to_peer(self, link, message)

    monkeypatch.setattr(Outbox, "to_frontend", tell_frontend)
    monkeypatch.setattr(Outbox, "to_peer", tell_peer)
    where = Bootstrap("p0", 1, 5, world.nodes["p0"].facts.incarnation)
    first = world.submit(world.nodes["p0"], PROMPT, 1, where)
    world.run(world.now + 0.5)
    assert first.finals == ["finished"]
    (answer,) = [message for message in told if isinstance(message, Tokens)]
    assert answer.trace is not None
    computed = answer.trace.transfer
    assert computed.chunk_count == len(computed.chunk_ends_s) > 0

    world.submit(world.nodes["d0"], PROMPT, 4, where)
    world.run(world.now + 0.5)
    (done,) = [message for message in told if isinstance(message, TransferDone)]
    assert (done.trace.chunk_count, done.trace.chunk_ends_s) == (0, [])
