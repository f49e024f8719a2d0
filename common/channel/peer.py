"""Between servers: the prefill server listens, decode servers dial. Payloads are bytes.

A link is one dialled connection, and keeps its name on both sides when ZMQ has to reconnect it.
The name says nothing of who is behind it; that is for the messages.
"""

from __future__ import annotations

import secrets
import socket as system_socket

import zmq

from common.channel.address import Address, make_address, parse_address
from common.channel.sockets import (
    SendResult,
    Socket,
    open_peer_dealer,
    open_peer_router,
    receive_dealt,
    receive_routed,
    send_dealt,
    send_routed,
)
from common.errors import ConfigError

# Every link is a socket with a connection; far more prefill servers than one decode server uses.
LINK_COUNT_MAX = 256
IDENTITY_NBYTES = 16


class PeerListener:
    """The prefill server's bootstrap port. One thread uses it.

    Links are named by the random identity of the dialler, in hexadecimal.
    malformed_count: messages that were not one frame; they were dropped.
    """

    def __init__(self, host: str, port: int) -> None:
        """port: 0 lets the system choose one; see `port`.

        Raises: ConfigError naming host and port if they can't be listened on.
        """
        address = _resolve(make_address(host, port))
        self.malformed_count = 0
        self._socket = open_peer_router(is_ipv6=address.is_ipv6)
        try:
            self._socket.bind(f"tcp://{address}")
        except zmq.ZMQError as exc:
            self._socket.close()
            reason = "is in use" if exc.errno == zmq.EADDRINUSE else f"failed: {exc.strerror}"
            raise ConfigError(f"listening on {Address(host, port)} {reason}") from exc

    @property
    def port(self) -> int:
        """The port that is listened on."""
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return int(endpoint.rstrip(b"\0").rpartition(b":")[2])

    def sockets(self) -> tuple[Socket, ...]:
        return (self._socket,)

    def send(self, link: str, payload: bytes) -> SendResult:
        """GONE if the link's connection is gone; it comes back by itself if its server lives."""
        return send_routed(self._socket, bytes.fromhex(link), payload)

    def receive(self) -> list[tuple[str, bytes]]:
        """(link, payload) of what has come, oldest first per link. Never waits."""
        received, malformed_count = receive_routed(self._socket)
        self.malformed_count += malformed_count
        return [(identity.hex(), payload) for identity, payload in received]

    def close(self) -> None:
        """Drops what is still queued. Harmless if closed."""
        self._socket.close()


class PeerDialer:
    """A decode server's links to prefill servers, each named by its address. One thread uses it.

    malformed_count: messages that were not one frame; they were dropped.
    """

    def __init__(self) -> None:
        self.malformed_count = 0
        self._sockets: dict[str, Socket] = {}

    def dial(self, link: str) -> None:
        """Open the link "host:port", "[v6]:port"; returns at once, and keeps trying from then on.

        Raises: ConfigError if that is no address, or if LINK_COUNT_MAX links are open.
        """
        assert link not in self._sockets, f"link {link} is already open"
        address = parse_address(link)
        if len(self._sockets) >= LINK_COUNT_MAX:
            raise ConfigError(
                f"address {link!r}: {LINK_COUNT_MAX} links are open, none can be added"
            )
        # A link that is dialled anew is another one to the listener. ZMQ keeps identities that
        # begin with a zero byte to itself.
        identity = b"d" + secrets.token_bytes(IDENTITY_NBYTES)
        socket = open_peer_dealer(identity, is_ipv6=address.is_ipv6)
        socket.connect(f"tcp://{address}")
        self._sockets[link] = socket

    def hang_up(self, link: str) -> None:
        """Close a link for good, dropping what is still queued. Harmless if not open."""
        socket = self._sockets.pop(link, None)
        if socket is not None:
            socket.close()

    def sockets(self) -> tuple[Socket, ...]:
        return tuple(self._sockets.values())

    def send(self, link: str, payload: bytes) -> SendResult:
        """FULL if the link is not connected just now or its queue is full; GONE if not open."""
        socket = self._sockets.get(link)
        if socket is None:
            return SendResult.GONE
        return send_dealt(socket, payload)

    def receive(self) -> list[tuple[str, bytes]]:
        """(link, payload) of what has come, oldest first per link. Never waits."""
        messages: list[tuple[str, bytes]] = []
        for link, socket in self._sockets.items():
            received, malformed_count = receive_dealt(socket)
            self.malformed_count += malformed_count
            messages.extend((link, payload) for payload in received)
        return messages

    def close(self) -> None:
        """Hang up on everybody. Harmless if closed."""
        for link in list(self._sockets):
            self.hang_up(link)


def local_host_towards(link: str) -> str:
    """The address of this host from which "host:port" is reached: where it can reach us in turn.

    Sends nothing. Raises: ConfigError if that is no address or there is no way to it.
    """
    address = _resolve(parse_address(link))
    family = system_socket.AF_INET6 if address.is_ipv6 else system_socket.AF_INET
    try:
        with system_socket.socket(family, system_socket.SOCK_DGRAM) as probe:
            probe.connect((address.host, address.port))
            return str(probe.getsockname()[0])
    except OSError as exc:
        raise ConfigError(f"address {link!r}: there is no way to it: {exc.strerror}") from exc


def _resolve(address: Address) -> Address:
    """ZMQ binds to numbers only, so a name is looked up here, once, at start; IPv4 is preferred."""
    try:
        found = system_socket.getaddrinfo(
            address.host, address.port, type=system_socket.SOCK_STREAM
        )
    except OSError as exc:
        raise ConfigError(f"host {address.host!r} can't be resolved: {exc.strerror}") from exc
    hosts = [str(entry[4][0]) for entry in found]
    return Address(min(hosts, key=lambda host: ":" in host), address.port)
