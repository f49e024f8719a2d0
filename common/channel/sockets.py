"""Options of every ZMQ socket of a server, and the results of a send.

Knows nothing of messages: payloads are bytes. Only `Poller.poll` blocks in this package. A send
that can't be queued at once returns so. Order is kept per connection. Messages that were queued
when a connection broke are lost; deadlines and heartbeats above notice it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import zmq

from common.channel.keys import Curve
from common.errors import BatonError
from common.protocol.codec import LOCAL_MESSAGE_NBYTES_MAX, PEER_MESSAGE_NBYTES_MAX

# Messages queued in one direction of one connection. A burst of requests fits, and so does a burst
# of messages to a worker for many transfers. Between peers, open transfers bound the messages.
LOCAL_QUEUE_MAX = 16384
# Each message to a frontend has the output of a whole step. Further output waits at the scheduler,
# joined. A few messages keep a frontend busy.
FRONTEND_QUEUE_MAX = 16
PEER_QUEUE_MAX = 4096
# Messages of one connection that a listener holds; TCP holds back the rest, at the dialler.
PEER_RECEIVE_QUEUE_MAX = 256
# Messages taken from a socket at a time, so that a busy sender can't hold up the rest of a loop.
RECEIVE_COUNT_MAX = 256
# A dialler tries again after 0.1 s, then doubles the pause up to 2 s: within one beat of the
# schedulers at first, and never a burden for a server that stays away.
RECONNECT_MS = 100
RECONNECT_MS_MAX = 2000
# Processes of one server try at a steady pace: a scheduler that starts again is waited for.
LOCAL_RECONNECT_MS = 50
# A connection whose other machine vanished is dropped after this, and made anew.
PEER_PING_MS = 2000
PEER_PING_TIMEOUT_MS = 10000
PEER_HANDSHAKE_TIMEOUT_MS = 5000
PEER_BACKLOG = 256  # connections that may wait to be accepted

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


class SendResult(Enum):
    """SENT: queued. FULL: not queued, try later. GONE: not queued, its receiver is not
    connected."""

    SENT = "sent"
    FULL = "full"
    GONE = "gone"


class ChannelClosed(BatonError):
    """This end of the channel was closed."""


class SocketSet:
    """Open sockets of a channel, and which of them can be read.

    A `Poller` that waits for them marks the readable ones; the channel takes these and tries no
    others. Sockets that no poller has waited for yet all count as readable.
    version: changes with every socket that comes or goes.
    """

    def __init__(self, *sockets: Socket) -> None:
        self._sockets = dict.fromkeys(sockets)
        self._readable: dict[Socket, None] = {}
        self.is_polled = False
        self.version = 0

    def __iter__(self) -> Iterator[Socket]:
        return iter(self._sockets)

    def __len__(self) -> int:
        return len(self._sockets)

    def add(self, *sockets: Socket) -> None:
        self._sockets.update(dict.fromkeys(sockets))
        self.version += 1

    def remove(self, *sockets: Socket) -> None:
        """Before they are closed."""
        for socket in sockets:
            del self._sockets[socket]
            self._readable.pop(socket, None)
        self.version += 1

    def mark(self, socket: Socket) -> None:
        """It can be read."""
        self._readable[socket] = None

    def take_readable(self) -> list[Socket]:
        """Sockets that were found readable since the last call, each once."""
        if not self.is_polled:
            return list(self._sockets)
        readable, self._readable = self._readable, {}
        return list(readable)


class Endpoint(Protocol):
    """Something with sockets that a `Poller` can wait for."""

    def sockets(self) -> tuple[SocketSet, ...]: ...


def open_local_router(
    context: Context | None = None, *, send_queue_max: int = LOCAL_QUEUE_MAX
) -> Socket:
    """The scheduler's socket towards the processes of its own server, in a context of its own if
    given. send_queue_max: messages that may wait for each of them."""
    socket = _open(zmq.ROUTER, LOCAL_QUEUE_MAX, LOCAL_MESSAGE_NBYTES_MAX, context)
    socket.setsockopt(zmq.SNDHWM, send_queue_max)
    _make_strict_router(socket)
    return socket


def open_local_dealer(identity: bytes, *, receive_queue_max: int = LOCAL_QUEUE_MAX) -> Socket:
    """A process's socket towards its scheduler. Queues while the scheduler is still starting."""
    socket = _open(zmq.DEALER, LOCAL_QUEUE_MAX, LOCAL_MESSAGE_NBYTES_MAX)
    socket.setsockopt(zmq.RECONNECT_IVL, LOCAL_RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 0)
    socket.setsockopt(zmq.RCVHWM, receive_queue_max)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    return socket


def open_peer_router(*, is_ipv6: bool, context: Context | None = None) -> Socket:
    """The socket that servers of other machines connect to, in a context of its own if given."""
    socket = _open(zmq.ROUTER, PEER_QUEUE_MAX, PEER_MESSAGE_NBYTES_MAX, context)
    socket.setsockopt(zmq.RCVHWM, PEER_RECEIVE_QUEUE_MAX)
    _make_strict_router(socket)
    socket.setsockopt(zmq.BACKLOG, PEER_BACKLOG)
    _harden_peer(socket, is_ipv6)
    return socket


def open_peer_dealer(identity: bytes, *, is_ipv6: bool) -> Socket:
    """A socket that dials one server of another machine, again and again if it must."""
    socket = _open(zmq.DEALER, PEER_QUEUE_MAX, PEER_MESSAGE_NBYTES_MAX)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    # Queue only for a connection that is there: a server that comes back after a minute must not
    # be met with a minute of stale messages.
    socket.setsockopt(zmq.IMMEDIATE, 1)
    _harden_peer(socket, is_ipv6)
    return socket


def _open(kind: int, queue_max: int, nbytes_max: int, context: Context | None = None) -> Socket:
    """One context per process serves all sockets but those that a `Gate` guards."""
    socket: Socket = (context or zmq.Context.instance()).socket(kind)
    socket.setsockopt(zmq.LINGER, 0)  # closing never waits for a peer
    socket.setsockopt(zmq.SNDHWM, queue_max)
    socket.setsockopt(zmq.RCVHWM, queue_max)
    socket.setsockopt(zmq.MAXMSGSIZE, nbytes_max)  # a larger one ends its connection
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
    return socket


def lock_dealer(socket: Socket, curve: Curve, server_key: bytes) -> None:
    """Talk only to the owner of `server_key`, and show our own key. Before it connects."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, curve.pair.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, curve.pair.secret)


def _make_strict_router(socket: Socket) -> None:
    """Report sends to names that are not connected. A peer that reconnects keeps its name."""
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)


def _harden_peer(socket: Socket, is_ipv6: bool) -> None:
    socket.setsockopt(zmq.IPV6, int(is_ipv6))
    socket.setsockopt(zmq.HEARTBEAT_IVL, PEER_PING_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, PEER_PING_TIMEOUT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, PEER_HANDSHAKE_TIMEOUT_MS)


def send_routed(socket: Socket, identity: bytes, payload: bytes) -> SendResult:
    """Send through a router socket to one connected peer."""
    try:
        socket.send_multipart([identity, payload], zmq.NOBLOCK)
    except zmq.Again:
        return SendResult.FULL
    except zmq.ZMQError as exc:
        if exc.errno != zmq.EHOSTUNREACH:
            raise
        return SendResult.GONE
    return SendResult.SENT


def receive_routed(socket: Socket) -> tuple[list[tuple[bytes, bytes]], int]:
    """(identity, payload) of waiting messages, at most RECEIVE_COUNT_MAX, and a malformed count.

    A well-formed message is exactly one frame behind the identity that the socket puts in front.
    """
    received: list[tuple[bytes, bytes]] = []
    malformed_count = 0
    for _ in range(RECEIVE_COUNT_MAX):
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            break
        if len(frames) == 2:
            received.append((frames[0], frames[1]))
        else:
            malformed_count += 1
    return received, malformed_count


@dataclass(frozen=True, slots=True)
class PeerFrame:
    """A message of another host. user: the key of its connection, "" without keys. host: where the
    connection comes from."""

    identity: bytes
    user: str
    host: str
    payload: bytes


def receive_peers(socket: Socket) -> tuple[list[PeerFrame], int]:
    """As `receive_routed`, with what is known of each connection."""
    received: list[PeerFrame] = []
    malformed_count = 0
    for _ in range(RECEIVE_COUNT_MAX):
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            break
        if len(frames) != 2:
            malformed_count += 1
            continue
        identity, payload = frames
        user, host = (_metadata(payload, name) for name in ("User-Id", "Peer-Address"))
        received.append(PeerFrame(identity.bytes, user, host, payload.bytes))
    return received, malformed_count


def _metadata(frame: zmq.Frame, name: str) -> str:
    """What ZMQ says of the connection of a frame, "" if it says nothing."""
    try:
        return str(frame.get(name))
    except zmq.ZMQError:
        return ""


def send_dealt(socket: Socket, payload: bytes) -> SendResult:
    """Send through a dealer socket. FULL also while there is no connection to queue for."""
    try:
        socket.send(payload, zmq.NOBLOCK)
    except zmq.Again:
        return SendResult.FULL
    return SendResult.SENT


def receive_dealt(socket: Socket) -> tuple[list[bytes], int]:
    """Payloads that wait, at most RECEIVE_COUNT_MAX, and how many messages were malformed."""
    received: list[bytes] = []
    malformed_count = 0
    for _ in range(RECEIVE_COUNT_MAX):
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            break
        if len(frames) == 1:
            received.append(frames[0])
        else:
            malformed_count += 1
    return received, malformed_count
