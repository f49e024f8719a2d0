"""Connections of this server to others: whether each is heard, and what is sent by the clock.

    any failure or silence -> our ranks close -> forgotten, or dialled again

Knows nothing of transfers and requests. A method that closes a connection returns its incarnation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping

import msgspec

from common.protocol.frontend import PeerState
from common.protocol.peer import (
    Detached,
    Heartbeat,
)
from common.request import Bootstrap
from common.scheduling.breaker import BreakerState
from common.scheduling.facts import Pace
from common.scheduling.peers import (
    HELLO_INTERVAL_S,
    REMOVED_REASON,
    STOPPING_REASON,
    Condition,
    Outbox,
)
from common.scheduling.prefix_cache import marks_in
from common.transfers.addresses import Addresses
from common.transfers.connection import (
    Address,
    Connection,
    ConnectionPhase,
)
from common.transfers.connections import Connections
from common.transfers.credits import Credits
from common.transfers.handshakes import Handshakes
from common.transfers.introduction import Introduction
from common.transfers.refusals import Refusals


class Links:
    """connections, handshakes, addresses, refusals: what it is composed of.

    introduction: what this server says of itself. credits: levels to send to peers, if it has any.
    """

    def __init__(
        self,
        introduction: Introduction,
        pace: Pace,
        addresses: Iterable[str],
        credits: Credits | None,
        outbox: Outbox,
        rng: random.Random,
    ) -> None:
        self._introduction = introduction
        self._facts = introduction.facts
        self._pace = pace
        self._credits = credits
        self._outbox = outbox
        self._has_left = False
        self.connections = Connections(self._facts, outbox)
        self.addresses = Addresses(outbox, addresses)
        self.refusals = Refusals(self._facts.incarnation, outbox)
        self.handshakes = Handshakes(
            introduction,
            self.connections,
            self.addresses,
            self.refusals,
            credits,
            outbox,
            rng,
        )

    @property
    def incarnation(self) -> str:
        """Of this server."""
        return self._facts.incarnation

    def resolve(self, link: str, incarnation: str = "") -> str:
        """The link to ask the server at an address, which may be connected by another name.

        incarnation: of the one process that is meant, if it is known.
        """
        address = self.addresses.get(link)
        wanted = incarnation or (address.twin if address is not None else "")
        known = self.connections.of_incarnation(wanted) if wanted else None
        if known is not None and known.phase is ConnectionPhase.CONNECTED:
            return known.link
        return link

    def find(self, bootstrap: Bootstrap) -> Connection | None:
        """The connection to the server that a request names, if it is up; dialled if need be."""
        named = f"{bootstrap.host}:{bootstrap.port}"
        link = self.resolve(named, bootstrap.engine)
        found = self.connections.on_link(link)
        if found is None and bootstrap.host:
            self.addresses.ensure(link)
        return found if found is not None and found.is_up else None

    def handle_heartbeat(self, link: str, beat: Heartbeat) -> None:
        connection = self.connections.on_own_link(beat.incarnation, link)
        if connection is None:
            if self.addresses.get(link) is None:
                self.handshakes.detach_unknown(link, beat.incarnation)
            return
        connection.is_suspect = False
        connection.asked_token_count = 0
        connection.credits = beat.credits
        connection.is_full = False
        if beat.cached_prefixes is not None:
            connection.cached_prefixes = frozenset(marks_in(beat.cached_prefixes))
        connection.liveness.apply_heartbeat(beat)

    def handle_detached(self, link: str, message: Detached, now: float) -> str | None:
        connection = self.connections.on_link(link)
        if connection is None or message.peer_incarnation != self._facts.incarnation:
            return None
        if not connection.is_dialled and connection.incarnation != message.incarnation:
            return None
        reason = message.reason if message.is_planned else f"it gave us up: {message.reason}"
        return self.connections.lose(connection, reason, now, is_planned=message.is_planned)

    def handle_break(
        self, link: str, now: float, *, is_refused: bool, is_asked: Callable[[str], bool]
    ) -> str | None:
        """The connection below a link broke: nothing is asked of its peer until it is heard again.

        The peer is lost if its address refuses connections. It is lost as well if transfers are
        under way: messages of either side may be lost, and a transfer would wait for them in vain.
        is_asked: whether transfers from an incarnation are under way.
        """
        connection = self.connections.on_link(link)
        if connection is None:
            return None
        connection.is_suspect = True
        if is_refused:
            reason = "its connection broke, and its address refuses new ones"
            return self.connections.lose(connection, reason, now)
        if is_asked(connection.incarnation):
            reason = "its connection broke while transfers were under way"
            return self.connections.lose(connection, reason, now)
        return None

    def handle_link_dropped(self, link: str, reason: str, now: float) -> str | None:
        """A link that carried nonsense is closed; one that this server dialled is dialled anew."""
        connection = self.connections.on_link(link)
        address = self.addresses.get(link)
        if address is not None:
            address.must_redial = True
            if address.is_idle:
                self.addresses.leave_alone(address, reason, now)
        elif connection is not None:
            reason = f"its link is not listened to: {reason}"
        return self.connections.lose(connection, reason, now) if connection is not None else None

    def lost(self, now: float) -> list[tuple[Connection, str]]:
        """Connections whose peer is silent or can't go on, and why."""
        opened = [connection for connection in self.connections if connection.is_open]
        reasons = [(one, one.liveness.why_lost(now, self._pace)) for one in opened]
        return [(connection, reason) for connection, reason in reasons if reason]

    def part(self, address: Address, now: float, *, is_used: bool) -> str | None:
        """Let an address go that leaves, as soon as nothing uses it. is_used: transfers or requests
        need it."""
        connection = address.connection
        if connection is not None and connection.is_leaving and connection.is_open and not is_used:
            return self.connections.lose(connection, REMOVED_REASON, now, is_planned=True)
        self.addresses.hang_up_if_due(address, now, is_used=is_used)
        return None

    def leave(self) -> int:
        """This server stops: every peer is told, and none is welcome any more. Returns how many
        there were."""
        self._has_left = True
        ours = self._facts.incarnation
        opened = [connection for connection in self.connections if connection.is_open]
        for connection in opened:
            last = Detached(ours, connection.incarnation, STOPPING_REASON, is_planned=True)
            self._outbox.to_peer(connection.link, last)
        return len(opened)

    def send_due(self, now: float, condition: Condition) -> None:
        """Hello to every address that has not answered, heartbeats to the others.

        A server in trouble does not dial, for it would only be given up again.
        """
        trouble = STOPPING_REASON if self._has_left else condition.trouble
        self.handshakes.trouble = trouble
        self.refusals.expire(now)
        for address in self.addresses.all():
            is_due = address.is_dialled and address.is_idle and now >= address.next_hello_at
            if not is_due or trouble or self.resolve(address.link) != address.link:
                continue  # a twin is asked again once the other connection is gone
            self.addresses.redial_if_due(address)
            address.next_hello_at = now + HELLO_INTERVAL_S
            self._outbox.to_peer(address.link, self._introduction.hello())
        for connection in self.connections:
            if not connection.is_open:
                continue
            beat = connection.liveness.next_heartbeat(
                self._facts.incarnation, now, self._pace, condition
            )
            if beat is not None and self._credits is not None:
                level = self._credits.report(connection.incarnation)
                beat = msgspec.structs.replace(beat, credits=level)
            if beat is not None and connection.told_prefixes is not condition.cached_prefixes:
                connection.told_prefixes = condition.cached_prefixes
                beat = msgspec.structs.replace(beat, cached_prefixes=condition.cached_prefixes)
            if beat is not None:
                self._outbox.to_peer(connection.link, beat)

    def hurry(self, incarnations: Iterable[str] | None = None) -> None:
        """The next heartbeats to these peers, or to all, are due now: there is news."""
        chosen = None if incarnations is None else set(incarnations)
        for connection in self.connections:
            if chosen is None or connection.incarnation in chosen:
                connection.liveness.next_beat_at = 0.0

    def note_success(self, connection: Connection, now: float) -> None:
        """A cache came from a peer as it was asked for."""
        connection.succeeded_at = now
        connection.is_proven = True
        connection.test_problem = ""
        if connection.breaker.state is not BreakerState.CLOSED:
            self._outbox.report(f"{connection.remote.role} server {connection.name} works again")
        connection.breaker.note_success()

    def note_failure(self, connection: Connection, now: float) -> None:
        """A transfer failed by a peer's fault. After several in a row it is left alone a while."""
        before = connection.breaker.state
        connection.breaker.note_failure(now)
        if before is BreakerState.CLOSED and connection.breaker.state is BreakerState.OPEN:
            count = connection.breaker.failure_count
            role, name = connection.remote.role, connection.name
            text = f"{role} server {name} failed {count} transfers in a row: left alone"
            self._outbox.report(text, is_warning=True)

    def note_test_failed(self, connection: Connection, problem: str, now: float) -> None:
        """A self-test of a peer brought nothing."""
        connection.test_problem = problem
        connection.test_failed_at = now

    def note_full(self, connection: Connection) -> None:
        """A peer had no room for a request: it is left alone until it says how much it has."""
        connection.is_full = True

    def note_asked(self, connection: Connection, token_count: int, now: float) -> None:
        """A cache of so many tokens was asked for."""
        connection.breaker.note_asked(now)
        connection.asked_token_count += token_count

    def describe(self, link: str | None) -> str:
        """The state of the server at an address, or of all, for an error message."""
        words = [one.shown for one in self.addresses.all() if link in (None, one.link)]
        none = f"too many addresses are dialled to try {link}" if link else "none is known"
        return ", ".join(words) or none

    def states(self, in_flight: Mapping[str, int]) -> list[PeerState]:
        """in_flight: incarnation -> transfers under way. Servers refused lately come last."""
        dialled = [
            address.state(in_flight.get(address.incarnation, 0)) for address in self.addresses.all()
        ]
        accepted = [
            connection.state(in_flight.get(connection.incarnation, 0))
            for connection in self.connections
            if not connection.is_dialled
        ]
        return [*dialled, *accepted, *self.refusals.states()]
