"""A server's links to its peers, seen from its scheduler: messages in place of bytes, and events
in place of everything else that happens to a link.

A `PeerEnd` has what differs between a listening and a dialling server. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from common.channel.peer import PeerDialer, PeerListener
from common.channel.sockets import SendResult
from common.errors import ConfigError, ProtocolError
from common.protocol import too_large
from common.protocol.codec import decode_peer_message, encode, find_unread
from common.protocol.peer import PeerMessage
from common.runtime.malformed import MalformedCounts
from common.scheduling.events import (
    Event,
    FromPeer,
    LinkBroke,
    LinkDropped,
    LinkRefused,
    UnreadableRequest,
)

# A peer of another version sends a message or two that can't be read; more is nonsense.
MALFORMED_COUNT_MAX = 16


class PeerEnd(Protocol):
    """The sockets of a listening or of a dialling server (`peer_ends.py`)."""

    @property
    def links(self) -> PeerListener | PeerDialer: ...

    def host_of(self, link: str) -> str:
        """Where a peer that dialled us is; "" if we dialled it."""

    def take_breaks(self) -> list[LinkBroke]:
        """Connections that broke since the last call, as far as the links' `receive` has seen."""

    def drop(self, link: str) -> None:
        """Receive nothing from a link any more."""

    def dial(self, link: str) -> None:
        """Raises: ConfigError if the link can't be opened."""

    def hang_up(self, link: str) -> None: ...

    def close(self, linger_ms: int) -> None: ...


class PeerEndpoint:
    """One thread uses it.

    links: the channel that a `Poller` waits for.
    dropped_count: messages that could not be read, sent or delivered.
    """

    def __init__(self, end: PeerEnd, warn: Callable[[str], None]) -> None:
        """warn: writes a log line, at a limited rate, because peers can cause any number."""
        self.dropped_count = 0
        self._end = end
        self._warn = warn
        self._malformed = MalformedCounts()
        self.links = end.links

    def close(self, linger_ms: int = 0) -> None:
        """Queued messages may take `linger_ms` to leave."""
        self._end.close(linger_ms)

    # ---- what comes in ---------------------------------------------------------------------------

    def receive(self) -> list[Event]:
        """Messages and events since the last call. Never waits."""
        events: list[Event] = []
        for link, payload in self.links.receive():
            event = self._read(link, payload)
            if event is not None:
                events.append(event)
        events += [LinkRefused(*found) for found in self.links.take_refusals()]
        return [*events, *self._end.take_breaks()]

    def _read(self, link: str, payload: bytes) -> Event | None:
        try:
            message = decode_peer_message(payload)
            return FromPeer(link, message, self._end.host_of(link))
        except ProtocolError as error:
            self.dropped_count += 1
            return self._attribute(link, payload, error) or self._note_malformed(link, error)

    def _attribute(self, link: str, payload: bytes, error: ProtocolError) -> Event | None:
        """An unreadable message ends the transfer that it names, and does not count as malformed:
        its sender may be of another version. Caches travel both ways, whichever end dialled."""
        unread = find_unread(payload)
        if unread is None:
            return None
        self._warn(
            f"transfer {unread.transfer_id} on link {link:.24} has failed: {error}; are both "
            "servers of one version?"
        )
        transfer_id, incarnation = unread.transfer_id, unread.incarnation
        if unread.is_request:
            return UnreadableRequest(link, transfer_id, incarnation, str(error))
        return FromPeer(link, too_large.failure_of_unread_result(transfer_id, incarnation, error))

    def _note_malformed(self, link: str, error: ProtocolError) -> Event | None:
        """A link with MALFORMED_COUNT_MAX malformed messages is dropped."""
        count = self._malformed.add(link)
        if count == 1:
            self._warn(
                f"dropped a message on link {link:.24}: {error}; is its sender a Baton server of "
                "this version?"
            )
        if count < MALFORMED_COUNT_MAX:
            return None
        reason = f"{count} malformed messages, the last one: {error}"
        self._warn(f"link {link:.24} is dropped: {reason}; a new connection is heard again")
        self._malformed.forget(link)
        self._end.drop(link)
        return LinkDropped(link, reason)

    # ---- what goes out ---------------------------------------------------------------------------

    def send(self, link: str, message: PeerMessage) -> Event | None:
        """Queue a message. Returns the event that stands for the answer to a message that can't be
        sent."""
        try:
            payload = encode(message)
        except ProtocolError as error:
            self.dropped_count += 1
            self._warn(f"dropped a message to link {link:.24}: {error}")
            replacement = too_large.replacement_for_peer(message, error)
            if replacement is not None:
                self.send(link, replacement)
            failure = too_large.failure_of_unsent_request(message, error)
            return FromPeer(link, failure) if failure is not None else None
        if self.links.send(link, payload) is not SendResult.SENT:
            # The core notices a peer that takes no messages by its silence. It knows deadlines, and
            # repeats or gives up the message.
            self.dropped_count += 1
        return None

    def dial(self, link: str) -> Event | None:
        """Open a link. Returns a LinkRefused if it can't be opened."""
        try:
            self._end.dial(link)
        except ConfigError as error:
            return LinkRefused(link, str(error))
        return None

    def hang_up(self, link: str) -> None:
        self._end.hang_up(link)
