"""Between the processes of one server: the scheduler's end and the ends of those around it.

Payloads are bytes; `common.protocol.codec` gives them meaning. Processes are known by name:
"frontend", "worker-0", "worker-1", ... A Unix socket in a private directory carries it all, so
whoever can reach it already is this user. Workers on other machines of the same server come over
tcp instead; like the port where their ranks meet, that one must be reachable by them alone.
"""

from __future__ import annotations

import stat
from pathlib import Path

import zmq

from common.channel.address import parse_address
from common.channel.sockets import (
    ChannelClosed,
    SendResult,
    Socket,
    open_local_dealer,
    open_local_router,
    receive_dealt,
    receive_routed,
    send_dealt,
    send_routed,
)
from common.errors import ConfigError

SOCKET_PATH_NBYTES_MAX = 107  # sockaddr_un.sun_path without its final zero


class LocalServer:
    """The scheduler's end. One thread uses it.

    malformed_count: messages that were not one frame from a readable name; they were dropped.
    """

    def __init__(self, path: str, address: str = "") -> None:
        """Bind a socket at `path`, whose directory nobody else may enter, and for workers of other
        machines at `address`, "host:port", if there are any.

        Raises: ConfigError naming the path or address if it can't be used.
        """
        _check_path(path)
        self.malformed_count = 0
        self._socket = open_local_router()
        try:
            self._socket.bind(f"ipc://{path}")
            if address:
                self._socket.bind(f"tcp://{parse_address(address)}")
        except zmq.ZMQError as exc:
            self._socket.close()
            where = f"{path!r}, {address}" if address else repr(path)
            raise ConfigError(f"local socket {where} can't be bound: {exc.strerror}") from exc

    def sockets(self) -> tuple[Socket, ...]:
        return (self._socket,)

    def send(self, name: str, payload: bytes) -> SendResult:
        """GONE if no process of that name is connected, or was and has ended."""
        return send_routed(self._socket, name.encode("ascii"), payload)

    def receive(self) -> list[tuple[str, bytes]]:
        """(name, payload) of what has come, oldest first per name. Never waits."""
        received, malformed_count = receive_routed(self._socket)
        self.malformed_count += malformed_count
        messages: list[tuple[str, bytes]] = []
        for identity, payload in received:
            if identity.isascii() and identity.decode("ascii").isprintable():
                messages.append((identity.decode("ascii"), payload))
            else:
                self.malformed_count += 1
        return messages

    def close(self, linger_ms: int = 0) -> None:
        """What is still queued is dropped after `linger_ms`. Harmless if closed."""
        self._socket.close(linger_ms)


class LocalClient:
    """The end of a worker, or of any other process around the scheduler. One thread uses it.

    It may be opened before the scheduler's end is: messages wait.
    """

    def __init__(self, path: str, name: str, address: str = "") -> None:
        """address: of a scheduler on another machine; path is not used then.

        Raises: ConfigError naming the path if it can't be used.
        """
        self._monitor: Socket | None = None
        if address:
            self._socket = open_local_dealer(name.encode("ascii"))
            # On one machine the supervisor ends everybody; over tcp a lost scheduler has to be
            # noticed here.
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._socket.connect(f"tcp://{parse_address(address)}")
        else:
            self._socket = connect_local(path, name)

    def sockets(self) -> tuple[Socket, ...]:
        return (self._socket,) if self._monitor is None else (self._socket, self._monitor)

    def send(self, payload: bytes) -> SendResult:
        return send_dealt(self._socket, payload)

    def receive(self) -> list[bytes]:
        """What has come, oldest first. Never waits.

        Raises: ChannelClosed if a scheduler on another machine is gone.
        """
        if self._monitor is not None and self._monitor.poll(0):
            raise ChannelClosed("the scheduler's machine has closed the connection")
        received, malformed_count = receive_dealt(self._socket)
        assert malformed_count == 0, "our own scheduler sends one frame"
        return received

    def close(self) -> None:
        """Drops what is still queued. Harmless if closed."""
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close()
        self._socket.close()


def connect_local(path: str, name: str) -> Socket:
    """The dealer socket of the process `name`, on its way to the scheduler at `path`."""
    _check_path(path)
    assert name.isascii() and name.isprintable() and name, f"name {name!r}"
    socket = open_local_dealer(name.encode("ascii"))
    socket.connect(f"ipc://{path}")
    return socket


def _check_path(path: str) -> None:
    """Raises: ConfigError if `path` is too long or others could enter its directory."""
    if not path.startswith("/") or len(path.encode()) > SOCKET_PATH_NBYTES_MAX:
        raise ConfigError(
            f"local socket {path!r}: must be absolute and of at most {SOCKET_PATH_NBYTES_MAX} bytes"
        )
    try:
        mode = stat.S_IMODE(Path(path).parent.stat().st_mode)
    except OSError as exc:
        raise ConfigError(f"local socket {path!r}: no such directory: {exc.strerror}") from exc
    if mode & 0o077:
        raise ConfigError(
            f"local socket {path!r}: its directory has mode {mode:04o}, must be private (0700)"
        )
