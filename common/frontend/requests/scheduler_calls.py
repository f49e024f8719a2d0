"""Questions and commands to the scheduler that have one answer each, and how long they wait for it.

A scheduler that follows another one is asked what was not answered. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from common.errors import RequestError
from common.frontend.requests.scheduler_line import SchedulerLine
from common.protocol.frontend import (
    CallDone,
    Continue,
    FlushCache,
    GetState,
    Pause,
    ServerInfo,
    State,
    UpdateWeights,
)
from common.weights import ServedWeights

Question = GetState | FlushCache | Pause | Continue | UpdateWeights
Answer = State | CallDone
# A checkpoint of hundreds of GB from a disk over a network, as long as a start may take.
UPDATE_TIMEOUT_S = 1800.0
# Steps and copies that are under way end in less.
COMMAND_TIMEOUT_S = 30.0
NOT_UPDATED = "the scheduler ended while the weights were loaded; the ones before are served"


@dataclass(frozen=True, slots=True)
class _Waiting:
    question: Question
    answer: asyncio.Future[Answer]


class SchedulerCalls:
    """is_paused: what was commanded last; a scheduler that follows another one hears of it.
    weights: of the scheduler heard last. All that an earlier one has said came before."""

    def __init__(self, line: SchedulerLine) -> None:
        self._line = line
        self._next_id = 1
        self._waiting: dict[int, _Waiting] = {}
        self.is_paused = False
        self.weights = ServedWeights()
        self._incarnation: str | None = None

    # ---- commands --------------------------------------------------------------------------------

    async def flush_cache(self, timeout_s: float = COMMAND_TIMEOUT_S) -> CallDone:
        """Forget cached prefixes. Raises: RequestError 503 if no answer comes in time."""
        return await self._command(FlushCache, timeout_s)

    async def pause(self, *, retracts: bool) -> CallDone:
        """Returns once nothing is computed. Raises: RequestError 503 if that is not soon."""
        self.is_paused = True
        return await self._command(lambda call_id: Pause(call_id, retracts), COMMAND_TIMEOUT_S)

    async def go_on(self) -> CallDone:
        """After a pause. Raises: RequestError 503 if no answer comes in time."""
        self.is_paused = False
        return await self._command(Continue, COMMAND_TIMEOUT_S)

    async def update_weights(self, weights: ServedWeights) -> CallDone:
        """Returns once the next scheduler has begun, or with the reason why the weights are as they
        were. Raises: RequestError 503 if that takes too long."""
        asked = self._incarnation or ""
        return await self._command(
            lambda call_id: UpdateWeights(call_id, weights, asked), UPDATE_TIMEOUT_S
        )

    async def _command(self, question: Callable[[int], Question], timeout_s: float) -> CallDone:
        answer = await self.ask(question, timeout_s)
        assert isinstance(answer, CallDone)
        return answer

    # ---- any question ----------------------------------------------------------------------------

    async def ask(self, question: Callable[[int], Question], timeout_s: float) -> Answer:
        """question: makes it of a number. Raises: RequestError 503 if no answer comes in time."""
        call_id = self._next_id
        self._next_id += 1
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        asked = question(call_id)
        self._waiting[call_id] = _Waiting(asked, future)
        try:
            if not self._line.try_send(asked):
                raise RequestError("the scheduler's queue is full", status=503)
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as exc:
            raise RequestError(
                f"the scheduler did not answer within {timeout_s:g} s", status=503
            ) from exc
        finally:
            del self._waiting[call_id]

    def answer(self, message: Answer) -> bool:
        """Whether anybody waits for it."""
        waiting = self._waiting.get(message.call_id)
        if waiting is not None and not waiting.answer.done():
            waiting.answer.set_result(message)
        return waiting is not None

    def go_on_with(self, info: ServerInfo) -> None:
        """A scheduler has begun, or has said so again. One that follows another one is told what
        the last one was, before it is asked for requests."""
        is_next = self._incarnation not in (None, info.incarnation)
        self._incarnation, self.weights = info.incarnation, info.weights
        if not is_next:
            return
        if self.is_paused:
            self._line.queue(Pause(0))
        for call_id, waiting in list(self._waiting.items()):
            if isinstance(waiting.question, UpdateWeights):
                is_done = info.weights.load_id == waiting.question.weights.load_id
                self.answer(CallDone(call_id, is_done, "" if is_done else NOT_UPDATED))
            else:
                self._line.try_send(waiting.question)
