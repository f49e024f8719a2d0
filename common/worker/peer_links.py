"""Connections of one rank to its peers: who may write here, and where this rank writes.

Owned by the I/O thread. Knows nothing of requests; `sends.py` uses the connections.

    OpenPeer    -> a target that the peer writes through          -> PeerOpened
    ConnectPeer -> one transport connection per target rank       -> PeerConnected | PeerFailed
    ClosePeer   -> both gone                                      -> PeerClosed, exactly one
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from common.channel.peer import local_host_towards
from common.config import TransferMode
from common.errors import BatonError, PlanMismatch, ProtocolError
from common.layout.cache_layout import RankLayout, ServerLayout
from common.planner.copies import PairPlan
from common.planner.staging import StagedPair
from common.protocol.codec import decode_layout
from common.protocol.descriptor import RankDescriptor, StagingBufferDescriptor, StagingRing
from common.protocol.worker import (
    ConnectPeer,
    OpenPeer,
    PeerClosed,
    PeerConnected,
    PeerFailed,
    PeerOpened,
    WorkerToScheduler,
)
from common.protocol.worker_values import PeerWriter
from common.transport.transport import (
    LOOPBACK,
    ConnectionClosed,
    ConnectionFailed,
    ConnectionMade,
    RegionDescriptor,
    TargetDescriptor,
    Transport,
)
from common.worker.pools import pool_names
from common.worker.staging.source import StagingSource
from common.worker.staging.staged_transfer import LaneFailed, LaneReady
from common.worker.staging.target import REGION as TARGET_REGION
from common.worker.staging.target import StagingTarget

log = logging.getLogger(__name__)


class LinkPhase(StrEnum):
    CONNECTING = "connecting"
    CONNECTED = "connected"
    FAILED = "failed"
    CLOSING = "closing"


@dataclass(frozen=True, slots=True)
class TargetRank:
    """One rank of a peer that this rank writes to.

    name: of the transport connection.
    pairs: one per layer group of this rank; none if its pages must not be written directly.
    staged, staging_buffer: None if no transfer to it may be staged.
    staging_region: number of the staging buffer among the connection's regions.
    page_counts: its pages per page group, without the scratch page.
    """

    name: str
    pairs: tuple[PairPlan, ...]
    page_counts: tuple[int, ...]
    staged: StagedPair | None = None
    staging_buffer: StagingBufferDescriptor | None = None
    staging_region: int = 0


@dataclass(slots=True)
class PeerLink:
    """All connections to one peer incarnation. open: names of connections that are not closed.

    connected: transports of the usable connections, by name. carried_by: transports of connections
    whose lane is not ready yet.
    """

    peer: str
    targets: tuple[TargetRank, ...]
    phase: LinkPhase = LinkPhase.CONNECTING
    open: set[str] = field(default_factory=set)
    connected: dict[str, str] = field(default_factory=dict)
    carried_by: dict[str, str] = field(default_factory=dict)
    reason: str = ""


class PeerLinks:
    """Owner of every `PeerLink`, and of the transport targets for peers that write here."""

    def __init__(
        self,
        transport: Transport,
        layout: RankLayout,
        staging_target: StagingTarget | None = None,
        staging_source: StagingSource | None = None,
    ) -> None:
        """staging_target, staging_source: None where no transfer is staged to or from here."""
        self._transport = transport
        self._layout = layout
        self._staging_target = staging_target
        self._staging_source = staging_source
        self._rank = layout.index
        self._links: dict[str, PeerLink] = {}
        self._opened: dict[str, RankDescriptor] = {}
        self._peer_of: dict[str, str] = {}
        self._writers: dict[str, PeerWriter] = {}

    @property
    def peers(self) -> set[str]:
        """Those that are open in either direction."""
        return {*self._opened, *self._links}

    @property
    def writers(self) -> list[PeerWriter]:
        """Peers that were let in and are not known to be out of reach."""
        return list(self._writers.values())

    @property
    def rank(self) -> int:
        """Global rank of this worker."""
        return self._rank

    def targets(self, peer: str) -> tuple[TargetRank, ...] | str:
        """The ranks of a peer to write to, or the reason why none can be written."""
        link = self._links.get(peer)
        if link is None:
            return f"peer {peer} is not connected"
        if link.phase is not LinkPhase.CONNECTED:
            return f"peer {peer} is {link.phase}: {link.reason}".rstrip(": ")
        return link.targets

    # ---- asked by the scheduler ------------------------------------------------------------------

    def open(self, message: OpenPeer) -> WorkerToScheduler:
        """Open one target per incarnation. A repeated call gives the same answer."""
        peer = message.peer
        descriptor = self._opened.get(peer)
        if descriptor is None:
            layout, link, mode = message.layout, message.link, message.transfer_mode
            try:
                staging_buffer = self._open_staging_target(peer, layout, link, mode)
                descriptor = self._announce(peer, staging_buffer, link, mode)
            except BatonError as exc:
                return PeerFailed(peer, self._rank, str(exc), is_inbound=True)
            self._opened[peer] = descriptor
            self._writers[peer] = PeerWriter(peer, message.host_ids, message.pids)
        return PeerOpened(peer, self._rank, descriptor)

    def _open_staging_target(
        self, peer: str, layout: bytes, link: str, transfer_mode: TransferMode
    ) -> StagingBufferDescriptor | None:
        """Rings for a peer; None if it gets none and needs none. Raises: BatonError."""
        if self._staging_target is None or transfer_mode is TransferMode.DIRECT:
            return None
        source = decode_layout(layout)
        opened = self._staging_target.open(peer, source, link)
        if isinstance(opened, StagingBufferDescriptor):
            return opened
        if transfer_mode is TransferMode.STAGED or _dtypes(source) != _dtypes(self._layout.server):
            raise ProtocolError(opened)
        log.warning("nothing of %s can be staged: %s", peer, opened)
        return None

    def _announce(
        self,
        peer: str,
        staging_buffer: StagingBufferDescriptor | None,
        link: str,
        transfer_mode: TransferMode,
    ) -> RankDescriptor:
        """Raises: TransportError, ConfigError."""
        is_hidden = staging_buffer is not None and transfer_mode is TransferMode.STAGED
        pools = [] if is_hidden else pool_names(self._layout)
        names = [*pools, TARGET_REGION] if staging_buffer is not None else pools
        host = local_host_towards(link) if link else LOOPBACK
        target = self._transport.open_target(peer, names, host)
        regions = [(r.name, r.address, r.nbytes, r.key) for r in target.regions]
        if staging_buffer is not None:
            staging_buffer = msgspec.structs.replace(staging_buffer, region=regions.pop())
        probe = target.probe
        return RankDescriptor(
            rank=self._rank,
            worker_address=target.worker_address,
            stream_address=target.stream_address,
            regions=regions,
            probe=(probe.name, probe.address, probe.nbytes, probe.key),
            staging_buffer=staging_buffer,
            page_counts=self._staging_target.page_counts()
            if self._staging_target is not None
            else [],
        )

    def connect(self, message: ConnectPeer) -> list[WorkerToScheduler]:
        """Start connecting to every rank of the peer that shares cells with this rank."""
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
        """Close both directions; answered at once if neither is open."""
        if peer in self._opened:
            del self._opened[peer]
            self._transport.close_target(peer)
        if self._staging_target is not None:
            self._staging_target.close(peer)
        link = self._links.get(peer)
        if link is None:
            return [PeerClosed(peer, self._rank)]
        if link.phase is LinkPhase.CLOSING:
            return []
        link.phase = LinkPhase.CLOSING
        for name in sorted(link.open):
            self._transport.disconnect(name)
        return self._check_closed(link)

    def reclaim(self, peer: str) -> None:
        """Nothing of a closed peer can write here any more."""
        self._writers.pop(peer, None)
        if self._staging_target is not None:
            self._staging_target.reclaim(peer)

    # ---- events of the transport -----------------------------------------------------------------

    def apply_connected(self, event: ConnectionMade) -> list[WorkerToScheduler]:
        """A connection is up. With a staging ring it counts only when its lane is ready."""
        link = self._links[self._peer_of[event.peer]]
        target = next(target for target in link.targets if target.name == event.peer)
        if target.staging_buffer is None:
            link.connected[event.peer] = event.transports
            return self._check_connected(link)
        assert self._staging_source is not None, "a ring is taken only with something to stage in"
        link.carried_by[event.peer] = event.transports
        ring = _ring_of(target.staging_buffer, self._rank)
        assert ring is not None
        self._staging_source.open_lane(
            event.peer, target.staging_buffer, ring, target.staging_region, event.transports
        )
        return []

    def apply_lane(self, event: LaneReady | LaneFailed) -> list[WorkerToScheduler]:
        """A lane is ready, or has failed."""
        peer = self._peer_of.get(event.name)
        if peer is None:
            return []
        link = self._links[peer]
        if isinstance(event, LaneFailed):
            return self._fail(link, f"{event.name}: {event.reason}")
        link.connected[event.name] = link.carried_by.pop(event.name, "")
        return self._check_connected(link)

    def apply_gone(self, event: ConnectionFailed | ConnectionClosed) -> list[WorkerToScheduler]:
        """A connection failed or is closed. All its transfers have settled."""
        link = self._links[self._peer_of.pop(event.peer)]
        link.open.remove(event.peer)
        link.connected.pop(event.peer, None)
        reason = event.reason if isinstance(event, ConnectionFailed) else "closed"
        if self._staging_source is not None:
            self._staging_source.close_lane(event.peer, reason)
        if link.phase is LinkPhase.CLOSING:
            return self._check_closed(link)
        return self._fail(link, f"{event.peer}: {reason}")

    # ---- helpers ---------------------------------------------------------------------------------

    def _pair(self, message: ConnectPeer) -> list[tuple[TargetRank, TargetDescriptor]]:
        """Raises: ProtocolError, PlanMismatch if the announcement does not fit this cache."""
        server = decode_layout(message.layout)
        announced = {descriptor.rank: descriptor for descriptor in message.ranks}
        targets: list[tuple[TargetRank, TargetDescriptor]] = []
        for layout in server.ranks:
            descriptor = announced.get(layout.index)
            target = self._pair_rank(message, layout, descriptor)
            if target is None:
                continue
            if descriptor is None:
                raise ProtocolError(f"rank {layout.index} of the peer did not announce itself")
            targets.append((target, _target_descriptor(descriptor, target.staging_buffer)))
        return targets

    def _pair_rank(
        self, message: ConnectPeer, layout: RankLayout, descriptor: RankDescriptor | None
    ) -> TargetRank | None:
        """None if this rank writes nothing to the rank of `layout`."""
        may_stage = (
            message.transfer_mode is not TransferMode.DIRECT and self._staging_source is not None
        )
        staged = StagedPair(self._layout, layout) if may_stage else None
        is_converting = staged is not None and staged.is_converting
        pairs: tuple[PairPlan, ...] = ()
        if not is_converting and message.transfer_mode is not TransferMode.STAGED:
            pairs = tuple(
                PairPlan(self._layout, layout, group)
                for group in range(len(self._layout.layer_groups))
            )
        if staged.is_empty if staged is not None else all(pair.is_empty for pair in pairs):
            return None
        name = f"{message.peer}/{layout.index}"
        if descriptor is None:
            return TargetRank(name, pairs, ())
        staging_buffer = descriptor.staging_buffer if may_stage else None
        if staging_buffer is not None and _ring_of(staging_buffer, self._rank) is None:
            staging_buffer = None
        if not pairs and staging_buffer is None:
            raise ProtocolError(
                f"rank {layout.index} of the peer granted no staging slots to rank {self._rank}"
            )
        counts = _page_counts(layout, descriptor)
        if staging_buffer is None:
            return TargetRank(name, pairs, counts)
        return TargetRank(name, pairs, counts, staged, staging_buffer, len(descriptor.regions))

    def _check_connected(self, link: PeerLink) -> list[WorkerToScheduler]:
        if link.phase is not LinkPhase.CONNECTING or len(link.connected) < len(link.targets):
            return []
        link.phase = LinkPhase.CONNECTED
        names = sorted({name for names in link.connected.values() for name in names.split(",")})
        transfer_mode = "; ".join(dict.fromkeys(map(self._describe, link.targets)))
        log.info("caches for %s travel %s", link.peer, transfer_mode or "nowhere")
        return [PeerConnected(link.peer, self._rank, ",".join(names), transfer_mode)]

    def _describe(self, target: TargetRank) -> str:
        """How caches travel to one rank, with the measured costs behind the decision."""
        lane = self._staging_source.lane(target.name) if self._staging_source is not None else None
        if lane is None or lane.cost is None:
            return "direct"
        if not target.pairs:
            return f"staged ({lane.cost})"
        return f"staged in runs below about {lane.cost.break_even_nbytes:.0f} bytes ({lane.cost})"

    def _check_closed(self, link: PeerLink) -> list[WorkerToScheduler]:
        if link.open:
            return []
        del self._links[link.peer]
        return [PeerClosed(link.peer, self._rank)]

    def _fail(self, link: PeerLink, reason: str) -> list[WorkerToScheduler]:
        """Report the first failure. Other connections stay until the scheduler closes the peer."""
        if link.phase is LinkPhase.FAILED:
            return []
        link.phase = LinkPhase.FAILED
        link.reason = reason
        return [PeerFailed(link.peer, self._rank, reason)]


def _dtypes(server: ServerLayout) -> list[str]:
    return [component.dtype for component in server.components]


def _ring_of(staging_buffer: StagingBufferDescriptor, rank: int) -> StagingRing | None:
    return next((ring for ring in staging_buffer.rings if ring.source_rank == rank), None)


def _page_counts(layout: RankLayout, descriptor: RankDescriptor) -> tuple[int, ...]:
    """Pages per group that a target rank has, the scratch page not counted."""
    if not descriptor.regions and descriptor.staging_buffer is not None:
        if len(descriptor.page_counts) != len(layout.groups):
            raise ProtocolError(
                f"rank {descriptor.rank} of the peer announced pages of "
                f"{len(descriptor.page_counts)} page groups: there are {len(layout.groups)}"
            )
        return tuple(descriptor.page_counts)
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


def _target_descriptor(
    descriptor: RankDescriptor, staging_buffer: StagingBufferDescriptor | None
) -> TargetDescriptor:
    """As the transport takes it. Memory types are in the keys; "host" stands for all of them."""

    def region(name: str, address: int, nbytes: int, key: bytes) -> RegionDescriptor:
        return RegionDescriptor(name, address, nbytes, "host", key)

    regions = [region(*entry) for entry in descriptor.regions]
    if staging_buffer is not None:
        regions.append(region(*staging_buffer.region))
    return TargetDescriptor(
        descriptor.worker_address,
        tuple(regions),
        region(*descriptor.probe),
        descriptor.stream_address,
    )
