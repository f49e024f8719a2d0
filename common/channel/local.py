"""Between the processes of one server: the scheduler's end, and the ends of the other processes.

Payloads are bytes; `common.protocol.codec` gives them meaning. Processes are known by name:
"frontend", "worker-0", "worker-1", ... Messages go over a Unix socket in a private directory that
only processes of this user can reach. Workers on other machines of the server connect over tcp, to
a second socket, and show the server's key there if it has one.
"""

from __future__ import annotations

import stat
from collections.abc import Collection
from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from common.channel.address import parse_address
from common.channel.gate import Gate
from common.channel.keys import Curve
from common.channel.sockets import (
    LOCAL_QUEUE_MAX,
    ChannelClosed,
    SendResult,
    Socket,
    SocketSet,
    lock_dealer,
    open_local_dealer,
    open_local_router,
    receive_dealt,
    receive_routed,
    send_dealt,
    send_routed,
)
from common.errors import ConfigError

_ENDS = zmq.EVENT_DISCONNECTED
_REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
SOCKET_PATH_NBYTES_MAX = 107  # sockaddr_un.sun_path without its final zero


class LocalServer:
    """The scheduler's end. One thread uses it.

    malformed_count: dropped messages: not one frame, or from an unknown name.
    """

    def __init__(
        self,
        path: str,
        address: str = "",
        remote_names: Collection[str] = (),
        curve: Curve | None = None,
        *,
        send_queue_max: int = LOCAL_QUEUE_MAX,
    ) -> None:
        """Bind a socket at `path`, in a private directory, and a second one at `address`,
        "host:port", for the processes of `remote_names` only.

        curve: keys of the second socket. send_queue_max: messages that may wait for each process
        at `path`. Raises: ConfigError naming the path or address that can't be used.
        """
        _check_path(path)
        self.malformed_count = 0
        self._remote_names = frozenset(remote_names)
        self._gate = Gate(curve) if curve is not None and address else None
        self._remote: Socket | None = None
        self._socket = open_local_router(send_queue_max=send_queue_max)
        try:
            self._socket.bind(f"ipc://{path}")
            if address:
                self._remote = open_local_router(self._gate.context if self._gate else None)
                if self._gate is not None:
                    self._gate.guard(self._remote)
                self._remote.bind(f"tcp://{parse_address(address)}")
        except zmq.ZMQError as exc:
            self.close()
            where = f"{path!r}, {address}" if address else repr(path)
            raise ConfigError(f"local socket {where} can't be bound: {exc.strerror}") from exc
        remote = () if self._remote is None else (self._remote,)
        guards = self._gate.sockets() if self._gate is not None else ()
        self._socket_set = SocketSet(self._socket, *remote, *guards)

    def sockets(self) -> tuple[SocketSet, ...]:
        return (self._socket_set,)

    def send(self, name: str, payload: bytes) -> SendResult:
        """GONE if no process of that name is connected, or was and has ended."""
        socket = self._socket
        if self._remote is not None and name in self._remote_names:
            socket = self._remote
        return send_routed(socket, name.encode("ascii"), payload)

    @property
    def is_writable(self) -> bool:
        """Whether a message can be queued for a process that is connected at `path`."""
        events = self._socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        return bool(events & zmq.POLLOUT)

    def receive(self) -> list[tuple[str, bytes]]:
        """(name, payload) of new messages, oldest first per name. Never waits."""
        messages = self._receive_from(self._socket, is_remote=False)
        if self._remote is not None:
            if self._gate is not None:
                self._gate.answer()
            messages += self._receive_from(self._remote, is_remote=True)
        return messages

    def _receive_from(self, socket: Socket, *, is_remote: bool) -> list[tuple[str, bytes]]:
        received, malformed_count = receive_routed(socket)
        self.malformed_count += malformed_count
        messages: list[tuple[str, bytes]] = []
        for identity, payload in received:
            name = identity.decode("ascii") if identity.isascii() else ""
            if name.isprintable() and name and (name in self._remote_names) == is_remote:
                messages.append((name, payload))
            else:
                self.malformed_count += 1
        return messages

    def take_refusals(self) -> list[str]:
        """Refused keys since the last call, with their addresses."""
        return self._gate.take_refusals() if self._gate is not None else []

    def close(self, linger_ms: int = 0) -> None:
        """Queued messages are dropped after `linger_ms`. Harmless if closed."""
        self._socket.close(linger_ms)
        if self._remote is not None:
            self._remote.close(linger_ms)
        if self._gate is not None:
            self._gate.close(linger_ms)


class LocalClient:
    """The end of a worker, or of any other process around the scheduler. One thread uses it.

    It may be opened before the scheduler's end is: messages wait.
    """

    def __init__(self, path: str, name: str, address: str = "", curve: Curve | None = None) -> None:
        """address: of a scheduler on another machine; path is not used then. curve: keys for it.

        Raises: ConfigError naming the path if it can't be used.
        """
        self._monitor: Socket | None = None
        if address:
            self._socket = open_local_dealer(name.encode("ascii"))
            if curve is not None:
                lock_dealer(self._socket, curve, curve.peers.key_of(address))
            # On one machine the supervisor ends all processes. Over tcp this end has to notice
            # a lost scheduler.
            self._monitor = self._socket.get_monitor_socket(_ENDS | _REFUSALS)
            self._socket.connect(f"tcp://{parse_address(address)}")
        else:
            self._socket = connect_local(path, name)
        self._socket_set = SocketSet(self._socket)
        if self._monitor is not None:
            self._socket_set.add(self._monitor)

    def sockets(self) -> tuple[SocketSet, ...]:
        return (self._socket_set,)

    def send(self, payload: bytes) -> SendResult:
        return send_dealt(self._socket, payload)

    def receive(self) -> list[bytes]:
        """New messages, oldest first. Never waits.

        Raises: ChannelClosed if a scheduler on another machine is gone, or has other keys.
        """
        if self._monitor is not None and self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            if event & _REFUSALS:
                raise ChannelClosed(
                    "node 0 has other keys: all machines of a server need the same "
                    "--curve-secret-key-file"
                )
            raise ChannelClosed("node 0 has closed the connection: see the log of its scheduler")
        received, malformed_count = receive_dealt(self._socket)
        assert malformed_count == 0, "our own scheduler sends one frame"
        return received

    def close(self) -> None:
        """Drops queued messages. Harmless if closed."""
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close()
        self._socket.close()


def connect_local(path: str, name: str, *, receive_queue_max: int = LOCAL_QUEUE_MAX) -> Socket:
    """The dealer socket of the process `name`, on its way to the scheduler at `path`."""
    _check_path(path)
    assert name.isascii() and name.isprintable() and name, f"name {name!r}"
    socket = open_local_dealer(name.encode("ascii"), receive_queue_max=receive_queue_max)
    socket.connect(f"ipc://{path}")
    return socket


def _check_path(path: str) -> None:
    """Raises: ConfigError if `path` is too long or others could enter its directory."""
    if not path.startswith("/") or len(path.encode()) > SOCKET_PATH_NBYTES_MAX:
        raise ConfigError(
            f"local socket {path!r}: must be absolute and of at most "
            f"{SOCKET_PATH_NBYTES_MAX} bytes; set a shorter TMPDIR"
        )
    try:
        mode = stat.S_IMODE(Path(path).parent.stat().st_mode)
    except OSError as exc:
        raise ConfigError(f"local socket {path!r}: no such directory: {exc.strerror}") from exc
    if mode & 0o077:
        raise ConfigError(
            f"local socket {path!r}: its directory has mode {mode:04o}, must be private (0700)"
        )
