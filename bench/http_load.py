"""Many clients of one server on one loop, as cheap as clients can be. Their cost is not shown.

Every connection sends the same request again as soon as the answer is whole, until so many have
been answered. Knows HTTP/1.1 as far as uvicorn speaks it, and counts events without reading them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

EVENT_START = b"data: {"  # the closing mark is none
CHUNKED_END = b"\r\n0\r\n\r\n"
HEAD_END = b"\r\n\r\n"
LENGTH = b"content-length:"


def post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + body


@dataclass(slots=True)
class Load:
    """answer_count: to be got in all. tell_read: called with the number of events of one turn of
    the loop. statuses: status line -> how often."""

    request: bytes
    answer_count: int
    tell_read: Callable[[int], None] | None = None
    event_count: int = 0
    asked_count: int = 0
    answered_count: int = 0
    statuses: dict[bytes, int] = field(default_factory=dict)
    sample: bytes = b""
    _untold_count: int = 0

    def count_events(self, count: int) -> None:
        self.event_count += count
        if self.tell_read is None or not count:
            return
        if not self._untold_count:
            asyncio.get_running_loop().call_soon(self._tell)
        self._untold_count += count

    def _tell(self) -> None:
        assert self.tell_read is not None
        count, self._untold_count = self._untold_count, 0
        self.tell_read(count)


class Client(asyncio.Protocol):
    """One connection. is_over: set once there is nothing left to ask."""

    def __init__(self, load: Load) -> None:
        self.is_over = asyncio.get_running_loop().create_future()
        self._load = load
        self._transport: asyncio.Transport | None = None
        self._answer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.is_over.done():
            self.is_over.set_exception(ConnectionError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        seen = self._answer[-len(EVENT_START) + 1 :]
        self._answer += data
        self._load.count_events((seen + data).count(EVENT_START))
        if not self._is_whole():
            return
        status = self._answer[: self._answer.index(b"\r\n")]
        load = self._load
        load.statuses[status] = load.statuses.get(status, 0) + 1
        load.sample = self._answer
        load.answered_count += 1
        self._ask()

    def _is_whole(self) -> bool:
        head_end = self._answer.find(HEAD_END)
        if head_end < 0:
            return False
        head = self._answer[:head_end].lower()
        if LENGTH not in head:
            return self._answer.endswith(CHUNKED_END)
        length = int(head.split(LENGTH)[1].split(b"\r\n")[0])
        return len(self._answer) == head_end + len(HEAD_END) + length

    def _ask(self) -> None:
        assert self._transport is not None
        self._answer = b""
        if self._load.asked_count < self._load.answer_count:
            self._load.asked_count += 1
            self._transport.write(self._load.request)
            return
        self.is_over.set_result(None)
        self._transport.close()


async def run_load(port: int, load: Load, client_count: int) -> float:
    """Seconds that `load` took. Raises: OSError if the server goes away."""
    loop = asyncio.get_running_loop()
    started_at = time.perf_counter()
    pairs = [
        await loop.create_connection(lambda: Client(load), "127.0.0.1", port)
        for _ in range(client_count)
    ]
    await asyncio.gather(*(client.is_over for _, client in pairs))
    return time.perf_counter() - started_at


def body_of(answer: bytes) -> bytes:
    """What an answer carries, without head and chunk sizes."""
    head, _, rest = answer.partition(HEAD_END)
    if LENGTH in head.lower():
        return rest
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        count = int(size, 16)
        if not count:
            return body
        body += rest[:count]
        rest = rest[count + 2 :]
