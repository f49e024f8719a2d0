"""Connections of one rank to its peers: who may write here, and where this rank writes.

Owned by the I/O thread. Knows nothing of requests; `sends.py` uses the connections.

    OpenPeer    -> a target that the peer writes through          -> PeerOpened
    ConnectPeer -> one transport connection per target rank       -> PeerConnected | PeerFailed
    ClosePeer   -> both gone                                      -> PeerClosed, exactly one
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from common.errors import BatonError, PlanMismatch, ProtocolError
from common.layout.cache_layout import RankLayout
from common.planner.copies import PairPlan
from common.protocol.codec import decode_layout
from common.protocol.local import (
    ConnectPeer,
    PeerClosed,
    PeerConnected,
    PeerFailed,
    PeerOpened,
    RankDescriptor,
    WorkerToScheduler,
)
from common.transport import transport as moving
from common.transport.transport import RegionDescriptor, TargetDescriptor, Transport


class Phase(StrEnum):
    CONNECTING = "connecting"
    CONNECTED = "connected"
    FAILED = "failed"
    CLOSING = "closing"


@dataclass(frozen=True, slots=True)
class TargetRank:
    """One rank of a peer that this rank writes to.

    name: of the transport connection. pairs: one per layer group of this rank. page_counts: per
    page group, pages behind the scratch page that its regions have room for.
    """

    name: str
    pairs: tuple[PairPlan, ...]
    page_counts: tuple[int, ...]


@dataclass(slots=True)
class PeerLink:
    """All connections to one peer incarnation. open: names of those not closed yet."""

    peer: str
    targets: tuple[TargetRank, ...]
    phase: Phase = Phase.CONNECTING
    open: set[str] = field(default_factory=set)
    connected: dict[str, str] = field(default_factory=dict)
    reason: str = ""


class PeerLinks:
    """Owner of every `PeerLink` and of the targets that peers write through."""

    def __init__(self, transport: Transport, layout: RankLayout) -> None:
        self._transport = transport
        self._layout = layout
        self._rank = layout.index
        self._links: dict[str, PeerLink] = {}
        self._opened: dict[str, RankDescriptor] = {}
        self._peer_of: dict[str, str] = {}

    def targets(self, peer: str) -> tuple[TargetRank, ...] | str:
        """Where to write for a peer, or why nothing can be written."""
        link = self._links.get(peer)
        if link is None:
            return f"peer {peer} is not connected"
        if link.phase is not Phase.CONNECTED:
            return f"peer {peer} is {link.phase}: {link.reason}".rstrip(": ")
        return link.targets

    # ---- asked by the scheduler ------------------------------------------------------------------

    def open(self, peer: str) -> WorkerToScheduler:
        """Asked again, the answer is the same: there is one target per incarnation."""
        descriptor = self._opened.get(peer)
        if descriptor is None:
            try:
                target = self._transport.open_target(peer)
            except BatonError as exc:
                return PeerFailed(peer, self._rank, str(exc))
            descriptor = _announce(self._rank, target)
            self._opened[peer] = descriptor
        return PeerOpened(peer, self._rank, descriptor)

    def connect(self, message: ConnectPeer) -> list[WorkerToScheduler]:
        """Start connecting to every rank of the peer that holds part of what this one holds."""
        peer = message.peer
        assert peer not in self._links, f"peer {peer} is connected already"
        try:
            targets = self._pair(message)
        except (ProtocolError, PlanMismatch) as exc:
            return [PeerFailed(peer, self._rank, str(exc))]
        link = PeerLink(peer, tuple(target for target, _ in targets))
        self._links[peer] = link
        for target, descriptor in targets:
            try:
                self._transport.connect(target.name, descriptor)
            except BatonError as exc:
                return self._fail(link, str(exc))
            link.open.add(target.name)
            self._peer_of[target.name] = peer
        return self._check_connected(link)

    def close(self, peer: str) -> list[WorkerToScheduler]:
        """Drop what is open in either direction; answered at once if nothing is."""
        if peer in self._opened:
            del self._opened[peer]
            self._transport.close_target(peer)
        link = self._links.get(peer)
        if link is None:
            return [PeerClosed(peer, self._rank)]
        if link.phase is Phase.CLOSING:
            return []
        link.phase = Phase.CLOSING
        for name in sorted(link.open):
            self._transport.disconnect(name)
        return self._check_closed(link)

    # ---- told by the transport -------------------------------------------------------------------

    def apply_connected(self, event: moving.PeerConnected) -> list[WorkerToScheduler]:
        link = self._links[self._peer_of[event.peer]]
        link.connected[event.peer] = event.transports
        return self._check_connected(link)

    def apply_gone(self, event: moving.PeerFailed | moving.PeerClosed) -> list[WorkerToScheduler]:
        """A connection broke, could not be made, or is closed; all its transfers have settled."""
        link = self._links[self._peer_of.pop(event.peer)]
        link.open.remove(event.peer)
        link.connected.pop(event.peer, None)
        if link.phase is Phase.CLOSING:
            return self._check_closed(link)
        reason = event.reason if isinstance(event, moving.PeerFailed) else "closed"
        return self._fail(link, f"{event.peer}: {reason}")

    # ---- helpers ---------------------------------------------------------------------------------

    def _pair(self, message: ConnectPeer) -> list[tuple[TargetRank, TargetDescriptor]]:
        """Raises: ProtocolError, PlanMismatch if the announcement does not fit this cache."""
        server = decode_layout(message.layout)
        announced = {descriptor.rank: descriptor for descriptor in message.ranks}
        targets: list[tuple[TargetRank, TargetDescriptor]] = []
        for layout in server.ranks:
            pairs = tuple(
                PairPlan(self._layout, layout, group)
                for group in range(len(self._layout.layer_groups))
            )
            if all(pair.is_empty for pair in pairs):
                continue
            descriptor = announced.get(layout.index)
            if descriptor is None:
                raise ProtocolError(f"rank {layout.index} of the peer did not announce itself")
            page_counts = _page_counts(layout, descriptor)
            target = TargetRank(f"{message.peer}/{layout.index}", pairs, page_counts)
            targets.append((target, _heard(descriptor)))
        return targets

    def _check_connected(self, link: PeerLink) -> list[WorkerToScheduler]:
        if link.phase is not Phase.CONNECTING or len(link.connected) < len(link.targets):
            return []
        link.phase = Phase.CONNECTED
        names = sorted({name for names in link.connected.values() for name in names.split(",")})
        return [PeerConnected(link.peer, self._rank, ",".join(names))]

    def _check_closed(self, link: PeerLink) -> list[WorkerToScheduler]:
        if link.open:
            return []
        del self._links[link.peer]
        return [PeerClosed(link.peer, self._rank)]

    def _fail(self, link: PeerLink, reason: str) -> list[WorkerToScheduler]:
        """The first failure is told; the other connections stay until the scheduler closes."""
        if link.phase is Phase.FAILED:
            return []
        link.phase = Phase.FAILED
        link.reason = reason
        return [PeerFailed(link.peer, self._rank, reason)]


def _page_counts(layout: RankLayout, descriptor: RankDescriptor) -> tuple[int, ...]:
    """Pages per group that the announced regions hold, the scratch page not counted."""
    if len(descriptor.regions) != len(layout.groups):
        raise ProtocolError(
            f"rank {descriptor.rank} of the peer announced {len(descriptor.regions)} regions for "
            f"{len(layout.groups)} page groups"
        )
    nbytes_list = [nbytes for _, _, nbytes, _ in descriptor.regions]
    return tuple(
        max(0, nbytes // group.page_nbytes - 1) if group.page_nbytes else 0
        for group, nbytes in zip(layout.groups, nbytes_list, strict=True)
    )


def _announce(rank: int, target: TargetDescriptor) -> RankDescriptor:
    return RankDescriptor(
        rank=rank,
        worker_address=target.worker_address,
        regions=[(r.name, r.address, r.nbytes, r.key) for r in target.regions],
        probe=(target.probe.name, target.probe.address, target.probe.nbytes, target.probe.key),
    )


def _heard(descriptor: RankDescriptor) -> TargetDescriptor:
    """Memory types are in the keys; the transport does not ask for them again."""

    def region(name: str, address: int, nbytes: int, key: bytes) -> RegionDescriptor:
        return RegionDescriptor(name, address, nbytes, "host", key)

    regions: Sequence[RegionDescriptor] = [region(*entry) for entry in descriptor.regions]
    return TargetDescriptor(descriptor.worker_address, tuple(regions), region(*descriptor.probe))
