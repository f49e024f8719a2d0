"""What leaves the HTTP server for a client, and in how many writes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import h11
import pytest
import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from common.clock import ManualClock
from common.frontend.http.protocol import ServedConnection, make_protocol

HEAD_NBYTES_MAX = 1 << 16
Headers = Sequence[tuple[bytes, bytes]]


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


def sent(connection: h11.Connection, version: bytes, headers: Headers, parts: list[bytes]) -> bytes:
    """All bytes of an answer to a request of that version."""
    connection.receive_data(b"GET / HTTP/%s\r\nHost: a\r\n\r\n" % version)
    assert isinstance(connection.next_event(), h11.Request)
    assert isinstance(connection.next_event(), h11.EndOfMessage)
    answer = h11.Response(status_code=200, headers=headers, reason=b"OK")
    events = [answer, *(h11.Data(data=part) for part in parts), h11.EndOfMessage()]
    return b"".join(connection.send(one) or b"" for one in events)


@pytest.mark.parametrize("parts", [[], [b"a"], [b"", b"ab", b"", b"c"], [b"a", b"b", b"x" * 70000]])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("has_length", [True, False])
def test_all_bytes_and_states_are_those_of_h11(
    parts: list[bytes], version: bytes, has_length: bool
) -> None:
    length = str(sum(map(len, parts))).encode()
    headers = [(b"content-length", length)] if has_length else []
    own, plain = ServedConnection(HEAD_NBYTES_MAX), h11.Connection(h11.SERVER)
    assert sent(own, version, headers, parts) == sent(plain, version, headers, parts)
    assert own.states == plain.states


def test_a_body_that_is_longer_than_said_is_a_mistake() -> None:
    with pytest.raises(h11.LocalProtocolError, match="Too much data"):
        sent(ServedConnection(HEAD_NBYTES_MAX), b"1.1", [(b"content-length", b"2")], [b"a", b"bc"])
