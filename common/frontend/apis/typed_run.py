"""Runs a call of one sample and tells of it as one object, or in events that name their type.

Knows nothing of bodies.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Protocol, TypeAlias

import orjson

from common.errors import RequestError
from common.frontend.apis.openai_call import OpenAiCall
from common.frontend.apis.openai_run import Growth
from common.frontend.context import FrontendContext
from common.frontend.http.errors import raise_failed
from common.frontend.http.streaming import EVENT_END, EVENT_START
from common.frontend.requests.generation import Continuation, SampleGroup

EVENT_NAME = b"event: "
LINE_END = b"\n"
Event: TypeAlias = dict[str, object]
"""With its type in `type`."""


class TypedShape(Protocol):
    """How a dialect tells of a sample. One is made for each call."""

    def reply(self, one: Continuation) -> dict[str, object]:
        """A sample that has ended."""

    def events(self, one: Continuation, growth: Growth) -> Iterable[Event]:
        """What tells of `growth`: with the first one of the beginning too, and of the end once the
        sample has ended."""

    def failure(self, error: RequestError) -> Iterable[Event]:
        """The end of a stream that has begun."""


class TypedRun:
    """One call on its way to a reply."""

    def __init__(
        self, context: FrontendContext, call: OpenAiCall, shape: TypedShape, trace_parent: str
    ) -> None:
        assert len(call.samples) == 1, "parsers of these dialects refuse several"
        self._context = context
        self._trace_parent = trace_parent
        self._call = call
        self._shape = shape

    async def reply(self) -> dict[str, object]:
        """Raises: RequestError if the sample failed."""
        async with SampleGroup(self._context, self._call.samples, self._trace_parent) as group:
            group.submit(is_streaming=False)
            async for ended in group.changes():
                raise_failed(one.failure for one in ended)
        return self._shape.reply(group.continuations[0])

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Raises: RequestError if there is one before the first event; a later one is told as the
        dialect does."""
        piece_count, start, is_first = 0, 0, True
        try:
            async with SampleGroup(self._context, self._call.samples, self._trace_parent) as group:
                group.submit(is_streaming=True)
                async for (one,) in group.changes():
                    raise_failed([one.failure])
                    text, stop = "".join(one.pieces[piece_count:]), one.settled_count()
                    growth = Growth(text=text, start=start, stop=stop, is_first=is_first)
                    piece_count, start, is_first = len(one.pieces), stop, False
                    if told := _encoded(self._shape.events(one, growth)):
                        yield told
        except RequestError as error:
            if is_first:
                raise
            yield _encoded(self._shape.failure(error))


def _encoded(events: Iterable[Event]) -> bytes:
    return b"".join(
        EVENT_NAME + str(event["type"]).encode() + LINE_END
        + EVENT_START + orjson.dumps(event) + EVENT_END
        for event in events
    )  # fmt: skip
