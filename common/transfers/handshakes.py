"""How two servers come to be connected, from the first message to both directions attached.

    dials:    Hello ->          Welcome -> opens, attaches, is connected
    answers:  Hello -> Welcome          -> opens, attaches, is connected

Which directions a connection has is agreed here: each side says whether it sends caches and whether
it receives them. Knows nothing of liveness. A method that closes a connection returns its
incarnation.
"""

from __future__ import annotations

import random

from common.channel.address import Address
from common.errors import ProtocolError
from common.protocol.handshake import (
    announced_page_counts,
)
from common.protocol.peer import (
    Attach,
    Attached,
    Detached,
    Hello,
    Refuse,
    Welcome,
)
from common.protocol.worker import (
    ConnectPeer,
    OpenPeer,
    PeerConnected,
    PeerFailed,
    PeerOpened,
)
from common.scheduling.breaker import Breaker
from common.scheduling.peers import (
    REMOVED_REASON,
    Outbox,
    PeerLiveness,
    RankSet,
)
from common.transfers.addresses import Addresses
from common.transfers.connection import (
    Connection,
    ConnectionPhase,
    Inbound,
    Outbound,
    Remote,
)
from common.transfers.connections import Connections
from common.transfers.credits import Credits
from common.transfers.introduction import Introduction
from common.transfers.refusals import Refusals

# Servers that may dial this one at a time; each costs a UCX endpoint per pair of ranks.
PEER_COUNT_MAX = 256
SPOKEN_FOR = "incarnation: another link speaks for this process already"

# Of an address of which only the way to its host is looked for.
SOME_PORT = 9


class Handshakes:
    """trouble: why this server answers no Hello at the moment, "" if it does."""

    def __init__(
        self,
        introduction: Introduction,
        connections: Connections,
        addresses: Addresses,
        refusals: Refusals,
        credits: Credits | None,
        outbox: Outbox,
        rng: random.Random,
    ) -> None:
        self._introduction = introduction
        self._facts = introduction.facts
        self._connections = connections
        self._addresses = addresses
        self._refusals = refusals
        self._credits = credits
        self._outbox = outbox
        self._rng = rng
        self._attachment_count = 0
        self.trouble = ""

    def handle_hello(self, link: str, hello: Hello, host: str, now: float) -> str | None:
        """Welcome or refuse. host: where it came from. Returns the incarnation of a connection that
        a new one takes over."""
        if self.trouble:
            return None  # it asks again, and is welcome once our own workers move
        known = self._connections.of_incarnation(hello.incarnation)
        if known is not None and known.link != link:
            if known.is_open:
                # Two names of ours are dialled by one process, or the message lies. If the process
                # has dialled anew, its old link falls silent and the next Hello is welcome.
                self._refusals.refuse(link, hello.incarnation, hello.name, [SPOKEN_FOR], now)
            return None
        if known is not None and known.is_open and not known.has_spoken:
            self._send_welcome(known)
            return None
        if known is not None:
            # The peer dropped what is connected: close our side; its next Hello starts afresh.
            return self._connections.lose(known, "it dialled anew", now)
        predecessor = self._connections.on_link(link)
        lost = None
        if predecessor is not None:
            lost = self._connections.lose(predecessor, "another process took its link", now)
        differences, layout = self._introduction.compare(hello)
        if sum(not one.is_dialled for one in self._connections) >= PEER_COUNT_MAX:
            differences.append(
                f"peers: {PEER_COUNT_MAX} {hello.role} servers are connected already"
            )
        if differences or layout is None:
            self._refusals.refuse(link, hello.incarnation, hello.name, differences, now)
            return lost
        self._refusals.forget(hello.incarnation)
        remote = Remote.of(
            hello,
            layout,
            self._introduction.agree(hello),
            self._facts,
            name=self._name_of(hello),
            version=self._introduction.agree_version(hello),
        )
        connection = Connection(link, remote, PeerLiveness.start(now), Breaker(self._rng))
        connection.address = str(Address(host, SOME_PORT)) if host else ""
        self._send_welcome(connection)
        self._begin(connection, hello)
        return lost

    def _name_of(self, hello: Hello) -> str:
        """A replica that was given another's name is told from it by its incarnation."""
        names = {connection.name for connection in self._connections}
        if hello.name and hello.name not in names:
            return hello.name
        return f"{hello.name} {hello.incarnation}".lstrip()

    def _send_welcome(self, connection: Connection) -> None:
        level = self._credits.report(connection.incarnation) if self._credits is not None else None
        welcome = self._introduction.welcome(level, connection.remote.version)
        self._outbox.to_peer(connection.link, welcome)

    def handle_welcome(self, link: str, welcome: Welcome, now: float) -> None:
        address = self._addresses.get(link)
        if address is None or not address.is_idle:
            return
        if not address.is_dialled:  # any more
            detached = Detached(
                self._facts.incarnation, welcome.incarnation, REMOVED_REASON, is_planned=True
            )
            self._outbox.to_peer(link, detached)
            return
        role = welcome.role
        differences, layout = self._introduction.compare(welcome)
        if differences or layout is None:
            self._addresses.refuse(address, role, "; ".join(differences), now)
            return
        other = self._connections.of_incarnation(welcome.incarnation)
        if other is not None:
            # Workers know a peer by its incarnation, so it may stand for one open link only.
            self._addresses.refuse(
                address, role, f"incarnation: {other.link} is the same process", now
            )
            return
        given = welcome.name if welcome.name not in ("", welcome.http_address) else ""
        name = f"{given} ({link})" if given else link
        mode = self._introduction.agree(welcome)
        version = self._introduction.agree_version(welcome)
        remote = Remote.of(welcome, layout, mode, self._facts, name=name, version=version)
        before = address.connection
        breaker = Breaker(self._rng)
        if before is not None and before.incarnation == remote.incarnation:
            breaker = before.breaker  # a new process is not to blame for the old one
        liveness = PeerLiveness.start(now)
        connection = Connection(link, remote, liveness, breaker, is_dialled=True, address=link)
        connection.credits = welcome.credits
        address.begin(connection)
        self._begin(connection, welcome)

    def handle_refuse(self, link: str, refuse: Refuse, now: float) -> str | None:
        address = self._addresses.get(link)
        if address is None or (address.is_idle and not address.is_dialled):
            return None
        detail = f"in the other server's words: {'; '.join(refuse.differences)}"
        if address.is_idle:
            twin = self._connections.of_incarnation(refuse.incarnation)
            if twin is not None and twin.is_open:
                self._addresses.note_twin(address, twin, now)
            else:
                self._addresses.refuse(address, "other", detail, now)
            return None
        connection = address.connection
        return self._connections.lose(connection, detail, now) if connection is not None else None

    def _begin(self, connection: Connection, message: Hello | Welcome) -> None:
        """Both sides know each other: open what the peer writes through, and wait for its own."""
        self._connections.add(connection)
        remote = connection.remote
        if remote.processes.watched_pids:
            self._outbox.watch_processes(remote.incarnation, remote.processes.watched_pids)
        ours = self._introduction
        goes_out, comes_in = ours.sends and message.receives, ours.receives and message.sends
        if goes_out:
            connection.outbound = Outbound(is_needed=ours.needs_outbound or not comes_in)
        if comes_in:
            connection.inbound = Inbound(is_needed=ours.needs_inbound or not goes_out)
            if connection.inbound.is_needed:
                connection.phase = ConnectionPhase.OPENING
            self._outbox.to_workers(
                OpenPeer(
                    remote.incarnation,
                    remote.layout_bytes,
                    connection.address,
                    remote.transfer_mode,
                    list(remote.host_ids),
                    list(remote.pids),
                )
            )

    def handle_opened(self, message: PeerOpened) -> None:
        """A rank of ours can be written to; once all can, the peer is told where."""
        connection = self._connections.of_incarnation(message.peer)
        inbound = connection.inbound if connection is not None else None
        if connection is None or inbound is None or not connection.is_open or inbound.attachment:
            return
        inbound.opened[message.rank] = message.descriptor
        if len(inbound.opened) < self._facts.rank_count:
            return
        self._attachment_count += 1
        inbound.attachment = self._attachment_count
        if inbound.is_needed:
            connection.phase = ConnectionPhase.ATTACHING
        ranks = [inbound.opened[rank] for rank in sorted(inbound.opened)]
        ours = self._facts.incarnation
        attach = Attach(ours, connection.incarnation, ranks, inbound.attachment)
        self._outbox.to_peer(connection.link, attach)

    def handle_attach(self, link: str, attach: Attach, now: float) -> str | None:
        """Connect every rank to the ranks that the peer announced, if the announcement fits."""
        connection = self._connections.on_own_link(attach.incarnation, link)
        if attach.peer_incarnation != self._facts.incarnation or connection is None:
            self.detach_unknown(link, attach.incarnation)
            return None
        outbound = connection.outbound
        if outbound is None or outbound.connected is not None:
            return None
        self._note_heard(connection)
        try:
            outbound.page_counts = announced_page_counts(connection.remote.layout, attach.ranks)
        except ProtocolError as error:
            name = connection.name
            self._refusals.refuse(link, connection.incarnation, name, [str(error)], now)
            if connection.needs_close:
                return self._connections.lose(connection, str(error), now)
            self._connections.remove(connection)
            return None
        outbound.attachment = attach.attachment
        outbound.connected = RankSet(self._facts.rank_count)
        if connection.phase is ConnectionPhase.WELCOMED:
            connection.phase = ConnectionPhase.ATTACHING
        remote = connection.remote
        self._outbox.to_workers(
            ConnectPeer(remote.incarnation, remote.layout_bytes, attach.ranks, remote.transfer_mode)
        )
        return None

    def handle_connected(self, message: PeerConnected, now: float) -> None:
        """A rank of ours can write to the peer; once all can, the peer is told so."""
        connection = self._connections.of_incarnation(message.peer)
        outbound = connection.outbound if connection is not None else None
        if connection is None or outbound is None or not connection.is_open:
            return
        if outbound.connected is None or outbound.is_up:
            return
        if message.transports:  # a rank that writes nothing there has no connection
            outbound.transports.add(message.transports)
        outbound.notes.add(message.transfer_mode)
        if outbound.connected.add(message.rank):
            outbound.is_up = True
            transports, ours = sorted(outbound.transports), self._facts.incarnation
            self._outbox.to_peer(
                connection.link,
                Attached(ours, connection.incarnation, transports, outbound.attachment),
            )
            self._connect_if_up(connection, now)

    def handle_attached(self, link: str, attached: Attached, now: float) -> str | None:
        """The peer writes where our last Attach says. If it connected to an earlier one, the
        connection is lost."""
        connection = self._connections.on_own_link(attached.incarnation, link)
        if connection is None or attached.peer_incarnation != self._facts.incarnation:
            return None
        inbound = connection.inbound
        if inbound is None or inbound.is_up or not inbound.attachment:
            return None
        if attached.attachment != inbound.attachment:
            return self._connections.lose(connection, "it connected to what is closed by now", now)
        inbound.is_up = True
        inbound.transports = list(attached.transports)
        self._note_heard(connection)
        self._connect_if_up(connection, now)
        return None

    def note_failed(self, message: PeerFailed) -> bool:
        """Whether a connection goes on without the direction that can't be made."""
        connection = self._connections.of_incarnation(message.peer)
        if connection is None or not connection.is_open:
            return False
        direction = connection.inbound if message.is_inbound else connection.outbound
        if direction is None or direction.is_needed or direction.is_up:
            return False
        if not direction.is_failed:
            direction.is_failed = True
            role, name = connection.remote.role, connection.name
            text = f"no caches go back between here and {role} server {name}: {message.reason}"
            self._outbox.report(text, is_warning=True)
        return True

    def _connect_if_up(self, connection: Connection, now: float) -> None:
        directions = (connection.inbound, connection.outbound)
        if connection.phase is ConnectionPhase.CONNECTED:
            return
        if any(one is not None and one.is_needed and not one.is_up for one in directions):
            return
        connection.phase = ConnectionPhase.CONNECTED
        connection.is_suspect = False
        connection.liveness = PeerLiveness.start(now)
        over = ", ".join(connection.transports)
        role, name = connection.remote.role, connection.name
        self._outbox.report(f"{role} server {name} is connected over {over}")

    def _note_heard(self, connection: Connection) -> None:
        connection.has_spoken = True
        connection.liveness.silence.hear()

    def detach_unknown(self, link: str, incarnation: str) -> None:
        """Tell a process that is not connected, and acts as if it were."""
        self._outbox.to_peer(link, Detached(self._facts.incarnation, incarnation, "not connected"))
