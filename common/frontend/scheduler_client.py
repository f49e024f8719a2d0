"""The frontend's end of the line to its scheduler: open requests, calls, whether it still answers.

Runs on one asyncio loop and never blocks. Knows nothing of HTTP or text. Every submitted request
gets exactly one end: a `Tokens` with `finish`, or a `Failed`; one from here if the scheduler is
gone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Protocol, Self, assert_never

from common.clock import Clock
from common.errors import RequestError
from common.frontend.liveness import SILENCE_MAX_S, Liveness
from common.metrics import ServerMetrics
from common.protocol.local import (
    Cancel,
    Failed,
    FlushCache,
    FlushDone,
    FrontendToScheduler,
    GetState,
    SchedulerToFrontend,
    ServerInfo,
    State,
    Submit,
    Tokens,
    Traced,
)
from common.request import Bootstrap, RequestTrace, SamplingParams

RECENT_TRACE_COUNT_MAX = 64  # what the page shows; older traces are in the histograms only
WATCH_INTERVAL_S = 1.0  # a frozen scheduler is noticed within a health check's period


class LinkClosed(Exception):
    """The scheduler's end of the line is gone for good."""


class SchedulerLink(Protocol):
    """A line that carries whole messages in order, and neither blocks nor drops silently."""

    def send(self, message: FrontendToScheduler) -> bool:
        """False if the line is full; the message was then not sent."""

    async def receive(self) -> SchedulerToFrontend:
        """Raises: LinkClosed."""

    def close(self) -> None: ...


class RequestHandle:
    """One submitted request; iterate over it for its `Tokens`, and for a `Failed` if it fails.

    Messages that pile up while the reader is busy are joined into one, so what is held is bounded
    by the request's own output. Leaving the `with` block before the end cancels the request.
    """

    def __init__(
        self, client: SchedulerClient, request_id: int, rid: str, *, is_streaming: bool, now: float
    ) -> None:
        self.request_id = request_id
        self.rid = rid
        self.is_streaming = is_streaming
        self.submitted_at = now
        self.tokens_at: float | None = None
        self.is_ended = False
        self.is_cancelled = False
        self._client = client
        self._pending: list[Tokens] = []
        self._failed: Failed | None = None
        self._wake = asyncio.Event()

    def cancel(self, reason: str = "aborted by the client") -> None:
        """Ask the scheduler to stop; the end still comes as a message. Harmless after the end."""
        self._client.cancel(self.request_id, reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel("the client went away")

    def deliver(self, message: Tokens | Failed) -> None:
        """Called by the client, in order; nothing comes after the end."""
        assert not self.is_ended
        if isinstance(message, Failed):
            self._failed = message
            self.is_ended = True
        else:
            self._pending.append(message)
            self.is_ended = message.finish is not None
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[Tokens | Failed]:
        while True:
            while not self._pending and self._failed is None:
                if self.is_ended:
                    return
                self._wake.clear()
                await self._wake.wait()
            if self._pending:
                joined = join_tokens(self._pending)
                self._pending = []
                yield joined
            if self._failed is not None and not self._pending:
                yield self._failed
                return


def join_tokens(messages: list[Tokens]) -> Tokens:
    """One message that says what `messages`, consecutive ones of one request, say together."""
    if len(messages) == 1:
        return messages[0]
    last = messages[-1]
    return Tokens(
        request_id=last.request_id,
        token_ids=[token for message in messages for token in message.token_ids],
        logprobs=[entry for message in messages for entry in message.logprobs],
        prompt_logprobs=[entry for message in messages for entry in message.prompt_logprobs],
        cached_token_count=max(message.cached_token_count for message in messages),
        finish=last.finish,
        trace=last.trace,
    )


class SchedulerClient:
    """Submits requests to the scheduler and hands its answers to whoever waits for them.

    server_info: None until every worker is ready. recent_traces: newest last.
    """

    def __init__(self, link: SchedulerLink, metrics: ServerMetrics, clock: Clock) -> None:
        self.server_info: ServerInfo | None = None
        self.recent_traces: deque[RequestTrace] = deque(maxlen=RECENT_TRACE_COUNT_MAX)
        self.late_message_count = 0
        self._link = link
        self._metrics = metrics
        self._clock = clock
        self._liveness = Liveness(clock.now())
        self._ready = asyncio.Event()
        self._next_id = 1
        self._open: dict[int, RequestHandle] = {}
        self._open_rids: set[str] = set()
        self._calls: dict[int, asyncio.Future[State | FlushDone]] = {}
        self._unsent: deque[Cancel] = deque()  # bounded: one per request that was ever open

    # ---- requests ----------------------------------------------------------------------------

    def submit(
        self,
        token_ids: list[int],
        sampling: SamplingParams,
        *,
        budget_s: float,
        rid: str,
        bootstrap: Bootstrap | None = None,
        is_streaming: bool = False,
    ) -> RequestHandle:
        """Send a validated request. budget_s: seconds it may take. rid: the client's name for it.

        Raises: RequestError with status 503 if the server is not ready, lost its scheduler or has
            too much queued, and 400 if a request of that rid is open.
        """
        if self.server_info is None:
            raise RequestError("the server is still starting", status=503)
        trouble = self.trouble()
        if trouble:
            raise RequestError(trouble, status=503)
        if rid in self._open_rids:
            raise RequestError(f"rid={rid!r}: a request of that id is still open", field="rid")
        request_id = self._next_id
        self._next_id += 1
        message = Submit(
            request_id=request_id,
            token_ids=token_ids,
            sampling=sampling,
            budget_s=budget_s,
            bootstrap=bootstrap,
        )
        if not (self._flush_unsent() and self._link.send(message)):
            raise RequestError("too many requests are queued", status=503)
        handle = RequestHandle(
            self, request_id, rid, is_streaming=is_streaming, now=self._clock.now()
        )
        self._open[request_id] = handle
        self._open_rids.add(rid)
        return handle

    def cancel(self, request_id: int, reason: str) -> None:
        """Ask the scheduler to end a request; unknown, ended and cancelled ones are ignored."""
        handle = self._open.get(request_id)
        if handle is None or handle.is_cancelled:
            return
        handle.is_cancelled = True
        self._unsent.append(Cancel(request_id=request_id, reason=reason))
        self._flush_unsent()

    def cancel_matching(self, rid_prefix: str, reason: str = "aborted by the client") -> int:
        """Cancel every open request whose rid starts with `rid_prefix`; returns how many."""
        matching = [h.request_id for h in self._open.values() if h.rid.startswith(rid_prefix)]
        for request_id in matching:
            self.cancel(request_id, reason)
        return len(matching)

    @property
    def open_request_count(self) -> int:
        return len(self._open)

    # ---- calls -------------------------------------------------------------------------------

    async def get_state(self, timeout_s: float = 5.0) -> State:
        """The scheduler's gauges. Raises: RequestError 503 if no answer comes in time."""
        answer = await self._call(lambda call_id: GetState(call_id=call_id), timeout_s)
        assert isinstance(answer, State)
        return answer

    async def flush_cache(self, timeout_s: float = 30.0) -> FlushDone:
        """Forget cached prefixes. Raises: RequestError 503 if no answer comes in time."""
        answer = await self._call(lambda call_id: FlushCache(call_id=call_id), timeout_s)
        assert isinstance(answer, FlushDone)
        return answer

    async def _call(
        self, make: Callable[[int], GetState | FlushCache], timeout_s: float
    ) -> State | FlushDone:
        call_id = self._next_id
        self._next_id += 1
        future: asyncio.Future[State | FlushDone] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            if not (self._flush_unsent() and self._link.send(make(call_id))):
                raise RequestError("the scheduler's queue is full", status=503)
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as exc:
            raise RequestError(
                f"the scheduler did not answer within {timeout_s:g} s", status=503
            ) from exc
        finally:
            del self._calls[call_id]

    async def wait_ready(self) -> ServerInfo:
        """Wait until every worker is ready."""
        await self._ready.wait()
        assert self.server_info is not None
        return self.server_info

    # ---- health ------------------------------------------------------------------------------

    @property
    def state(self) -> State | None:
        """The State heard last, about a second old at most while the server is healthy."""
        return self._liveness.state

    def trouble(self) -> str:
        """Why this server is not healthy, "" if it is; says nothing of start-up or peers."""
        return self._liveness.trouble(self._clock.now())

    # ---- the two tasks -----------------------------------------------------------------------

    async def run(self) -> None:
        """Receive and watch until cancelled. Returns once the link is closed."""
        watch = asyncio.create_task(self._watch())
        try:
            while True:
                self.handle(await self._link.receive())
        except LinkClosed as exc:
            self._lose(str(exc) or "the scheduler is gone")
        finally:
            watch.cancel()

    async def _watch(self) -> None:
        """Ask for the state at a steady pace, so that silence means something."""
        while True:
            await self.watch_once()
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def watch_once(self) -> None:
        """One look at the scheduler; gives up on the open requests once it is gone."""
        self._flush_unsent()
        self._metrics.measure_rate(self._clock.now())
        try:
            await self.get_state(timeout_s=SILENCE_MAX_S)
        except RequestError:
            if self._liveness.is_gone(self._clock.now()):
                self._fail_open(self.trouble())

    # ---- what comes in -----------------------------------------------------------------------

    def handle(self, message: SchedulerToFrontend) -> None:
        """Take one message of the scheduler. One for nobody is counted, not an error."""
        self._liveness.hear(self._clock.now())
        match message:
            case Tokens():
                self._handle_tokens(message)
            case Failed():
                self._handle_failed(message)
            case Traced(trace):
                self.recent_traces.append(trace)
                self._metrics.observe_hand_over(trace)
            case State():
                self._liveness.hear_state(message, self._clock.now())
                self._answer(message)
            case FlushDone():
                self._answer(message)
            case ServerInfo():
                self.server_info = message
                self._ready.set()
            case _:
                assert_never(message)

    def _handle_tokens(self, message: Tokens) -> None:
        handle = self._open.get(message.request_id)
        if handle is None:
            self._refuse_late(message.request_id, is_end=message.finish is not None)
            return
        now = self._clock.now()
        if message.token_ids:
            interval_s = None if handle.tokens_at is None else now - handle.tokens_at
            handle.tokens_at = now
            self._metrics.observe_tokens(
                len(message.token_ids), interval_s, is_streaming=handle.is_streaming
            )
        if message.finish is not None:
            self._close(handle, message.trace)
        handle.deliver(message)

    def _handle_failed(self, message: Failed) -> None:
        handle = self._open.get(message.request_id)
        if handle is None:
            self._refuse_late(message.request_id, is_end=True)
            return
        if message.trace is None:
            self._metrics.observe_failure(message.kind)
        self._close(handle, message.trace)
        handle.deliver(message)

    def _refuse_late(self, request_id: int, *, is_end: bool) -> None:
        """A request that was answered from here goes on in a scheduler that came back: stop it."""
        self.late_message_count += 1
        if not is_end:
            self._unsent.append(Cancel(request_id=request_id, reason="already answered"))
            self._flush_unsent()

    def _answer(self, message: State | FlushDone) -> None:
        future = self._calls.get(message.call_id)
        if future is None:
            self.late_message_count += 1
        elif not future.done():
            future.set_result(message)

    def _close(self, handle: RequestHandle, trace: RequestTrace | None) -> None:
        del self._open[handle.request_id]
        self._open_rids.remove(handle.rid)
        if trace is not None:
            self.recent_traces.append(trace)
            self._metrics.observe_end(trace, is_streaming=handle.is_streaming)

    def _lose(self, reason: str) -> None:
        self._liveness.lose(reason)
        self._fail_open(reason)

    def _fail_open(self, reason: str) -> None:
        """Answer every open request in the scheduler's place."""
        for handle in list(self._open.values()):
            self._metrics.observe_failure("scheduler_lost")
            self._close(handle, None)
            handle.deliver(
                Failed(
                    request_id=handle.request_id, status=500, kind="scheduler_lost", message=reason
                )
            )

    def _flush_unsent(self) -> bool:
        """Send what did not fit before; whether nothing is left."""
        while self._unsent and self._link.send(self._unsent[0]):
            self._unsent.popleft()
        return not self._unsent
