"""Between servers: the prefill server listens, decode servers dial. Payloads are bytes.

A link is one dialled connection. It keeps its name on both sides when ZMQ reconnects it. The name
does not identify the peer; messages do.
"""

from __future__ import annotations

import secrets
import socket as system_socket

import zmq

from common.channel.address import Address, make_address, parse_address
from common.channel.gate import Gate
from common.channel.handshakes import Break, Handshakes
from common.channel.keys import Curve
from common.channel.sockets import (
    PeerFrame,
    SendResult,
    Socket,
    SocketSet,
    lock_dealer,
    open_peer_dealer,
    open_peer_router,
    receive_dealt,
    receive_peers,
    send_dealt,
    send_routed,
)
from common.errors import ConfigError, config_error

# Every link is a socket with a connection. Far more than one decode server needs.
LINK_COUNT_MAX = 256
IDENTITY_NBYTES = 16
# Dropped links that are remembered. A sender that dials again and again displaces the oldest.
DROPPED_COUNT_MAX = 4096
# Links whose host is remembered, the last so many that were heard.
HOST_COUNT_MAX = 4096


class PeerListener:
    """The prefill server's bootstrap port. One thread uses it.

    Links are named by the random identity of the dialler, in hexadecimal, and by its key if keys
    are required: then knowing a link's name is not enough to take it over.
    malformed_count: messages that were not one frame; they were dropped.
    """

    def __init__(self, host: str, port: int, gate: Gate | None = None) -> None:
        """port: 0 lets the system choose one; see `port`. gate: which keys may connect; None: all.

        Raises: ConfigError naming host and port if they can't be listened on.
        """
        address = _resolve(make_address(host, port))
        self.malformed_count = 0
        self._gate = gate
        self._dropped: dict[str, None] = {}
        self._hosts: dict[str, str] = {}
        context = gate.context if gate is not None else None
        self._socket = open_peer_router(is_ipv6=address.is_ipv6, context=context)
        if gate is not None:
            gate.guard(self._socket)
        self._handshakes = Handshakes(self._socket, is_listening=True, has_keys=gate is not None)
        guards = gate.sockets() if gate is not None else ()
        self._socket_set = SocketSet(self._socket, *self._handshakes.sockets(), *guards)
        try:
            self._socket.bind(f"tcp://{address}")
        except zmq.ZMQError as exc:
            self.close()
            is_used = exc.errno == zmq.EADDRINUSE
            reason = "the port is in use" if is_used else str(exc.strerror)
            error = OSError(exc.errno, exc.strerror)
            raise config_error(f"can't listen on {Address(host, port)}: {reason}", error) from exc

    @property
    def port(self) -> int:
        """The port that is listened on."""
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return int(endpoint.rstrip(b"\0").rpartition(b":")[2])

    def sockets(self) -> tuple[SocketSet, ...]:
        return (self._socket_set,)

    def send(self, link: str, payload: bytes) -> SendResult:
        """GONE if the link's connection is gone; it comes back by itself if its server lives."""
        return send_routed(self._socket, bytes.fromhex(link.partition(".")[0]), payload)

    def receive(self) -> list[tuple[str, bytes]]:
        """(link, payload) of new messages, oldest first per link. Never waits."""
        self._handshakes.read_events()
        if self._gate is not None:
            self._gate.answer()
        received, malformed_count = receive_peers(self._socket)
        self.malformed_count += malformed_count
        messages: list[tuple[str, bytes]] = []
        for frame in self._allowed(received):
            link = f"{frame.identity.hex()}.{frame.user}" if self._gate else frame.identity.hex()
            if link not in self._dropped:
                self._note_host(link, frame.host)
                messages.append((link, frame.payload))
        return messages

    def host_of(self, link: str) -> str:
        """Where a link's last message came from; "" if that is not known."""
        return self._hosts.get(link, "")

    def _note_host(self, link: str, host: str) -> None:
        self._hosts.pop(link, None)
        self._hosts[link] = host
        if len(self._hosts) > HOST_COUNT_MAX:
            del self._hosts[next(iter(self._hosts))]

    def _allowed(self, received: list[PeerFrame]) -> list[PeerFrame]:
        """Those under keys that are allowed now. Messages under a key that was removed from the
        file are dropped, although its connection stands."""
        gate = self._gate
        if gate is None:
            return received
        allowed = {user for user in {one.user for one in received} if gate.allows(user)}
        return [one for one in received if one.user in allowed]

    def drop(self, link: str) -> None:
        """Read a link no more. ZMQ can't close one connection of a router socket."""
        self._dropped[link] = None
        if len(self._dropped) > DROPPED_COUNT_MAX:
            del self._dropped[next(iter(self._dropped))]

    def take_refusals(self) -> list[tuple[str, str]]:
        """("", reason) of refused connections, as far as `receive` has seen."""
        failures = self._handshakes.take_failures()
        if self._gate is not None:
            failures += [f"unknown {key}" for key in self._gate.take_refusals()]
        return [("", failure) for failure in failures]

    def close(self, linger_ms: int = 0) -> None:
        """Queued messages are dropped after `linger_ms`. Harmless if closed."""
        if not self._socket.closed:
            self._handshakes.close()
        self._socket.close(linger_ms)


class PeerDialer:
    """A decode server's links to prefill servers, each named by its address. One thread uses it.

    malformed_count: messages that were not one frame; they were dropped.
    """

    def __init__(self, curve: Curve | None = None) -> None:
        """curve: our keys and those of the servers that are dialled; None: none are used."""
        self.malformed_count = 0
        self._curve = curve
        self._sockets: dict[str, Socket] = {}
        self._handshakes: dict[str, Handshakes] = {}
        self._socket_set = SocketSet()
        self._link_of: dict[Socket, str] = {}
        self._with_news: dict[str, None] = {}

    def dial(self, link: str, public_key: str = "") -> None:
        """Open the link "host:port", "[v6]:port"; returns at once, and keeps trying from then on.

        public_key: of the server there, if it is not in the file of keys.
        Raises: ConfigError if that is no address, if there is no key for it, or if LINK_COUNT_MAX
            links are open.
        """
        assert link not in self._sockets, f"link {link} is already open"
        address = parse_address(link)
        if len(self._sockets) >= LINK_COUNT_MAX:
            raise ConfigError(
                f"address {link!r}: {LINK_COUNT_MAX} links are open, none can be added"
            )
        server_key = b""
        if self._curve is not None:
            server_key = bytes.fromhex(public_key) or self._curve.peers.key_of(link)
        # A link that is dialled anew is another one to the listener. ZMQ keeps identities that
        # begin with a zero byte to itself.
        identity = b"d" + secrets.token_bytes(IDENTITY_NBYTES)
        socket = open_peer_dealer(identity, is_ipv6=address.is_ipv6)
        if self._curve is not None:
            lock_dealer(socket, self._curve, server_key)
        self._handshakes[link] = Handshakes(
            socket, is_listening=False, has_keys=self._curve is not None
        )
        socket.connect(f"tcp://{address}")
        self._sockets[link] = socket
        for found in self._sockets_of(link):
            self._socket_set.add(found)
            self._link_of[found] = link

    def _sockets_of(self, link: str) -> tuple[Socket, ...]:
        return (self._sockets[link], *self._handshakes[link].sockets())

    def hang_up(self, link: str, linger_ms: int = 0) -> None:
        """Close a link for good. Queued messages are dropped after `linger_ms`. Harmless if not
        open."""
        if link not in self._sockets:
            return
        for found in self._sockets_of(link):
            self._socket_set.remove(found)
            del self._link_of[found]
        self._with_news.pop(link, None)
        self._handshakes.pop(link).close()
        self._sockets.pop(link).close(linger_ms)

    def sockets(self) -> tuple[SocketSet, ...]:
        return (self._socket_set,)

    def take_refusals(self) -> list[tuple[str, str]]:
        """(link, reason) of connections that failed, as far as `receive` has seen."""
        return [
            (link, failure)
            for link in self._with_news
            for failure in self._handshakes[link].take_failures()
        ]

    def take_breaks(self) -> list[tuple[str, Break]]:
        """(link, break) of established connections that broke, as far as `receive` has seen."""
        return [
            (link, found)
            for link in self._with_news
            for found in self._handshakes[link].take_breaks()
        ]

    def send(self, link: str, payload: bytes) -> SendResult:
        """FULL if the link is not connected just now or its queue is full; GONE if not open."""
        socket = self._sockets.get(link)
        if socket is None:
            return SendResult.GONE
        return send_dealt(socket, payload)

    def receive(self) -> list[tuple[str, bytes]]:
        """(link, payload) of new messages, oldest first per link. Never waits, and tries only
        sockets that a `Poller` has found readable."""
        self._with_news = {
            link: None for link in self._with_news if self._handshakes[link].has_news
        }
        messages: list[tuple[str, bytes]] = []
        for socket in self._socket_set.take_readable():
            link = self._link_of[socket]
            if socket is not self._sockets[link]:
                self._handshakes[link].read_events()
                self._with_news[link] = None
                continue
            received, malformed_count = receive_dealt(socket)
            self.malformed_count += malformed_count
            messages.extend((link, payload) for payload in received)
        return messages

    def close(self, linger_ms: int = 0) -> None:
        """Close all links. Harmless if closed."""
        for link in list(self._sockets):
            self.hang_up(link, linger_ms)


def local_host_towards(link: str) -> str:
    """The address of this host from which "host:port" is reached, and at which it reaches us.

    Sends nothing. Raises: ConfigError if that is no address or there is no route to it.
    """
    address = _resolve(parse_address(link))
    family = system_socket.AF_INET6 if address.is_ipv6 else system_socket.AF_INET
    try:
        with system_socket.socket(family, system_socket.SOCK_DGRAM) as probe:
            probe.connect((address.host, address.port))
            return str(probe.getsockname()[0])
    except OSError as exc:
        raise ConfigError(f"address {link!r}: no route to it: {exc.strerror}") from exc


def _resolve(address: Address) -> Address:
    """ZMQ binds to numbers only, so a name is looked up here, once, at start; IPv4 is preferred."""
    try:
        found = system_socket.getaddrinfo(
            address.host, address.port, type=system_socket.SOCK_STREAM
        )
    except OSError as exc:
        text = f"host {address.host!r} can't be resolved: {exc.strerror}"
        raise config_error(text, exc) from exc
    hosts = [str(entry[4][0]) for entry in found]
    return Address(min(hosts, key=lambda host: ":" in host), address.port)
