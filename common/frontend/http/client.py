"""HTTP/1.1 to other servers of the fleet: one request per connection, its answer read as it comes.

h11 over asyncio's streams, which uvicorn brings anyway: a relay wants to close its connection at
any moment and to see the other end close, and needs nothing else. Knows nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import h11
import msgspec

from common.errors import BatonError
from common.flags.values import server_url

READ_NBYTES = 1 << 16
CONNECT_TIMEOUT_S = 3.0
# Of an answer that is read as a whole, and of one line of a stream, which may have the
# log-probabilities of a prompt in it.
DOCUMENT_NBYTES_MAX = 16 << 20
LINE_NBYTES_MAX = 128 << 20
T = TypeVar("T")


class HttpFailed(BatonError):
    """Another server did not answer, or not in HTTP. It may be tried again, or another one."""


@dataclass(frozen=True, slots=True)
class ServerUrl:
    """Where a server's HTTP API is. is_tls: by https."""

    host: str
    port: int
    is_tls: bool = False

    @property
    def address(self) -> str:
        """As in a Host header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.is_tls else 'http'}://{self.address}"


def parse_url(text: str) -> ServerUrl:
    """As `server_url` takes it. Raises: ValueError("must be ...")."""
    parts = urlsplit(server_url(text))
    assert parts.hostname is not None and parts.port is not None, "checked"
    return ServerUrl(parts.hostname, parts.port, parts.scheme == "https")


@dataclass(frozen=True, slots=True)
class Request:
    """key: shown as a bearer key, "" for none. headers: beside those that every request has."""

    method: str
    path: str
    body: bytes = b""
    key: str = ""
    headers: tuple[tuple[str, str], ...] = ()

    def event(self, address: str) -> h11.Request:
        headers = [("Host", address), ("Connection", "close"), *self.headers]
        if self.key:
            headers.append(("Authorization", f"Bearer {self.key}"))
        if self.body:
            headers.append(("Content-Type", "application/json"))
            headers.append(("Content-Length", str(len(self.body))))
        return h11.Request(method=self.method, target=self.path, headers=headers)


class Answer:
    """An answer whose head has come. silence_s: how long the other server may send nothing."""

    def __init__(
        self,
        status: int,
        connection: h11.Connection,
        reader: asyncio.StreamReader,
        silence_s: float,
    ) -> None:
        self.status = status
        self._connection = connection
        self._reader = reader
        self._silence_s = silence_s

    async def chunks(self) -> AsyncIterator[bytes]:
        """Raises: HttpFailed if it breaks off before its end."""
        while True:
            event = await _next_event(self._connection, self._reader, self._silence_s)
            if isinstance(event, h11.EndOfMessage):
                return
            if isinstance(event, h11.Data):
                yield bytes(event.data)

    async def document(self, nbytes_max: int = DOCUMENT_NBYTES_MAX) -> bytes:
        """All of it. Raises: HttpFailed."""
        found = bytearray()
        async for chunk in self.chunks():
            found += chunk
            if len(found) > nbytes_max:
                raise HttpFailed(f"answered more than {nbytes_max} bytes")
        return bytes(found)

    async def lines(self) -> AsyncIterator[bytes]:
        """Whole lines, without their ends. Raises: HttpFailed."""
        rest = bytearray()
        async for chunk in self.chunks():
            rest += chunk
            if b"\n" in chunk:
                *lines, rest = rest.split(b"\n")
                for line in lines:
                    yield bytes(line)
            elif len(rest) > LINE_NBYTES_MAX:
                raise HttpFailed(f"answered a line of more than {LINE_NBYTES_MAX} bytes")


class _Error(msgspec.Struct):
    message: str


class _ErrorAnswer(msgspec.Struct):
    error: _Error


_ERROR_DECODER = msgspec.json.Decoder(_ErrorAnswer)


def decode_answer(decoder: msgspec.json.Decoder[T], document: bytes) -> T:
    """What a server answered as JSON. Raises: HttpFailed if it is not what the decoder takes."""
    try:
        return decoder.decode(document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise HttpFailed(f"it says what can't be read: {exc}") from exc


def error_message(document: bytes) -> str:
    """What an error says that a server answered; "" if it can't be read."""
    try:
        return decode_answer(_ERROR_DECODER, document).error.message
    except HttpFailed:
        return ""


@asynccontextmanager
async def ask(url: ServerUrl, request: Request, silence_s: float) -> AsyncIterator[Answer]:
    """Send a request and wait for the head of its answer; leaving the block closes the connection.

    silence_s: how long the other server may send nothing. Raises: HttpFailed, also from within the
        block while the answer is read.
    """
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(
                url.host, url.port, ssl=ssl.create_default_context() if url.is_tls else None
            )
    except (OSError, TimeoutError, UnicodeError) as exc:  # the last: no name can be spelled so
        raise HttpFailed(f"{url} can't be reached: {_said(exc)}") from exc
    try:
        connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=READ_NBYTES)
        yield await _begin(url, request, connection, reader, writer, silence_s)
    finally:
        writer.close()
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await writer.wait_closed()


async def _begin(
    url: ServerUrl,
    request: Request,
    connection: h11.Connection,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    silence_s: float,
) -> Answer:
    events: list[h11.Event] = [request.event(url.address)]
    if request.body:
        events.append(h11.Data(data=request.body))
    try:
        async with asyncio.timeout(silence_s):
            for event in (*events, h11.EndOfMessage()):
                writer.write(connection.send(event) or b"")
                await writer.drain()
    except (OSError, TimeoutError) as exc:
        # It may have answered without reading all of it.
        if not reader.at_eof() and isinstance(exc, TimeoutError):
            raise HttpFailed(f"{url} does not read: {_said(exc)}") from exc
    while True:
        head = await _next_event(connection, reader, silence_s)
        if isinstance(head, h11.Response):
            return Answer(head.status_code, connection, reader, silence_s)


async def _next_event(
    connection: h11.Connection, reader: asyncio.StreamReader, silence_s: float
) -> h11.Event:
    """Raises: HttpFailed."""
    try:
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                async with asyncio.timeout(silence_s):
                    connection.receive_data(await reader.read(READ_NBYTES))
                continue
            if isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
                raise HttpFailed("the connection was closed before the answer came")
            assert not isinstance(event, type), "h11 has no other word that is no event"
            return event
    except TimeoutError as exc:
        raise HttpFailed(f"nothing came for {silence_s:g} s") from exc
    except (OSError, h11.RemoteProtocolError) as exc:
        raise HttpFailed(f"the answer broke off: {_said(exc)}") from exc


def _said(exc: Exception) -> str:
    return str(exc) or type(exc).__name__
