"""The frontend's end of the line to its scheduler: open requests, calls, whether it still answers.

Runs on one asyncio loop and never blocks. Knows nothing of HTTP or text. Every submitted request
gets exactly one end: a `Tokens` with `finish`, or a `Failed`; one from here if the scheduler is
gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import assert_never

from msgspec import structs

from common.channel.local_async import AsyncLocalClient
from common.channel.sockets import ChannelClosed, SendResult
from common.clock import Clock
from common.errors import ProtocolError, RequestError
from common.failures import Failure, FailureKind
from common.frontend.requests.failure_log import FailureLog
from common.frontend.requests.request_handle import RequestHandle, SampleId
from common.frontend.requests.request_log import RequestLog
from common.frontend.requests.scheduler_calls import SchedulerCalls
from common.frontend.requests.scheduler_health import GONE_AFTER_S, SchedulerHealth
from common.frontend.requests.tracing import Tracing
from common.metrics.server import ServerMetrics
from common.protocol.codec import decode_scheduler_to_frontend, encode
from common.protocol.frontend import (
    Cancel,
    Drain,
    Failed,
    FlushCache,
    FlushDone,
    FrontendToScheduler,
    GetState,
    Outputs,
    SchedulerToFrontend,
    ServerInfo,
    Sibling,
    State,
    Submit,
    Tokens,
    Traced,
)
from common.request import Bootstrap, Claim, FinishReason, Origin, RequestTrace, SamplingParams
from common.stopped import is_stopped

STOPPING = "the server is stopping"
WATCH_INTERVAL_S = 1.0  # a frozen scheduler is noticed within a health check's period
UNREADY_WATCH_INTERVAL_S = 0.1  # a wait for a ready server ends so soon
ANSWER_WAIT_S = 1.0  # for each look at a scheduler that is silent


class SchedulerClient:
    """Submits requests to the scheduler and hands its answers to the requests that wait for them.

    server_info: None until every worker is ready. log: of requests that have ended.
    is_draining: the server is to stop, nothing new is taken.
    """

    def __init__(
        self,
        channel: AsyncLocalClient,
        metrics: ServerMetrics,
        log: RequestLog,
        tracing: Tracing,
        clock: Clock,
    ) -> None:
        self.server_info: ServerInfo | None = None
        self.log = log
        self._failures = FailureLog()
        self._tracing = tracing
        self.late_message_count = 0
        self._channel = channel
        self._metrics = metrics
        self._clock = clock
        self._liveness = SchedulerHealth(clock.now())
        self._ready = asyncio.Event()
        self._look_now = asyncio.Event()
        self._next_id = 1
        self._open: dict[int, RequestHandle] = {}
        self._request_ids: dict[str, int] = {}  # by rid; a cancelled request's rid is free again
        self._calls = SchedulerCalls(lambda message: self._flush_unsent() and self._send(message))
        self.is_draining = False
        self._is_empty = asyncio.Event()
        self._unsent: dict[int, Cancel] = {}  # bounded: one per request that is under way

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
        is_measured: bool = True,
        trace_parent: str = "",
        prefix_digests: bytes = b"",
    ) -> RequestHandle:
        """Send a validated request. budget_s: seconds it may take. rid: the client's name for it.
        is_measured: whether it counts in the metrics and is logged. trace_parent: the client's.
        prefix_digests: of the prompt's beginnings; none if nothing of it is to be kept.

        Raises: RequestError, as `submit_samples`.
        """
        (handle,) = self.submit_samples(
            token_ids,
            sampling,
            [SampleId(rid, sampling.seed)],
            budget_s=budget_s,
            bootstrap=bootstrap,
            is_streaming=is_streaming,
            is_measured=is_measured,
            trace_parent=trace_parent,
            prefix_digests=prefix_digests,
        )
        return handle

    def submit_samples(
        self,
        token_ids: list[int],
        sampling: SamplingParams,
        samples: Sequence[SampleId],
        *,
        budget_s: float,
        bootstrap: Bootstrap | None = None,
        is_streaming: bool = False,
        is_measured: bool = True,
        trace_parent: str = "",
        prefix_digests: bytes = b"",
        claim: Claim | None = None,
    ) -> list[RequestHandle]:
        """As `submit`, several samples of one prompt, whose sampling differs by their seeds.

        Raises: RequestError with status 503 if the server is not ready, lost its scheduler or has
            too much queued, 400 if a request of a rid is open, and 413 if it is larger than what
            the scheduler reads. None of them is submitted then.
        """
        self._check_can_submit([sample.rid for sample in samples])
        spans = [self._tracing.begin(trace_parent) if is_measured else None for _ in samples]
        siblings = [
            Sibling(
                self._next_id + place,
                sample.seed,
                Origin(sample.rid, span.remote_prefill.trace_parent if span else trace_parent),
            )
            for place, (sample, span) in enumerate(zip(samples, spans, strict=True))
        ]
        self._next_id += len(samples)
        first, *others = siblings
        message = Submit(
            request_id=first.request_id,
            token_ids=token_ids,
            sampling=structs.replace(sampling, seed=first.seed),
            budget_s=budget_s,
            bootstrap=bootstrap,
            origin=first.origin,
            prefix_digests=prefix_digests,
            siblings=others,
            claim=claim or Claim(),
        )
        try:
            is_sent = self._flush_unsent() and self._send(message)
        except ProtocolError as exc:
            raise RequestError(str(exc), status=413) from exc
        if not is_sent:
            raise RequestError("too many requests are queued", status=503)
        # A scheduler that reads it any later is given up.
        ends_by = self._clock.now() + budget_s + GONE_AFTER_S
        handles: list[RequestHandle] = []
        for sibling, span in zip(siblings, spans, strict=True):
            handle = RequestHandle(
                self.cancel,
                sibling.request_id,
                sibling.origin.rid,
                ends_by=ends_by,
                is_streaming=is_streaming,
                is_measured=is_measured,
            )
            handle.span_ids = span
            self._open[handle.request_id] = handle
            self._request_ids[handle.rid] = handle.request_id
            handles.append(handle)
        return handles

    def _check_can_submit(self, rids: list[str]) -> None:
        if self.server_info is None:
            raise RequestError("the server is still starting", status=503)
        if self.is_draining:
            raise RequestError(STOPPING, status=503)
        trouble = self.trouble()
        if trouble:
            raise RequestError(trouble, status=503)
        for place, rid in enumerate(rids):
            if rid in self._request_ids or rid in rids[:place]:
                raise RequestError(f"rid={rid!r}: a request of that id is still open", field="rid")

    def cancel(self, request_id: int, reason: str) -> None:
        """Ask the scheduler to end a request; unknown, ended and cancelled ones are ignored."""
        handle = self._open.get(request_id)
        if handle is None or handle.is_cancelled:
            return
        handle.is_cancelled = True
        self._free_rid(handle)
        self._unsent[request_id] = Cancel(request_id=request_id, reason=reason)
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
        answer = await self._calls.ask(GetState, timeout_s)
        assert isinstance(answer, State)
        return answer

    async def flush_cache(self, timeout_s: float = 30.0) -> FlushDone:
        """Forget cached prefixes. Raises: RequestError 503 if no answer comes in time."""
        answer = await self._calls.ask(FlushCache, timeout_s)
        assert isinstance(answer, FlushDone)
        return answer

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
        if self.server_info is not None and is_stopped(self.server_info.pid):
            return "the scheduler's process is stopped"
        return self._liveness.trouble(self._clock.now(), is_started=self.server_info is not None)

    # ---- the two tasks -----------------------------------------------------------------------

    async def run(self) -> None:
        """Receive and watch until cancelled. Returns once the channel is closed.

        Raises: ProtocolError if our own scheduler sends nonsense: the process is to die of it.
        """
        watch = asyncio.create_task(self._watch())
        try:
            while True:
                self.handle(decode_scheduler_to_frontend(await self._channel.receive()))
        except ChannelClosed as exc:
            self.lose(str(exc))
        finally:
            watch.cancel()

    async def _watch(self) -> None:
        """Ask for the state at a steady pace, so that silence means something.

        The first question also tells the scheduler that this frontend is there.
        """
        while True:
            self._look_now.clear()
            await self.watch_once()
            is_ready = self.state is not None and self.state.is_ready
            with suppress(TimeoutError):
                async with asyncio.timeout(
                    WATCH_INTERVAL_S if is_ready else UNREADY_WATCH_INTERVAL_S
                ):
                    await self._look_now.wait()

    async def watch_once(self, timeout_s: float = ANSWER_WAIT_S) -> None:
        """One look at the scheduler; gives up on the open requests once it is gone, and on those
        that it has forgotten."""
        self._flush_unsent()
        asked_at = self._clock.now()
        self._metrics.measure_rate(asked_at)
        try:
            await self.get_state(timeout_s)
        except RequestError:
            if self._liveness.is_gone(self._clock.now()):
                self._fail_open(self.trouble())
            return
        # All that it said before this answer has been read.
        for handle in [one for one in self._open.values() if one.ends_by < asked_at]:
            self._fail_lost(handle, "the end of the output was lost: its time is over for long")

    # ---- what comes in -----------------------------------------------------------------------

    def handle(self, message: SchedulerToFrontend) -> None:
        """Take one message of the scheduler. One without a request is counted, not an error."""
        self._liveness.hear(self._clock.now())
        match message:
            case Outputs(items):
                for item in items:
                    if isinstance(item, Tokens):
                        self._handle_tokens(item)
                    else:
                        self._handle_failed(item)
            case Traced(trace):
                self._tracing.end(self.log.add(trace), None)
                self._metrics.observe_transfer(trace)
            case State():
                self._liveness.hear_state(message, self._clock.now())
                self.late_message_count += not self._calls.answer(message)
            case FlushDone():
                self.late_message_count += not self._calls.answer(message)
            case ServerInfo():
                self.server_info = message
                self._ready.set()
                self._look_now.set()  # what was heard before says that the server is starting
            case _:
                assert_never(message)

    def _handle_tokens(self, message: Tokens) -> None:
        handle = self._open.get(message.request_id)
        if handle is None:
            self._refuse_late(message.request_id, is_end=message.finish is not None)
            return
        if message.offset != handle.token_count:
            self._fail_lost(
                handle,
                f"output was lost on its way from the scheduler: it goes on with token "
                f"{message.offset}, {handle.token_count} have come",
            )
            return
        now = self._clock.now()
        if message.token_ids and handle.is_measured:
            interval_s = None if handle.tokens_at is None else now - handle.tokens_at
            self._metrics.observe_tokens(
                len(message.token_ids), interval_s, is_streaming=handle.is_streaming
            )
            handle.tokens_at = now
        if message.finish is not None:
            self._close(handle, message.trace, "", message.finish)
        handle.deliver(message)

    def _handle_failed(self, message: Failed) -> None:
        handle = self._open.get(message.request_id)
        if handle is None:
            self._refuse_late(message.request_id, is_end=True)
            return
        if handle.is_complete and message.trace is not None:
            well = structs.replace(message.trace, status="ok", message="")
            message = structs.replace(message, trace=well)
        self._close(handle, message.trace, message.kind)
        handle.deliver(message)

    def _refuse_late(self, request_id: int, *, is_end: bool) -> None:
        """A request that was answered from here goes on in a scheduler that came back: stop it."""
        self.late_message_count += 1
        if not is_end:
            self._unsent[request_id] = Cancel(request_id=request_id, reason="already answered")
            self._flush_unsent()

    def _close(
        self,
        handle: RequestHandle,
        trace: RequestTrace | None,
        failure: str,
        finish: FinishReason | None = None,
    ) -> None:
        """Forget and measure a request that has ended. failure: its kind, "" if it went well."""
        del self._open[handle.request_id]
        if not self._open:
            self._is_empty.set()
        self._free_rid(handle)
        if not handle.is_measured:
            return
        if failure:
            self._failures.note(failure, handle.rid, trace.message if trace is not None else "")
        if trace is not None:
            self._tracing.end(self.log.add(trace), handle.span_ids)
            kind = finish.kind if finish is not None else None
            self._metrics.observe_end(trace, is_streaming=handle.is_streaming, finish=kind)
        elif failure:
            self._metrics.observe_failure(failure, is_streaming=handle.is_streaming)

    def _free_rid(self, handle: RequestHandle) -> None:
        if self._request_ids.get(handle.rid) == handle.request_id:
            del self._request_ids[handle.rid]

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, and wait until what is open has ended, but no longer than timeout_s."""
        self.is_draining = True
        self._send(Drain())
        self._is_empty.clear()
        if self._open:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._is_empty.wait()

    def stop(self) -> None:
        """The drain is over: what is still open ends here, and may be tried elsewhere."""
        self.is_draining = True
        self.cancel_matching("", STOPPING)
        self._liveness.lose(STOPPING)
        self._fail_open(STOPPING, FailureKind.STOPPING)

    def lose(self, reason: str) -> None:
        """The scheduler is known to be gone: answer what is open, and take nothing more."""
        self._liveness.lose(reason)
        self._fail_open(reason)

    def _fail_open(self, reason: str, kind: FailureKind = FailureKind.SCHEDULER_LOST) -> None:
        """Answer every open request in the scheduler's place."""
        for handle in list(self._open.values()):
            self._fail(handle, Failure(kind, reason))

    def _fail_lost(self, handle: RequestHandle, reason: str) -> None:
        """End a request whose answer can't be whole any more, here and at the scheduler."""
        self.cancel(handle.request_id, reason)
        self._fail(handle, Failure(FailureKind.OUTPUT_LOST, reason))

    def _fail(self, handle: RequestHandle, failure: Failure) -> None:
        """Answer a request in the scheduler's place."""
        self._close(handle, None, failure.kind)
        handle.deliver(Failed.of(handle.request_id, failure))

    def _send(self, message: FrontendToScheduler) -> bool:
        """Whether the message was queued; not if the scheduler has not read for a long time."""
        return self._channel.send(encode(message)) is SendResult.SENT

    def _flush_unsent(self) -> bool:
        """Send what did not fit before; whether nothing is left."""
        for request_id, message in list(self._unsent.items()):
            if not self._send(message):
                return False
            del self._unsent[request_id]
        return True
