"""Waits for channels and plain file descriptors together: the one blocking call of a loop."""

from __future__ import annotations

import math

import zmq

from common.channel.sockets import Endpoint, Socket, SocketSet


class Poller:
    """The sockets and descriptors that a loop waits for. A registered channel may open and close
    sockets; only then are sockets registered with ZMQ again."""

    def __init__(self) -> None:
        self._endpoints: list[Endpoint] = []
        self._writers: list[Endpoint] = []
        self._fds: list[int] = []
        self._poller = zmq.Poller()
        self._owners: dict[Socket, tuple[Endpoint, SocketSet]] = {}
        self._versions: list[tuple[SocketSet, int]] = []
        self._is_changed = False

    def register(self, source: Endpoint | int) -> None:
        """Wait for a channel to have messages, or for a file descriptor to be readable."""
        if isinstance(source, int):
            assert source >= 0 and source not in self._fds, f"fd {source}"
            self._fds.append(source)
        else:
            assert source not in self._endpoints
            self._endpoints.append(source)
        self._is_changed = True

    def unregister(self, source: Endpoint | int) -> None:
        """Before the file descriptor or channel is closed."""
        if isinstance(source, int):
            self._fds.remove(source)
        else:
            self.wait_writable(source, waits=False)
            self._endpoints.remove(source)
        self._is_changed = True

    def wait_writable(self, endpoint: Endpoint, *, waits: bool) -> None:
        """Whether to wait as well until a registered channel can be sent to."""
        assert endpoint in self._endpoints
        if waits == (endpoint in self._writers):
            return
        if waits:
            self._writers.append(endpoint)
        else:
            self._writers.remove(endpoint)
        self._is_changed = True

    def poll(self, timeout_s: float | None) -> list[Endpoint | int]:
        """Wait until a source is readable or the time is over. Returns the readable sources, and
        the channels of `wait_writable` that can be sent to. Marks the readable sockets in their
        `SocketSet`.

        timeout_s: None waits for ever; 0 only looks. Rounded up to milliseconds, so that a loop
        that waits for a deadline does not spin just before it. A file descriptor whose other end
        hung up counts as readable.
        """
        self._register_changes()
        timeout_ms = None if timeout_s is None else math.ceil(max(0.0, timeout_s) * 1000)
        ready: list[Endpoint | int] = []
        for source, events in self._poller.poll(timeout_ms):
            found: Endpoint | int
            if isinstance(source, int):
                found = source
            else:
                found, sockets = self._owners[source]
                if events & zmq.POLLIN:
                    sockets.mark(source)
            if found not in ready:
                ready.append(found)
        return ready

    def _register_changes(self) -> None:
        """Build a new ZMQ poller if a socket, a descriptor or an endpoint has come or gone."""
        versions = [
            (sockets, sockets.version)
            for endpoint in self._endpoints
            for sockets in endpoint.sockets()
        ]
        if not self._is_changed and versions == self._versions:
            return
        self._versions, self._is_changed = versions, False
        self._poller = zmq.Poller()
        self._owners = {}
        for endpoint in self._endpoints:
            wanted = zmq.POLLIN | zmq.POLLOUT if endpoint in self._writers else zmq.POLLIN
            for sockets in endpoint.sockets():
                sockets.is_polled = True
                for socket in sockets:
                    self._owners[socket] = (endpoint, sockets)
                    self._poller.register(socket, wanted)
        for fd in self._fds:
            self._poller.register(fd, zmq.POLLIN)
