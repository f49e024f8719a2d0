"""One connection to one process of another server, and the address that it was dialled at.

A connection has up to two directions. Inbound: the peer writes caches into our pool. Outbound: our
ranks write into the peer's. Each direction is attached by the server that is written to.

    inbound    our ranks open -> Attach ->            the peer connects -> Attached  is up
    outbound                  <- Attach  our ranks connect -> Attached ->            is up

It is connected as soon as each direction is up without which it is of no use; the other one may
come up later, or never.
A connection is never reset: the next one to the same address is a new object. Knows nothing of how
messages arrive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from common.config import TransferMode, Verify
from common.layout.cache_layout import ServerLayout
from common.planner.pairing import rank_pairs
from common.protocol.descriptor import RankDescriptor
from common.protocol.frontend import PeerState
from common.protocol.handshake import agree_verify, expected_writers
from common.protocol.hosts import PeerProcesses, ProcessIds, peer_processes, process_ids
from common.protocol.peer import Hello, Welcome
from common.scheduling.breaker import Breaker, BreakerState
from common.scheduling.facts import ServerFacts
from common.scheduling.peers import PeerLiveness, RankSet
from common.transport.fences import is_fenced_by_close


class ConnectionPhase(StrEnum):
    """The values are what operators are shown."""

    WELCOMED = "connecting"
    OPENING = "opening"
    ATTACHING = "attaching"
    CONNECTED = "connected"
    CLOSING = "lost"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Remote:
    """The process at the other end, by its own handshake message, and what both sides agreed on.

    name: unique among the peers of this server. transfer_mode: how caches travel. verify: how much
    of each cache is compared. request_token_max: the longest prompt that it computes; 0 if it did
    not say. writers: its ranks that hold part of what this server caches. sends_rest: it can send
    the rest of a cache whose beginning is here; one that can't is asked for whole caches.
    rank_pairs: (source rank, target rank) between which bytes may travel. version: of the protocol,
    as both speak it. host_ids, pids: of its ranks.
    """

    incarnation: str
    role: str
    name: str
    http_address: str
    layout: ServerLayout
    layout_bytes: bytes
    transfer_mode: TransferMode
    verify: Verify
    request_token_max: int
    writers: tuple[int, ...]
    rank_pairs: tuple[tuple[int, int], ...]
    processes: PeerProcesses
    sends_rest: bool
    version: int
    host_ids: tuple[str, ...]
    pids: tuple[int, ...]

    @property
    def process_ids(self) -> ProcessIds:
        return process_ids(self.host_ids, self.pids)

    @staticmethod
    def of(
        message: Hello | Welcome,
        layout: ServerLayout,
        mode: TransferMode,
        facts: ServerFacts,
        *,
        name: str,
        version: int,
    ) -> Remote:
        """layout: decoded from the message. mode, version: as agreed. facts: of this server."""
        writes_here = message.sends
        pairs = (
            rank_pairs(layout, facts.layout) if writes_here else rank_pairs(facts.layout, layout)
        )
        return Remote(
            incarnation=message.incarnation,
            role=message.role,
            name=name,
            http_address=message.http_address,
            layout=layout,
            layout_bytes=message.layout,
            transfer_mode=mode,
            verify=agree_verify(facts.verify, message.verify),
            request_token_max=message.request_token_max if isinstance(message, Welcome) else 0,
            writers=tuple(expected_writers(layout, facts.layout)),
            rank_pairs=tuple(pairs),
            processes=peer_processes(message.host_ids, message.pids, facts.host_ids),
            sends_rest=message.sends_rest,
            version=version,
            host_ids=tuple(message.host_ids),
            pids=tuple(message.pids),
        )


@dataclass(slots=True)
class Direction:
    """is_needed: the connection is of no use without it. is_failed: it can't be made, and is not
    waited for. attachment: of the Attach of the server that is written to; 0 before it.
    """

    is_needed: bool = True
    is_up: bool = False
    is_failed: bool = False
    attachment: int = 0


@dataclass(slots=True)
class Inbound(Direction):
    """opened: by rank of ours, where the peer may write. transports: what carries caches, by the
    peer's word."""

    opened: dict[int, RankDescriptor] = field(default_factory=dict)
    transports: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Outbound(Direction):
    """page_counts: pages per group that the peer has. connected: which of our ranks are; None
    before the peer's Attach. transports, notes: what carries caches, and how they travel, by the
    word of our ranks.
    """

    page_counts: tuple[int, ...] = ()
    connected: RankSet | None = None
    transports: set[str] = field(default_factory=set)
    notes: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Connection:
    """link: where its messages come from. is_dialled: by this server, and the link is the address.

    address: in its direction, for our own host's; "" if nothing is known of it.
    has_spoken: something after its handshake message was heard.
    is_suspect: its link broke, and it has not been heard since.
    is_gone: those of its processes that are watched have ended. is_succeeded: another scheduler of
    the same workers has greeted, which closes all of this one's first.
    is_proven: a transfer from it has gone well. succeeded_at: the last one that did.
    test_problem: how the last self-test failed; "" if a transfer has gone well since.
    asked_token_count: of the transfers that it was asked for since its last heartbeat.
    credits: requests that it may be asked for at a time, by its own word; None if it sets no limit.
    is_full: it had no room for a request, and has not been heard since.
    is_leaving: this server does not want it any more: only requests that name it are sent there.
    cached_prefixes: marks of the prefixes that it has cached, by its own word. told_prefixes: what
    it was told of ours; None for nothing yet.
    """

    link: str
    remote: Remote
    liveness: PeerLiveness
    breaker: Breaker
    is_dialled: bool = False
    address: str = ""
    phase: ConnectionPhase = ConnectionPhase.WELCOMED
    inbound: Inbound | None = None
    outbound: Outbound | None = None
    has_spoken: bool = False
    detail: str = ""
    closed: RankSet = field(default_factory=lambda: RankSet(0))
    is_suspect: bool = False
    is_gone: bool = False
    is_succeeded: bool = False
    is_proven: bool = False
    succeeded_at: float = 0.0
    test_problem: str = ""
    test_failed_at: float = 0.0
    asked_token_count: int = 0
    credits: int | None = None
    cached_prefixes: frozenset[bytes] = frozenset()
    told_prefixes: bytes | None = None
    is_full: bool = False
    is_leaving: bool = False

    @property
    def incarnation(self) -> str:
        return self.remote.incarnation

    @property
    def name(self) -> str:
        return self.remote.name

    @property
    def is_open(self) -> bool:
        return self.phase not in (ConnectionPhase.CLOSING, ConnectionPhase.CLOSED)

    @property
    def is_up(self) -> bool:
        """Whether it writes caches here."""
        is_up = self.inbound is not None and self.inbound.is_up
        return self.phase is ConnectionPhase.CONNECTED and is_up

    @property
    def takes_named(self) -> bool:
        """Whether it can be asked for caches of requests that name it."""
        return self.is_up and not self.liveness.is_draining

    @property
    def is_source(self) -> bool:
        """Whether it can be asked for any cache."""
        return self.takes_named and not self.is_leaving

    @property
    def is_target(self) -> bool:
        """Whether caches can be sent to it."""
        is_up = self.outbound is not None and self.outbound.is_up
        return self.phase is ConnectionPhase.CONNECTED and is_up

    @property
    def needs_close(self) -> bool:
        """Whether our ranks have opened or connected anything for it."""
        has_connected = self.outbound is not None and self.outbound.connected is not None
        return self.inbound is not None or has_connected

    @property
    def attachment(self) -> int:
        """Of our Attach, which its writes are bound to."""
        return self.inbound.attachment if self.inbound is not None else 0

    @property
    def request_token_max(self) -> int:
        return self.remote.request_token_max

    @property
    def transports(self) -> list[str]:
        found = set(self.inbound.transports) if self.inbound is not None else set()
        return sorted(found | (self.outbound.transports if self.outbound is not None else set()))

    @property
    def has_ended(self) -> bool:
        """Whether all of its processes are known to have ended."""
        return self.is_gone and not self.remote.processes.has_unwatched

    @property
    def is_fenced(self) -> bool:
        """Whether it can't write any more, all that it writes through here being closed.

        Closing ends what passes a socket or a queue pair of ours, as all does from another machine.
        A process that could map our memory must have ended. A peer that was lost before it said by
        what it writes has tried its lanes at most. A later scheduler of its workers has ended all
        that they wrote.
        """
        processes = self.remote.processes
        if self.is_succeeded or self.has_ended:
            return True
        if self.inbound is None or not self.inbound.transports:
            return processes.is_elsewhere
        return is_fenced_by_close(self.inbound.transports)

    @property
    def load_token_count(self) -> int:
        """Prompt tokens that it has to compute: by its own word, and asked for since."""
        return self.liveness.queued_token_count + self.asked_token_count

    def has_room(self, open_count: int) -> bool:
        """Whether it takes another request. open_count: of those that it was asked for."""
        return not self.is_full and (self.credits is None or open_count < self.credits)

    def state(self, in_flight_count: int) -> PeerState:
        """For operators. in_flight_count: transfers under way."""
        remote = self.remote
        notes = self.outbound.notes if self.outbound is not None else set[str]()
        return PeerState(
            address=self.link if self.is_dialled else shown_link(self.link),
            incarnation=remote.incarnation,
            state=str(self.phase),
            detail=self.detail or self.test_problem,
            transports=self.transports,
            transfer_mode=sorted(notes or {str(remote.transfer_mode)}),
            verify=str(remote.verify),
            tp_size=remote.layout.tp_size,
            pp_size=len(remote.layout.stages),
            page_size=remote.layout.page_size,
            in_flight_count=in_flight_count,
            breaker=str(self.breaker.state),
            breaker_open_count=self.breaker.open_count,
            is_self_test_failing=bool(self.test_problem),
            rank_pairs=list(remote.rank_pairs),
            name=remote.name,
            http_address=remote.http_address,
            version=remote.version,
        )


class Standing(StrEnum):
    """Why there is a link to an address."""

    WANTED = "wanted"
    NAMED = "named by requests alone"
    KEPT = "not wanted any more, kept as long as its connection lasts"
    LEAVING = "not wanted any more, hung up as soon as nothing is under way"


@dataclass(slots=True, eq=False)
class Address:
    """One address that this server dials, and the last connection that came of it.

    link: "host:port", which is the name of the link as well. leaves_at: when a link that nothing
    needs any more is hung up. twin: the incarnation that answers
    here, where that process is connected by another name.
    is_refused: this server and the one that answered do not fit. detail: why
    nothing is connected, unless a connection was lost, which has its own.
    link_failures: why no connection could be made, each logged once.
    must_redial: its link is of no use any more, and dialled anew before the next Hello.
    unanswered_hello_count: on this link, since anything of a handshake was heard.
    """

    link: str
    standing: Standing
    is_refused: bool = False
    detail: str = ""
    connection: Connection | None = None
    next_hello_at: float = 0.0
    link_failures: set[str] = field(default_factory=set)
    must_redial: bool = False
    unanswered_hello_count: int = 0
    twin: str = ""
    leaves_at: float = math.inf

    @property
    def is_dialled(self) -> bool:
        """Whether a server is to be connected here."""
        return self.standing in (Standing.WANTED, Standing.NAMED)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is connected, nor being connected or closed."""
        return self.connection is None or self.connection.phase is ConnectionPhase.CLOSED

    @property
    def is_source(self) -> bool:
        """Whether its server can be asked for any cache."""
        return self.connection is not None and self.connection.is_source

    @property
    def incarnation(self) -> str:
        """Of the last process that was connected here, "" if none ever was."""
        return self.connection.incarnation if self.connection is not None else ""

    def begin(self, connection: Connection) -> None:
        """A server has answered, and fits."""
        self.connection = connection
        self.is_refused = False
        self.detail = ""
        self.next_hello_at = 0.0  # due as soon as the connection is closed
        self.twin = ""
        self.link_failures = set()
        self.must_redial = False
        self.unanswered_hello_count = 0

    @property
    def request_token_max(self) -> int:
        """The longest prompt that its server computes, or did when it was last connected; 0 if it
        never was."""
        return self.connection.request_token_max if self.connection is not None else 0

    @property
    def shown(self) -> str:
        """Its state, for an error message."""
        return f"{self.link} {self._phase}{f' ({self._detail})' if self._detail else ''}"

    @property
    def _detail(self) -> str:
        return self.detail or (self.connection.detail if self.connection is not None else "")

    @property
    def _phase(self) -> str:
        if self.standing is Standing.LEAVING:
            return "leaving"
        if self.connection is None or self.is_idle:
            return "refused" if self.is_refused else "connecting"
        return str(self.connection.phase)

    def state(self, in_flight_count: int) -> PeerState:
        """For operators."""
        if self.connection is None:
            closed = str(BreakerState.CLOSED)
            return PeerState(
                self.link, "", self._phase, self.detail, breaker=closed, name=self.link
            )
        found = self.connection.state(in_flight_count)
        detail = self._detail or self.connection.test_problem
        return msgspec.structs.replace(found, state=self._phase, detail=detail)


def shown_link(link: str) -> str:
    """Enough of a link's name to tell it from others. The whole name would let its reader take the
    link over."""
    identity, dot, key = link.partition(".")
    return f"{identity[:10]}{dot}{key[:16]}"
