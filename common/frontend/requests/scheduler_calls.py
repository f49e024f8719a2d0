"""Questions to the scheduler that have one answer each, and how long they wait for it.

Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from common.errors import RequestError
from common.protocol.frontend import CallDone, FlushCache, GetState, State


class SchedulerCalls:
    """send: whether a message was queued."""

    def __init__(self, send: Callable[[GetState | FlushCache], bool]) -> None:
        self._send = send
        self._next_id = 1
        self._waiting: dict[int, asyncio.Future[State | CallDone]] = {}

    async def ask(
        self, question: type[GetState] | type[FlushCache], timeout_s: float
    ) -> State | CallDone:
        """Raises: RequestError 503 if no answer comes in time."""
        call_id = self._next_id
        self._next_id += 1
        future: asyncio.Future[State | CallDone] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = future
        try:
            if not self._send(question(call_id=call_id)):
                raise RequestError("the scheduler's queue is full", status=503)
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as exc:
            raise RequestError(
                f"the scheduler did not answer within {timeout_s:g} s", status=503
            ) from exc
        finally:
            del self._waiting[call_id]

    def answer(self, message: State | CallDone) -> bool:
        """Whether anybody waits for it."""
        future = self._waiting.get(message.call_id)
        if future is not None and not future.done():
            future.set_result(message)
        return future is not None
