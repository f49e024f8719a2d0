"""The frontend's end of the local channel, for one asyncio loop. Never blocks it."""

from __future__ import annotations

import asyncio

import zmq

from common.channel.local import connect_local
from common.channel.sockets import FRONTEND_QUEUE_MAX, ChannelClosed, SendResult, send_dealt

# A reader that always finds a message lets the rest of the loop run after this many. Each may
# have the output of a whole step, which takes milliseconds to handle.
MESSAGES_PER_TURN = 4


class AsyncLocalClient:
    """Like `LocalClient`, with a `receive` that is awaited. Made and used on one running loop.

    ZMQ's descriptor reports only that *some* event happened since the last operation on the socket.
    So every operation, sends included, wakes the reader, which then checks the socket.
    """

    def __init__(self, path: str, name: str) -> None:
        """Raises: ConfigError naming the path if it can't be used."""
        self._socket = connect_local(path, name, receive_queue_max=FRONTEND_QUEUE_MAX)
        fd = self._socket.getsockopt(zmq.FD)
        assert isinstance(fd, int)
        self._fd = fd
        self._changed = asyncio.Event()
        self._is_closed = False
        self._turn_count = 0
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._look)

    def send(self, payload: bytes) -> SendResult:
        """Raises: ChannelClosed after `close`."""
        if self._is_closed:
            raise ChannelClosed("the channel to the scheduler is closed")
        result = send_dealt(self._socket, payload)
        self._changed.set()
        return result

    async def receive(self) -> bytes:
        """The next message; one task at a time waits. Raises: ChannelClosed after `close`."""
        self._turn_count += 1
        if self._turn_count % MESSAGES_PER_TURN == 0:
            await asyncio.sleep(0)
        while not self._is_closed:
            self._changed.clear()
            try:
                return self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                await self._changed.wait()
        raise ChannelClosed("the channel to the scheduler is closed")

    def close(self) -> None:
        """Wakes the reader; drops what is still queued. Harmless if closed."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._fd)
        self._socket.close()
        self._changed.set()

    def _look(self) -> None:
        """The descriptor is readable: let ZMQ handle its events, which resets it."""
        if self._socket.getsockopt(zmq.EVENTS):
            self._changed.set()
