"""Names of the peers and open transfers that a native engine knows by number.

Both engines report events as the same tuples (native/queues.hpp); they become the contract's here.
"""

from __future__ import annotations

from collections.abc import Callable

from common.errors import Bug, TransportError
from common.planner.copy_plan import CopyPlan, Int64Array
from common.transport.transport import (
    TAG_MAX,
    ConnectionClosed,
    ConnectionFailed,
    ConnectionMade,
    PeerInUse,
    TagInUse,
    TransferSettled,
    TransportEvent,
    UnknownPeer,
)

NativeEvent = tuple[int, int, str, bool, int, int, float, float]
NativeSubmit = Callable[
    [int, int, Int64Array, Int64Array, Int64Array, Int64Array, Int64Array], None
]
"""Peer id, tag, and the five columns of a `CopyPlan`."""


class Connections:
    """Owner of the names; a name and a tag are free once their last event is translated."""

    def __init__(self) -> None:
        self._peers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._transports: dict[str, str] = {}
        self._transfer_peers: dict[int, str] = {}  # by tag, until settled
        self._id_next = 1

    def take_id(self) -> int:
        self._id_next += 1
        return self._id_next - 1

    def check_free(self, peer: str) -> None:
        """Raises: PeerInUse."""
        if peer in self._peers:
            raise PeerInUse(f"connect {peer}: already connected or connecting")

    def add(self, peer: str, peer_id: int) -> None:
        self._peers[peer] = peer_id
        self._names[peer_id] = peer

    def id_of(self, peer: str) -> int:
        """Raises: UnknownPeer."""
        if peer not in self._peers:
            raise UnknownPeer(f"peer {peer}: must be one of {sorted(self._peers)}")
        return self._peers[peer]

    def submit(self, submit: NativeSubmit, peer: str, plan: CopyPlan, tag: int) -> None:
        """Hand a plan to an engine; the tag is open until its transfer settles.

        Raises: UnknownPeer, TagInUse, TransportError, and the engine's own errors.
        """
        peer_id = self.id_of(peer)
        if not 0 <= tag <= TAG_MAX:
            raise TransportError(f"tag={tag}: must be in 0..{TAG_MAX}")
        if tag in self._transfer_peers:
            raise TagInUse(f"tag={tag}: a transfer to {self._transfer_peers[tag]} has not settled")
        submit(
            peer_id,
            tag,
            plan.source_region,
            plan.source_offset,
            plan.target_region,
            plan.target_offset,
            plan.nbytes,
        )
        self._transfer_peers[tag] = peer

    def is_open(self, tag: int) -> bool:
        return tag in self._transfer_peers

    def translate(self, event: NativeEvent) -> TransportEvent:
        """The kinds are those of EventKind in native/queues.hpp."""
        kind, identity, text, is_quiet, nbytes, run_count, seconds, issue_cpu_seconds = event
        match kind:
            case 0:
                peer = self._names[identity]
                self._transports[peer] = text
                return ConnectionMade(peer, text)
            case 1:
                return ConnectionFailed(self._forget(identity), text)
            case 2:
                return ConnectionClosed(self._forget(identity))
            case 3:
                peer = self._transfer_peers.pop(identity)
                return TransferSettled(
                    peer=peer,
                    tag=identity,
                    error=text or None,
                    is_quiet=is_quiet,
                    nbytes=nbytes,
                    run_count=run_count,
                    seconds=seconds,
                    issue_cpu_seconds=issue_cpu_seconds,
                )
            case _:
                raise Bug(f"native event of kind {kind}")

    def describe(self) -> dict[str, object]:
        return {
            "peers": {name: self._transports.get(name, "connecting") for name in self._peers},
            "transfers_open_count": len(self._transfer_peers),
        }

    def _forget(self, peer_id: int) -> str:
        peer = self._names.pop(peer_id)
        del self._peers[peer]
        self._transports.pop(peer, None)
        return peer
