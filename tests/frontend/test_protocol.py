"""What leaves the HTTP server for a client, and in how many writes."""

from __future__ import annotations

import asyncio

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from common.clock import ManualClock
from common.frontend.http.protocol import make_protocol

HEAD_NBYTES_MAX = 1 << 16


class Writes(asyncio.Transport):
    """Takes what a protocol writes, write for write."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if data:
            self.taken.append(bytes(data))

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def resume_reading(self) -> None:
        pass


async def two_events(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for event in (b"one", b"two"):
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def writes_of(app: ASGIApp, *requests: bytes) -> list[bytes]:
    async def run() -> list[bytes]:
        config = uvicorn.Config(app, log_config=None, lifespan="off")
        config.load()
        protocol = make_protocol(ManualClock(), HEAD_NBYTES_MAX)(config, ServerState(), {})
        transport = Writes()
        protocol.connection_made(transport)
        for request in requests:
            protocol.data_received(request)
            await asyncio.gather(*protocol.tasks)
        protocol.connection_lost(None)
        return transport.taken

    return asyncio.run(run())


def request(method: str = "GET") -> bytes:
    return f"{method} / HTTP/1.1\r\nHost: a\r\n\r\n".encode()


def test_an_answer_leaves_in_one_write_again_and_again() -> None:
    first, second = writes_of(Response(b"whole"), request(), request())
    assert first == second
    assert first.startswith(b"HTTP/1.1 200 OK\r\n") and first.endswith(b"\r\n\r\nwhole")


def test_an_answer_without_a_body_leaves_too() -> None:
    (head,) = writes_of(Response(b"whole"), request("HEAD"))
    assert head.endswith(b"\r\n\r\n") and b"content-length: 5" in head
    (empty,) = writes_of(Response(status_code=204), request())
    assert empty.startswith(b"HTTP/1.1 204 ")


def test_the_first_event_brings_the_head_and_each_other_is_written_at_once() -> None:
    first, second, end = writes_of(two_events, request())
    assert first.startswith(b"HTTP/1.1 200 OK\r\n") and first.endswith(b"\r\n\r\n3\r\none\r\n")
    assert (second, end) == (b"3\r\ntwo\r\n", b"0\r\n\r\n")


def test_what_is_no_request_is_answered_in_one_write() -> None:
    (answer,) = writes_of(two_events, b"no request at all\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ") and b"Invalid HTTP request received." in answer
