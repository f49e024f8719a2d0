"""The connections of this server: looked up, closed, and fenced once they are.

A peer is bound to the link of its handshake: a message of another link in its name counts for
nothing, because incarnation ids are shown to operators and prove nothing. A link speaks for one
process at a time. Knows nothing of handshakes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from common.protocol.peer import Detached
from common.protocol.worker import ClosePeer
from common.scheduling.facts import ServerFacts
from common.scheduling.log_rate_limiter import LogRateLimiter
from common.scheduling.peers import Outbox, RankSet
from common.transfers.connection import Connection, ConnectionPhase

STOPPED_COUNT_MAX = 256


class Connections:
    """Owner of every `Connection` that is not closed. A method that closes one returns its
    incarnation, or None if there was nothing to close. lost_count: of those that did not stop as
    planned. stopped: the last incarnations that did, which never come back."""

    def __init__(self, facts: ServerFacts, outbox: Outbox) -> None:
        self._facts = facts
        self._outbox = outbox
        self._connections: dict[str, Connection] = {}
        self._lost_lines = LogRateLimiter()
        self.lost_count = 0
        self.stopped: deque[str] = deque(maxlen=STOPPED_COUNT_MAX)

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._connections.values()))

    def add(self, connection: Connection) -> None:
        self._connections[connection.incarnation] = connection

    def remove(self, connection: Connection) -> None:
        connection.phase = ConnectionPhase.CLOSED
        del self._connections[connection.incarnation]

    def takers(self) -> list[Connection]:
        """Servers that requests can be sent to which name them."""
        return [one for one in self._connections.values() if one.takes_named]

    def sources(self) -> list[Connection]:
        """Servers that can be asked for caches."""
        return [one for one in self._connections.values() if one.is_source]

    def each_source(self) -> Iterator[Connection]:
        """The same, for whoever stops at the first that will do and closes none."""
        return (one for one in self._connections.values() if one.is_source)

    def targets(self) -> list[Connection]:
        """Servers that caches can be sent to."""
        return [one for one in self._connections.values() if one.is_target]

    def target(self, incarnation: str, link: str) -> Connection | None:
        """The server that a message is of, if it may ask for caches on that link."""
        found = self.on_own_link(incarnation, link)
        return found if found is not None and found.is_target else None

    def of_incarnation(self, incarnation: str) -> Connection | None:
        return self._connections.get(incarnation)

    def on_link(self, link: str) -> Connection | None:
        """The open connection whose messages come on a link."""
        for connection in self._connections.values():
            if connection.link == link and connection.is_open:
                return connection
        return None

    def on_own_link(self, incarnation: str, link: str) -> Connection | None:
        """The open connection of a process, if a message came on the link of its handshake."""
        found = self._connections.get(incarnation)
        return found if found is not None and found.link == link and found.is_open else None

    def lose_incarnation(self, incarnation: str, reason: str, now: float) -> str | None:
        connection = self._connections.get(incarnation)
        return self.lose(connection, reason, now) if connection is not None else None

    def lose(
        self, connection: Connection, reason: str, now: float, *, is_planned: bool = False
    ) -> str | None:
        """Close a connection; its incarnation, or None if it was closing already.

        is_planned: one of the two stops, or lets the other one go, which is no failure.
        """
        if not connection.is_open:
            return None
        incarnation = connection.incarnation
        if is_planned:
            self.stopped.append(incarnation)
        ours = self._facts.incarnation
        self._outbox.to_peer(connection.link, Detached(ours, incarnation, reason, is_planned))
        connection.detail = reason
        self.lost_count += not is_planned
        self._report_loss(connection, reason, now, is_planned=is_planned)
        if not connection.needs_close:
            self.remove(connection)
            return incarnation
        connection.phase = ConnectionPhase.CLOSING
        connection.closed = RankSet(self._facts.rank_count)
        self._outbox.to_workers(ClosePeer(incarnation))
        return incarnation

    def _report_loss(
        self, connection: Connection, reason: str, now: float, *, is_planned: bool
    ) -> None:
        role, name = connection.remote.role, connection.name
        text = f"lost {role} server {name}: {reason}"
        if is_planned:
            text = f"disconnected from {role} server {name}: {reason}"
        if not connection.needs_close:
            # Any process can say Hello and no more, as often as it likes.
            text = self._lost_lines.admit(text, now)
        if text:
            self._outbox.report(text, is_warning=not is_planned)

    def handle_closed(self, incarnation: str, rank: int) -> Connection | None:
        """A rank of ours has closed what it shares with a peer. The connection once all have."""
        connection = self._connections.get(incarnation)
        if connection is None or connection.phase is not ConnectionPhase.CLOSING:
            return None
        if not connection.closed.add(rank):
            return None
        self.remove(connection)
        return connection

    def note_gone(self, incarnation: str) -> bool:
        """The processes of a peer have ended. Whether that proves that nothing of it is written any
        more: its last bytes may lie in a connection that our workers have not closed yet."""
        connection = self._connections.get(incarnation)
        if connection is None or connection.is_open:
            return True
        connection.is_gone = True
        return False
