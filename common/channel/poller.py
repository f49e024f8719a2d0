"""Waits for channels and plain file descriptors together: the one blocking call of a loop."""

from __future__ import annotations

import math

import zmq

from common.channel.sockets import Endpoint


class Poller:
    """What a loop waits for. A channel's sockets may come and go while it is registered."""

    def __init__(self) -> None:
        self._endpoints: list[Endpoint] = []
        self._fds: list[int] = []

    def register(self, source: Endpoint | int) -> None:
        """Wait for a channel to have messages, or for a file descriptor to be readable."""
        if isinstance(source, int):
            assert source >= 0 and source not in self._fds, f"fd {source}"
            self._fds.append(source)
        else:
            assert source not in self._endpoints
            self._endpoints.append(source)

    def unregister(self, source: Endpoint | int) -> None:
        """Before the file descriptor or channel is closed."""
        if isinstance(source, int):
            self._fds.remove(source)
        else:
            self._endpoints.remove(source)

    def poll(self, timeout_s: float | None) -> list[Endpoint | int]:
        """Wait until something can be read or the time is over; returns what can be read.

        timeout_s: None waits for ever; 0 only looks. Rounded up to milliseconds, so that a loop
        that waits for a deadline does not spin just before it. A file descriptor whose other end
        hung up counts as readable.
        """
        poller = zmq.Poller()
        owners: dict[object, Endpoint] = {}
        for endpoint in self._endpoints:
            for socket in endpoint.sockets():
                poller.register(socket, zmq.POLLIN)
                owners[socket] = endpoint
        for fd in self._fds:
            poller.register(fd, zmq.POLLIN)
        timeout_ms = None if timeout_s is None else math.ceil(max(0.0, timeout_s) * 1000)
        ready: list[Endpoint | int] = []
        for source, _ in poller.poll(timeout_ms):
            found = source if isinstance(source, int) else owners[source]
            if found not in ready:
                ready.append(found)
        return ready
