"""The half of a scheduler that moves caches: connections, caches that arrive, caches that leave.

It takes messages and events in, and answers in values. Which server a cache is asked of, what is
computed for whom, and what becomes of a request are its caller's decisions. Either role can dial,
answer, send and receive. Knows nothing of prompts or streams.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from common.protocol.digests import Digested
from common.protocol.frontend import PeerState
from common.protocol.hosts import process_ids
from common.protocol.peer import (
    Abort,
    Attach,
    Attached,
    Detached,
    Heartbeat,
    Hello,
    Offer,
    Quiesced,
    Refuse,
    TransferDone,
    TransferFailed,
    TransferRequest,
    Welcome,
    Withdraw,
)
from common.protocol.worker import (
    Forgotten,
    PeerClosed,
    PeerConnected,
    PeerFailed,
    PeerOpened,
    SendSettled,
)
from common.scheduling.events import (
    FromPeer,
    LinkBroke,
    LinkDropped,
    LinkRefused,
    ProcessesGone,
    UnreadableRequest,
)
from common.scheduling.facts import Pace
from common.scheduling.page_account import PageAccount
from common.scheduling.peers import REMOVED_REASON, Condition, Outbox
from common.transfers.connection import Connection
from common.transfers.credits import Credits
from common.transfers.incoming import Incoming
from common.transfers.incoming_transfer import CacheFailed, CacheReady
from common.transfers.introduction import Introduction
from common.transfers.links import Links
from common.transfers.outgoing import AskRefused, CacheAsked, Outgoing, OutgoingTransfer
from common.transfers.writers import Writers


@dataclass(frozen=True, slots=True)
class SendProgressed:
    """Puts or digests of a transfer have come back; perhaps the last ones."""

    transfer: OutgoingTransfer


@dataclass(frozen=True, slots=True)
class AbortAsked:
    """A peer gives up a transfer that it asked for."""

    transfer: OutgoingTransfer
    reason: str


@dataclass(frozen=True, slots=True)
class RoomWithdrawn:
    """A peer will not ask for the cache of a room."""

    room: int
    reason: str


@dataclass(frozen=True, slots=True)
class CacheOffered:
    """A peer has a cache that this server may ask for, and need not."""

    source: Connection
    offer: Offer


@dataclass(frozen=True, slots=True)
class TargetLost:
    """A peer was lost: these transfers to it are of no use any more."""

    incarnation: str
    reason: str
    transfers: tuple[OutgoingTransfer, ...]


TransferEvent = (
    CacheReady
    | CacheFailed
    | CacheAsked
    | AskRefused
    | SendProgressed
    | AbortAsked
    | RoomWithdrawn
    | CacheOffered
    | TargetLost
)

WorkerReport = (
    PeerOpened | PeerConnected | PeerFailed | PeerClosed | Forgotten | Digested | SendSettled
)
LinkEvent = LinkBroke | LinkDropped | LinkRefused | ProcessesGone | UnreadableRequest


class Transfers:
    """links, incoming, outgoing: what it is composed of. Callers ask them and act through them.
    writers: who could still write here without a connection.

    token_max: of a cache that this server can have.

    stale_count: messages that are of no use to this server.
    """

    def __init__(
        self,
        introduction: Introduction,
        pace: Pace,
        account: PageAccount,
        outbox: Outbox,
        rng: random.Random,
        *,
        token_max: int,
        addresses: Iterable[str] = (),
        credits: Credits | None = None,
    ) -> None:
        facts = introduction.facts
        self.links = Links(introduction, pace, addresses, credits, outbox, rng)
        self.incoming = Incoming(facts, account, outbox)
        self.outgoing = Outgoing(facts, self.links, outbox, token_max=token_max)
        self.writers = Writers(facts, outbox)
        self._stale_count = 0

    @property
    def is_quiet(self) -> bool:
        """Whether no peer has a page of this server to write to."""
        return self.incoming.is_quiet and not self.writers.trouble

    @property
    def is_settled(self) -> bool:
        """Whether nothing is written by this server any more, and nothing into it."""
        return self.is_quiet and not any(True for _ in self.outgoing)

    @property
    def has_peers(self) -> bool:
        return any(connection.is_open for connection in self.links.connections)

    @property
    def stale_count(self) -> int:
        return self._stale_count + self.incoming.stale_count + self.outgoing.stale_count

    def handle_peer(self, event: FromPeer, now: float) -> list[TransferEvent]:
        """A message of another server."""
        link, message = event.link, event.message
        match message:
            case TransferDone():
                return _one(self.incoming.handle_done(link, message))
            case TransferFailed():
                return _one(self.incoming.handle_failed(link, message))
            case Quiesced():
                self.incoming.handle_quiesced(link, message)
            case TransferRequest():
                return _one(self.outgoing.handle_request(link, message, now))
            case Abort():
                transfer = self.outgoing.handle_abort(link, message)
                return [AbortAsked(transfer, message.reason)] if transfer is not None else []
            case Withdraw():
                if self.links.connections.target(message.incarnation, link) is not None:
                    return [RoomWithdrawn(message.room, message.reason)]
                self._stale_count += 1
            case Offer():
                source = self.links.connections.on_own_link(message.incarnation, link)
                ours = self.links.incarnation
                if source is not None and source.is_source and message.peer_incarnation == ours:
                    return [CacheOffered(source, message)]
                self._stale_count += 1
            case Hello():
                events, is_held_up = self._note_greeting(message, now)
                if not is_held_up:
                    lost = self.links.handshakes.handle_hello(link, message, event.host, now)
                    events += self._lose(lost, "it dialled anew")
                return events
            case _:
                return self._handle_handshake(link, message, now)
        return []

    def _handle_handshake(
        self,
        link: str,
        message: Welcome | Refuse | Attach | Attached | Detached | Heartbeat,
        now: float,
    ) -> list[TransferEvent]:
        shakes = self.links.handshakes
        match message:
            case Welcome():
                events, is_held_up = self._note_greeting(message, now)
                if not is_held_up:
                    shakes.handle_welcome(link, message, now)
                return events
            case Refuse():
                if message.is_closed and self.writers.take_refusing(message.incarnation):
                    self.incoming.apply_gone(message.incarnation)
                return self._lose(shakes.handle_refuse(link, message, now), "it refused us")
            case Attach():
                return self._lose(
                    shakes.handle_attach(link, message, now), "it can't be written to"
                )
            case Attached():
                return self._lose(shakes.handle_attached(link, message, now), "it attached late")
            case Detached():
                lost = self.links.handle_detached(link, message, now)
                return self._lose(lost, f"it detached: {message.reason}")
            case Heartbeat():
                self.links.handle_heartbeat(link, message)
        return []

    def _note_greeting(
        self, message: Hello | Welcome, now: float
    ) -> tuple[list[TransferEvent], bool]:
        """A scheduler greets; its workers have ended what an earlier one began. Whether it has to
        greet again, for our ranks have to close what they share with that one first."""
        for incarnation in self.writers.take_greeted(message):
            self.incoming.apply_gone(incarnation)
        ids = process_ids(message.host_ids, message.pids)
        earlier = [
            one
            for one in self.links.connections
            if ids and one.incarnation != message.incarnation and one.remote.process_ids == ids
        ]
        events: list[TransferEvent] = []
        for one in earlier:
            one.is_succeeded = True
            text = "another scheduler has taken its workers on"
            events += self._lose(self.links.connections.lose(one, text, now), text)
        return events, any(self.links.connections.of_incarnation(e.incarnation) for e in earlier)

    def handle_worker(self, message: WorkerReport, now: float) -> list[TransferEvent]:
        """A report of one of our ranks."""
        match message:
            case PeerOpened():
                self.links.handshakes.handle_opened(message)
            case PeerConnected():
                self.links.handshakes.handle_connected(message, now)
            case PeerFailed():
                if self.links.handshakes.note_failed(message):
                    return []
                text = f"rank {message.rank}: {message.reason}"
                return self._lose_incarnation(message.peer, text, now)
            case PeerClosed():
                self._handle_closed(message)
            case Forgotten():
                self.incoming.apply_forgotten(message)
            case Digested():
                sent = self.outgoing.apply_digested(message)
                if sent is not None:
                    return [SendProgressed(sent)]
                return _one(self.incoming.apply_digested(message))
            case SendSettled():
                return self._handle_settled(message, now)
        return []

    def _handle_closed(self, message: PeerClosed) -> None:
        connection = self.links.connections.handle_closed(message.peer, message.rank)
        if connection is not None:
            self.incoming.apply_closed(message.peer)
            if connection.has_ended:
                self.writers.forget(message.peer)
            if connection.is_fenced:
                self.incoming.apply_gone(message.peer)
            elif connection.inbound is not None:
                self.writers.add_closed(message.peer, connection.remote.process_ids)

    def _handle_settled(self, message: SendSettled, now: float) -> list[TransferEvent]:
        """A connection that broke with bytes under way has lost its peer: only the peer's own fence
        proves that nothing arrives any more."""
        transfer = self.outgoing.apply_settled(message)
        if transfer is None:
            return []
        events: list[TransferEvent] = [SendProgressed(transfer)]
        if not message.is_quiet:
            text = f"the connection broke in a transfer: {message.error}"
            events += self._lose_incarnation(transfer.peer, text, now)
        return events

    def handle_link(self, event: LinkEvent, now: float) -> list[TransferEvent]:
        """Something that happened to a link, or to the processes behind it."""
        match event:
            case ProcessesGone(incarnation=incarnation):
                lost = self._lose_incarnation(incarnation, "its processes ended", now)
                if self.links.connections.note_gone(incarnation):
                    self.writers.forget(incarnation)
                    self.incoming.apply_gone(incarnation)
                return lost
            case LinkDropped(link=link, reason=reason):
                found = self.links.handle_link_dropped(link, reason, now)
                return self._lose(found, f"its link is not listened to: {reason}")
            case LinkRefused(link=link, reason=reason):
                if link:
                    self.links.addresses.note_link_refused(link, reason, now)
                else:
                    self.links.refusals.note_link_refused(reason)
            case LinkBroke(link=link, is_refused=is_refused):
                is_asked = self.incoming.is_asked
                found = self.links.handle_break(link, now, is_refused=is_refused, is_asked=is_asked)
                return self._lose(found, "its connection broke")
            case UnreadableRequest():
                self.outgoing.refuse_unreadable(event)
        return []

    def expire(self, now: float) -> list[TransferEvent]:
        """Give up peers that are silent or can't go on, and repeat what was not answered."""
        events: list[TransferEvent] = []
        for connection, reason in self.links.lost(now):
            events += self._lose(self.links.connections.lose(connection, reason, now), reason)
        self.incoming.repeat_aborts(now)
        self.writers.review(now)
        return events

    def part(self, named_links: Callable[[], set[str]], now: float) -> list[TransferEvent]:
        """Let servers go that are not wanted any more, each as soon as nothing is under way.

        named_links: of the servers that waiting requests name.
        """
        leaving = self.links.addresses.leaving()
        named = named_links() if leaving else set()
        events: list[TransferEvent] = []
        for address in leaving:
            link, sent = address.link, self.outgoing
            is_used = link in named or self.incoming.uses(link)
            is_used = is_used or any(one.link == link for one in sent)
            lost = self.links.part(address, now, is_used=is_used)
            events += self._lose(lost, REMOVED_REASON)
        return events

    def _lose_incarnation(self, incarnation: str, reason: str, now: float) -> list[TransferEvent]:
        return self._lose(self.links.connections.lose_incarnation(incarnation, reason, now), reason)

    def _lose(self, incarnation: str | None, reason: str) -> list[TransferEvent]:
        """incarnation: of a connection that was just closed, if one was."""
        if incarnation is None:
            return []
        orphans = tuple(one for one in self.outgoing if one.peer == incarnation)
        lost: list[TransferEvent] = list(self.incoming.abandon_peer(incarnation))
        return [*lost, TargetLost(incarnation, reason, orphans)] if orphans else lost

    def send_due(self, now: float, condition: Condition) -> None:
        """Hellos and heartbeats that are due."""
        self.links.send_due(now, condition)

    def states(self) -> list[PeerState]:
        """Every peer, for operators."""
        return self.links.states(self.incoming.in_flight() + self.outgoing.in_flight())


def _one(event: TransferEvent | None) -> list[TransferEvent]:
    return [event] if event is not None else []
