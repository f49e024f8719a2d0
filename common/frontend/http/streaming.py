"""Answers that take long: server-sent events, and work that ends when its client goes away.

Knows nothing of prompts and tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Protocol, TypeVar

import orjson
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from common.errors import RequestError
from common.frontend.bodies.fields import JsonValue
from common.frontend.http.answers import EVENT_STREAM
from common.frontend.http.errors import error_body, json_response

T = TypeVar("T")

EVENT_START, EVENT_END = b"data: ", b"\n\n"
DONE = EVENT_START + b"[DONE]" + EVENT_END
PULSE = b":" + EVENT_END  # a comment: says that the server is there
BODY = "http.response.body"
CLIENT_GONE_STATUS = 499  # for access logs; the client is gone


def as_given(value: JsonValue) -> orjson.Fragment:
    """What a client sent, to be sent back: it may lie deeper, and have larger numbers, than what
    answers are encoded with takes."""
    return orjson.Fragment(json.dumps(value, ensure_ascii=False).encode())


def event(content: object) -> bytes:
    """One server-sent event."""
    return EVENT_START + orjson.dumps(content) + EVENT_END


async def run_until_disconnect(work: Coroutine[None, None, T], receive: Receive) -> T | None:
    """The result of `work`; None if the client went away first, and `work` was cancelled.

    The task of the request, with a dozen frames of the HTTP server below it, watches the client.
    The work has a task of its own, so that each token wakes a few frames only.
    receive: the connection's, after the body has been read.
    """
    watching = asyncio.current_task()
    assert watching is not None
    working = asyncio.create_task(work)
    is_watching, is_woken = True, False

    def wake(_: object) -> None:
        nonlocal is_woken
        if is_watching:
            is_woken = True
            watching.cancel()

    working.add_done_callback(wake)
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    except asyncio.CancelledError:
        if not is_woken or watching.uncancel():  # another task ends the request
            raise
    finally:
        is_watching = False
        if not working.done():
            working.cancel()
            await asyncio.wait([working])
    try:
        return None if working.cancelled() else working.result()
    finally:
        del working  # an error's traceback has this frame, and would keep itself


class Run(Protocol):
    """A checked body on its way to an answer. Both raise RequestError if a sample failed."""

    async def reply(self) -> object: ...

    def events(self) -> AsyncGenerator[bytes, None]: ...


async def answer(request: Request, run: Run, *, is_streaming: bool) -> Response:
    """The response of a run, which is cancelled as soon as its client goes away."""
    if is_streaming:
        path = request.url.path
        return EventStream(run.events(), lambda error: error_body(path, error))
    reply = await run_until_disconnect(run.reply(), request.receive)
    return Response(status_code=CLIENT_GONE_STATUS) if reply is None else json_response(reply)


class EventStream(Response):
    """Sends events as they come. The status waits for the first one, so an early error has its own.

    events: bytes of whole events, those of one step together, and with the last ones the closing
    mark. describe_error: the content of the event for a `RequestError` after the first.
    """

    media_type = EVENT_STREAM

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        describe_error: Callable[[RequestError], object],
    ) -> None:
        super().__init__()
        self._events = events
        self._describe_error = describe_error
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # proxies that buffer would hold tokens back

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await run_until_disconnect(self._send_all(send), receive)

    async def _send_all(self, send: Send) -> None:
        """Raises: RequestError if there is one before the first event."""
        is_started = False
        async with aclosing(self._events) as events:
            try:
                async for chunk in events:
                    if not is_started:
                        is_started = True
                        await self._send_start(send)
                    await send({"type": BODY, "body": chunk, "more_body": True})
            except RequestError as error:
                if not is_started:
                    raise
                last = event(self._describe_error(error)) + DONE
                await send({"type": BODY, "body": last, "more_body": True})
        await send({"type": BODY, "body": b"", "more_body": False})

    async def _send_start(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
