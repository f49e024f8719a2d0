"""What a client is promised beyond an answer within its time: to hear of a prefill server that is
missing after ten seconds and not before, and at once that the decode half of its room failed.

Looks at what the cores keep for themselves, and times it alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from common.scheduling.transitions import DecodeState
from decode_server.request import DecodeRequest
from decode_server.scheduler import DecodeScheduler
from prefill_server.scheduler import PrefillScheduler
from tests.sim.client import Client

if TYPE_CHECKING:
    from tests.sim.node import Node
    from tests.sim.world import World

# As docs/troubleshooting.md has it of `no_prefill_server`.
PEER_WAIT_S = 10.0
NONE_THERE = "no prefill server could be used for 10 s"
# Its queue is looked through now and then, and a tick is when something happens at all.
LATE_S = 0.75
# A step that takes long, the one behind it, and some messages.
ROOM_S = 2.0
# Sums of times differ in their last bits.
EARLY_S = 1e-6


class PeerWaits:
    """How long each request of one decode process has waited with no prefill server to ask."""

    def __init__(self) -> None:
        self._seen_at: dict[str, float] = {}
        self._taken_at: dict[str, float] = {}
        self._waiting: dict[int, tuple[float, DecodeRequest]] = {}

    def note(self, core: DecodeScheduler, now: float) -> None:
        """Which servers can be asked now. To be called whenever that may have changed."""
        for taker in core.transfers.links.connections.takers():
            self._taken_at[taker.link] = now
            if taker.is_source:
                self._seen_at[taker.link] = now

    def check(self, core: DecodeScheduler, now: float, thawed_at: float) -> None:
        """Raises: AssertionError if a request should have been answered 503 by now. thawed_at: a
        server that stood still until then found all others missing at that moment."""
        before, self._waiting = self._waiting, {}
        for request in core.requests:
            request_id = request.request_id
            if self._needs_peer(request):
                request = request.parent or request  # who waits for a sample that ends with it
                waits_since = before.get(request_id, (now, request))[0]
                self._waiting[request_id] = (waits_since, request)
                since = max(waits_since, self._last_seen_at(request), thawed_at)
                assert now - since <= PEER_WAIT_S + LATE_S, (
                    f"request {request_id} has waited for a prefill server since {since:.2f}"
                )

    def check_answer(self, request_id: int, now: float) -> None:
        """A request was answered that no server was there. Raises: AssertionError if one was."""
        assert request_id in self._waiting, f"request {request_id} never waited for anything"
        _, request = self._waiting[request_id]
        waited_s = now - max(request.arrived_at, self._last_seen_at(request))
        assert waited_s >= PEER_WAIT_S - EARLY_S, (
            f"request {request_id}: a prefill server was there {waited_s:.2f} s ago"
        )

    @staticmethod
    def _needs_peer(request: DecodeRequest) -> bool:
        """A self-test has no client, and fails with its connection. A sample waits for its prompt,
        which answers for it."""
        is_waiting = request.state is DecodeState.WAITING
        return is_waiting and not request.is_computed_here and not request.tested_link

    def _last_seen_at(self, request: DecodeRequest) -> float:
        """When one that could serve it was last there. Any can compute a held cache again."""
        if request.bootstrap is None or request.bootstrap.engine or request.output_count:
            return max(self._seen_at.values(), default=0.0)
        return self._taken_at.get(f"{request.bootstrap.host}:{request.bootstrap.port}", 0.0)


def are_connected(nodes: Iterable[Node]) -> bool:
    """Whether all servers are up, and all pairs of them connected, as both sides see it."""
    nodes = list(nodes)
    cores = [node.core for node in nodes if node.is_up]
    decodes = [node for node in nodes if node.role == "decode"]
    if len(cores) < len(nodes):
        return False
    is_dialled = all(
        decode.core.transfers.links.connections.on_link(link) is not None
        for decode in decodes
        for link in decode.links
    )
    return is_dialled and all(
        core.transfers.links.connections.target(decode.facts.incarnation, decode.name) is not None
        for core in cores
        if isinstance(core, PrefillScheduler)
        for decode in decodes
    )


def check_rooms(world: World) -> None:
    """Raises: AssertionError if the prefill half of a routed request waited although its decode
    half had failed, and nothing kept the decode server from saying so. The other way round it can't
    be said: a prefill server does not know which decode server will ask."""
    prefills: dict[int, Client] = {}
    decodes: dict[int, list[Client]] = {}
    for client in world.clients.values():
        if client.room is not None and client.role == "prefill":
            prefills[client.room] = client
        elif client.room is not None:
            decodes.setdefault(client.room, []).append(client)
    for room, samples in decodes.items():
        waiting = prefills.get(room)
        if waiting is None or not all(sample.could_tell for sample in samples):
            continue
        failed_at = max(sample.failed_at for sample in samples)
        thawed_at = world.nodes[waiting.node].thawed_at
        due_at = max(failed_at, waiting.submitted_at, thawed_at) + ROOM_S
        assert due_at >= world.calm_until or waiting.answered_at <= due_at, (
            f"request {waiting.request_id} waits for room {room}, which failed at {failed_at:.2f}"
        )
