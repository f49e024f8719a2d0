"""A server's end of the links to its peers: messages in place of bytes, and events in place of
whatever else happens to a link.

Of roles it knows that a prefill server listens and a decode server dials. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from common.channel.gate import Gate
from common.channel.handshakes import Break
from common.channel.keys import load_curve
from common.channel.peer import PeerDialer, PeerListener
from common.channel.sockets import SendResult
from common.config import Role, ServerConfig
from common.errors import ConfigError, ProtocolError
from common.protocol import too_large
from common.protocol.codec import (
    decode_decode_to_prefill,
    decode_prefill_to_decode,
    encode,
    find_unread_request,
    find_unread_result,
)
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


class PeerEndpoint:
    """One thread uses it.

    links: what a `Poller` waits for.
    dropped_count: messages that could not be read, sent or delivered.
    """

    def __init__(self, config: ServerConfig, warn: Callable[[str], None]) -> None:
        """warn: writes a line that others can cause as often as they like.

        Raises: ConfigError naming a key file or an address that can't be used.
        """
        self.dropped_count = 0
        self._warn = warn
        self._malformed = MalformedCounts()
        self._gate: Gate | None = None
        self.links: PeerListener | PeerDialer
        curve = load_curve(config.curve_secret_key_file, config.curve_peer_keys_file)
        if config.role is Role.PREFILL:
            self._gate = Gate(curve) if curve is not None else None
            self.links = PeerListener(config.host, config.bootstrap_port, self._gate)
        else:
            self.links = PeerDialer(curve)

    def close(self, linger_ms: int = 0) -> None:
        """What was said last may take `linger_ms` to leave."""
        self.links.close(linger_ms)
        if self._gate is not None:
            self._gate.close(linger_ms)

    # ---- what comes in ---------------------------------------------------------------------------

    def receive(self) -> list[Event]:
        """What has come and what has happened. Never waits."""
        events: list[Event] = []
        for link, payload in self.links.receive():
            event = self._read(link, payload)
            if event is not None:
                events.append(event)
        events += [LinkRefused(*found) for found in self.links.take_refusals()]
        if isinstance(self.links, PeerDialer):
            for link, found in self.links.take_breaks():
                events.append(LinkBroke(link, is_refused=found is Break.REFUSED))
        return events

    def _read(self, link: str, payload: bytes) -> Event | None:
        message: PeerMessage
        try:
            if isinstance(self.links, PeerListener):
                message = decode_decode_to_prefill(payload)
            else:
                message = decode_prefill_to_decode(payload)
        except ProtocolError as error:
            self.dropped_count += 1
            return self._attribute(link, payload, error) or self._note_malformed(link, error)
        return FromPeer(link, message)

    def _attribute(self, link: str, payload: bytes, error: ProtocolError) -> Event | None:
        """A message that can't be read ends the transfer that it is about, if that can be read.
        Such a link does not say nonsense: its server may be of another version."""
        is_listening = isinstance(self.links, PeerListener)
        unread = find_unread_request(payload) if is_listening else find_unread_result(payload)
        if unread is None:
            return None
        transfer_id, incarnation = unread.transfer_id, unread.incarnation
        self._warn(f"transfer {transfer_id} on link {link:.24} has failed: {error}")
        if is_listening:
            return UnreadableRequest(link, transfer_id, incarnation, str(error))
        return FromPeer(link, too_large.failure_of_unread_result(transfer_id, incarnation, error))

    def _note_malformed(self, link: str, error: ProtocolError) -> Event | None:
        """A link that says nothing but nonsense is dropped."""
        count = self._malformed.add(link)
        if count == 1:
            self._warn(f"dropped a message on link {link:.24}: {error}")
        if count < MALFORMED_COUNT_MAX:
            return None
        reason = f"{count} malformed messages, the last one: {error}"
        self._warn(f"link {link:.24} is dropped: {reason}")
        self._malformed.forget(link)
        if isinstance(self.links, PeerListener):
            self.links.drop(link)
        else:
            self.links.hang_up(link)
        return LinkDropped(link, reason)

    # ---- what goes out ---------------------------------------------------------------------------

    def send(self, link: str, message: PeerMessage) -> Event | None:
        """Queue a message. Returns what is to be taken in place of an answer, if there can't be
        one."""
        try:
            payload = encode(message)
        except ProtocolError as error:
            self.dropped_count += 1
            self._warn(f"not sent: {error}")
            replacement = too_large.replacement_for_peer(message, error)
            if replacement is not None:
                self.send(link, replacement)
            failure = too_large.failure_of_unsent_request(message, error)
            return FromPeer(link, failure) if failure is not None else None
        if self.links.send(link, payload) is not SendResult.SENT:
            # A peer that does not take messages is found out by its silence; what was meant for it
            # is repeated or given up by the core, which knows deadlines.
            self.dropped_count += 1
        return None

    def dial(self, link: str) -> Event | None:
        """Open a link. Returns why it can't be, if so."""
        assert isinstance(self.links, PeerDialer), "only a decode server dials"
        try:
            self.links.dial(link)
        except ConfigError as error:
            return LinkRefused(link, str(error))
        return None

    def hang_up(self, link: str) -> None:
        assert isinstance(self.links, PeerDialer), "only a decode server hangs up"
        self.links.hang_up(link)
