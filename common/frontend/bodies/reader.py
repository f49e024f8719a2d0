"""From an HTTP request to a checked call: reads the body, names the request.

Bodies are parsed, checked and tokenised on other threads unless they are small, so that streams go
on; large ones one after another, and only so many bytes of them are held at a time.
"""

from __future__ import annotations

import asyncio
import ctypes
import re
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from common.errors import RequestError
from common.frontend.bodies.fields import JsonObject, parse_object
from common.frontend.bodies.long_texts import first_long_text
from common.frontend.http.headers import headers_of
from common.frontend.requests.spans import trace_parent_of

T = TypeVar("T")

# Tokenising runs at a few MB/s: below this size it costs less than a millisecond or two.
SMALL_BODY_NBYTES = 4096
# A body of this size or more waits for its turn, and for room.
LARGE_BODY_NBYTES = 1 << 20
# So many bodies of the largest size that is read (`--max-body-bytes`) are held at a time.
HELD_BODY_COUNT = 4
# How long a large body waits for room, and how long it may take to arrive once it has some: a
# client that sends one byte a second must not keep the others out.
ROOM_TIMEOUT_S = 30.0
ARRIVAL_TIMEOUT_S = 60.0
GONE = "the client went away while it sent the body"
M_MMAP_THRESHOLD = -3  # malloc.h
NAME_PATTERN = re.compile(r"[!-~]{1,128}")  # printable, short enough to show in every reply


class BodyReader:
    """Owner of the room that large bodies share.

    held_nbytes: bytes of them that have room now, arrived or not.
    """

    def __init__(
        self, body_nbytes_max: int, text_length_max: Callable[[], int | None] = lambda: None
    ) -> None:
        """body_nbytes_max: of one body, which the application refuses more of. text_length_max:
        characters that a prompt can have, as far as is known now."""
        self._body_nbytes_max = body_nbytes_max
        self._text_length_max = text_length_max
        self._held_nbytes_max = HELD_BODY_COUNT * body_nbytes_max
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._turns = ThreadPoolExecutor(1, thread_name_prefix="large-bodies")
        self.held_nbytes = 0

    async def read(self, request: Request, check: Callable[[JsonObject], T]) -> T:
        """The result of `check` on the body.

        Raises: RequestError if it is no JSON object, or from `check`; 503 if there is no room for a
            large body, 408 if one does not arrive.
        """
        try:
            return await self._read(request, check)
        except RequestError as error:
            # The frames behind it hold the body and its values, for as long as it lives.
            error.__context__ = error.__cause__ = None
            raise error.with_traceback(None) from None

    async def _read(self, request: Request, check: Callable[[JsonObject], T]) -> T:
        # `SizeLimits` has checked it, and the HTTP server takes no byte more.
        said_nbytes = int(headers_of(request.scope).get("content-length", "-1"))
        if 0 <= said_nbytes < SMALL_BODY_NBYTES:
            return check(parse_object(await _receive_small(request)))
        async with AsyncExitStack() as room:
            body = await self._receive(request, said_nbytes, room)
            if len(body) < SMALL_BODY_NBYTES:
                return check(parse_object(body))
            if len(body) < LARGE_BODY_NBYTES:
                return await asyncio.to_thread(lambda: check(parse_object(body)))

            def check_large() -> T:
                try:
                    self._check_texts(body)
                    return check(parse_object(body))
                finally:
                    _give_memory_back()

            return await asyncio.get_running_loop().run_in_executor(self._turns, check_large)

    def _check_texts(self, body: bytes | bytearray) -> None:
        """Raises: RequestError if a text is longer than any prompt, before it is parsed."""
        length_max = self._text_length_max()
        length = first_long_text(body, length_max) if length_max is not None else 0
        if length:
            raise RequestError(
                f"a text of the body has at least {length} characters; prompts have at most "
                f"{length_max}, whatever their tokens"
            )

    async def _receive(
        self, request: Request, nbytes: int, room: AsyncExitStack
    ) -> bytes | bytearray:
        """The whole body, which the request does not keep, unlike with `request.body()`. nbytes: as
        far as said. room: keeps the place of a large one."""
        body = bytearray()
        received_nbytes, is_large = 0, False
        try:
            async with asyncio.timeout(None) as arrival:
                if nbytes >= LARGE_BODY_NBYTES:
                    is_large = await self._begin_large(nbytes, room, arrival)
                async for chunk in request.stream():
                    body += chunk  # grows without being copied: the C library remaps large blocks
                    received_nbytes += len(chunk)
                    if received_nbytes >= LARGE_BODY_NBYTES and not is_large:
                        # Its length was not said.
                        is_large = await self._begin_large(self._body_nbytes_max, room, arrival)
        except ClientDisconnect as exc:
            raise RequestError(GONE) from exc
        except TimeoutError as exc:
            text = f"the body did not arrive in {ARRIVAL_TIMEOUT_S:g} s"
            raise RequestError(text, status=408) from exc
        return body

    async def _begin_large(
        self, nbytes: int, room: AsyncExitStack, arrival: asyncio.Timeout
    ) -> bool:
        await room.enter_async_context(self._room(nbytes))
        arrival.reschedule(asyncio.get_running_loop().time() + ARRIVAL_TIMEOUT_S)
        return True

    @asynccontextmanager
    async def _room(self, nbytes: int) -> AsyncIterator[None]:
        """Room for a body, first come, first served. Raises: RequestError 503 if there is none."""
        if self._waiting or self.held_nbytes + nbytes > self._held_nbytes_max:
            await self._wait_for_room(nbytes)
        else:
            self.held_nbytes += nbytes
        try:
            yield
        finally:
            self.held_nbytes -= nbytes
            self._admit()

    async def _wait_for_room(self, nbytes: int) -> None:
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (nbytes, admitted)
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(ROOM_TIMEOUT_S):
                await asyncio.shield(admitted)
        except BaseException as exc:
            if admitted.done():
                self.held_nbytes -= nbytes
            else:
                self._waiting.remove(entry)
            self._admit()
            if not isinstance(exc, TimeoutError):
                raise
            raise RequestError(
                f"no room for a body of {nbytes} bytes: large bodies with {self.held_nbytes} bytes "
                f"are being read, at most {self._held_nbytes_max}",
                status=503,
            ) from exc

    def _admit(self) -> None:
        while self._waiting:
            nbytes, admitted = self._waiting[0]
            if self.held_nbytes + nbytes > self._held_nbytes_max:
                return
            self._waiting.popleft()
            self.held_nbytes += nbytes
            admitted.set_result(None)


async def _receive_small(request: Request) -> bytes:
    """The whole body, of which mostly all has come. Raises: RequestError."""
    body, has_more = b"", True
    while has_more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise RequestError(GONE)
        body += message.get("body", b"")
        has_more = message.get("more_body", False)
    return body


def keep_no_large_blocks() -> None:
    """Have the C library return blocks of a megabyte and more as soon as they are freed. It does so
    at first, but raises that size with the blocks it sees, to 32 MiB (mallopt(3))."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BODY_NBYTES)


def _give_memory_back() -> None:
    """Return free memory between smaller blocks, as a list of a million numbers leaves it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has both
    if trim is not None:
        trim(0)


def trace_parent(request: Request) -> str:
    """The span that a request belongs to, as its client says in `traceparent`; "" for none."""
    return trace_parent_of(headers_of(request.scope).all("traceparent"))


def request_name(request: Request, prefix: str = "") -> str:
    """A fresh name for a request, with the first X-Request-Id in it if that can be shown.

    Never the header alone: clients send it again when they retry, and proxies send it twice.
    """
    name = headers_of(request.scope).get("x-request-id").strip()
    if NAME_PATTERN.fullmatch(name):
        return f"{prefix}{name}-{secrets.token_hex(4)}"
    return f"{prefix}{secrets.token_hex(16)}"
