"""The frontend's end of the line to its scheduler: open requests, calls, whether it still answers.

Runs on one asyncio loop and never blocks. Knows nothing of HTTP or text. Every submitted request
gets exactly one end: a `Tokens` with `finish`, or a `Failed`; one from here if the scheduler is
gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import assert_never

from msgspec import structs

from common.channel.local_async import AsyncLocalClient
from common.channel.sockets import ChannelClosed
from common.clock import Clock
from common.errors import ProtocolError, RequestError
from common.failures import STOPPING, Failure, FailureKind
from common.frontend.requests.failure_log import FailureLog
from common.frontend.requests.open_requests import OpenRequests, ask_again
from common.frontend.requests.request_handle import Asked, RequestHandle, SampleId
from common.frontend.requests.request_log import RequestLog
from common.frontend.requests.scheduler_calls import SchedulerCalls
from common.frontend.requests.scheduler_health import GONE_AFTER_S, JUST_HEARD_S, SchedulerHealth
from common.frontend.requests.scheduler_line import SchedulerLine
from common.frontend.requests.token_pace import TokenPace
from common.frontend.requests.tracing import Tracing
from common.metrics.server import ServerMetrics
from common.protocol.codec import decode_scheduler_to_frontend
from common.protocol.frontend import (
    CallDone,
    Cancel,
    Drain,
    Failed,
    GetState,
    Outputs,
    SchedulerToFrontend,
    ServerInfo,
    SetPeers,
    State,
    Tokens,
    Traced,
)
from common.request import FinishReason, RequestTrace
from common.stopped import is_stopped

WATCH_INTERVAL_S = 1.0  # a frozen scheduler is noticed within a health check's period
UNREADY_WATCH_INTERVAL_S = 0.1  # a wait for a ready server ends so soon
ANSWER_WAIT_S = 1.0  # for each look at a scheduler that is silent

logger = logging.getLogger(__name__)


class SchedulerClient:
    """Submits requests to the scheduler and hands its answers to the requests that wait for them.

    server_info: None until every worker is ready. log: of requests that have ended. calls: all
    else that it is asked and told. is_draining: the server is to stop, nothing new is taken.
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
        self._pace = TokenPace(metrics)
        self._clock = clock
        self._heard_at = clock.now()
        self._liveness = SchedulerHealth(self._heard_at)
        self._ready = asyncio.Event()
        self._look_now = asyncio.Event()
        self._line = SchedulerLine(channel)
        self._open = OpenRequests(self.cancel, tracing)
        self.calls = SchedulerCalls(self._line)
        self.is_draining = False
        self._has_changed = asyncio.Event()

    # ---- requests ----------------------------------------------------------------------------

    def submit_samples(
        self,
        asked: Asked,
        samples: Sequence[SampleId],
        *,
        output_ids: Sequence[int] = (),
        is_streaming: bool = False,
        is_measured: bool = True,
    ) -> list[RequestHandle]:
        """Send validated requests: the samples of one prompt. output_ids: what the client of a
        single one has had of its answer. is_measured: whether they count in the metrics and are
        logged.

        Raises: RequestError with status 503 if the server is not ready, lost its scheduler or has
            too much queued, 400 if a request of a rid is open, and 413 if it is larger than what
            the scheduler reads. None of them is submitted then.
        """
        self.check_can_submit()
        now = self._clock.now()
        handles = self._open.make(
            asked, samples, output_ids, now, is_streaming=is_streaming, is_measured=is_measured
        )
        ((message, _),) = ask_again(handles, now)
        try:
            is_sent = self._line.try_send(message)
        except ProtocolError as exc:
            raise RequestError(str(exc), status=413) from exc
        if not is_sent:
            raise RequestError("too many requests are queued", status=503)
        for handle in handles:
            self._open.add(handle)
        return handles

    def open_relayed(
        self, asked: Asked, samples: Sequence[SampleId], *, is_streaming: bool
    ) -> list[RequestHandle]:
        """Requests that another server answers, which `deliver` is told of.

        Raises: RequestError, as `submit_samples`.
        """
        now = self._clock.now()
        self.check_can_submit()
        handles = self._open.make(
            asked, samples, (), now, is_streaming=is_streaming, is_measured=True
        )
        for handle in handles:
            handle.is_relayed = True
            self._open.add(handle)
        return handles

    def check_can_submit(self) -> None:
        """Raises: RequestError 503 if it starts or ends, or its scheduler is lost."""
        now = self._clock.now()
        if self.server_info is None:
            raise RequestError("the server is still starting", status=503)
        if self.is_draining:
            raise RequestError(STOPPING, status=503)
        is_heard = now < self._heard_at + JUST_HEARD_S
        trouble = self._liveness.trouble(now, is_started=True) if is_heard else self.trouble()
        if trouble:
            raise RequestError(trouble, status=503)

    def cancel(self, request_id: int, reason: str) -> None:
        """Ask the scheduler to end a request; unknown, ended and cancelled ones are ignored."""
        handle = self._open.get(request_id)
        if handle is None or handle.is_cancelled:
            return
        handle.cancel_reason = reason
        self._open.free_rid(handle)
        if handle.is_relayed:
            handle.on_cancel()
            return
        self._line.queue(Cancel(request_id, reason))

    # ---- requests that go on elsewhere ---------------------------------------------------------

    @property
    def open_requests(self) -> list[RequestHandle]:
        return list(self._open)

    def move(self, handle: RequestHandle, reason: str) -> None:
        """Take a request from the scheduler. Another server answers it, which `deliver` is told of,
        or the scheduler again."""
        assert not handle.is_ended
        self._line.queue(Cancel(handle.request_id, reason, is_moved=True))
        self._open.renumber(handle)
        handle.is_relayed = True

    def submit_again(self, handles: Sequence[RequestHandle]) -> None:
        """Have the scheduler go on with requests behind what their clients have had."""
        for handle in handles:
            handle.is_relayed = False
        for message, asking in ask_again(handles, self._clock.now()):
            try:
                self._line.queue(message)
            except ProtocolError as exc:
                for handle in asking:
                    self._fail(handle, Failure(FailureKind.TOO_LARGE, str(exc)))

    def deliver(self, message: Tokens | Failed) -> None:
        """Output of a request, from the scheduler or from another server. What is said under a
        number that is not known any more is of no use to anybody."""
        if isinstance(message, Tokens):
            self._handle_tokens(message)
        else:
            self._handle_failed(message)

    def _go_on_after(self, known: ServerInfo) -> None:
        """Another scheduler has begun: it is asked for everything that is open.

        What was sent to the one before may lie in the channel and be read by this one, so that is
        withdrawn first, and all are numbered anew.
        """
        handles = [handle for handle in self._open if not handle.is_relayed]
        for handle in handles:
            self._line.queue(Cancel(handle.request_id, "asked again"))
            self._open.renumber(handle)
        for handle in handles:
            if handle.is_cancelled:
                self._fail(handle, Failure(FailureKind.ABORTED, handle.cancel_reason))
        self.submit_again([handle for handle in handles if not handle.is_ended])
        if self.is_draining:
            self._line.queue(Drain())
        logger.warning(
            "another scheduler has begun: %d requests of %s go on", len(handles), known.incarnation
        )

    def cancel_matching(self, rid_prefix: str, reason: str = "aborted by the client") -> int:
        """Cancel every open request whose rid starts with `rid_prefix`; returns how many."""
        matching = self._open.matching(rid_prefix)
        for handle in matching:
            self.cancel(handle.request_id, reason)
        return len(matching)

    @property
    def open_request_count(self) -> int:
        return len(self._open)

    # ---- calls -------------------------------------------------------------------------------

    async def get_state(self, timeout_s: float = 5.0) -> State:
        """The scheduler's gauges. Raises: RequestError 503 if no answer comes in time."""
        answer = await self.calls.ask(GetState, timeout_s)
        assert isinstance(answer, State)
        return answer

    def set_peers(self, message: SetPeers) -> bool:
        """Whether the scheduler will hear of it."""
        return self._line.try_send(message)

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
        self._line.flush()
        asked_at = self._clock.now()
        self._metrics.measure_rate(asked_at)
        try:
            state = await self.get_state(timeout_s)
        except RequestError:
            if self._liveness.is_gone(self._clock.now()):
                self._fail_open(self.trouble())
            return
        self._metrics.note_peers((peer.label for peer in state.peers), asked_at)
        # All that it said before this answer has been read. A scheduler that reads it any later is
        # given up.
        for handle in self._open:
            if handle.started_at + handle.asked.budget_s + GONE_AFTER_S < asked_at:
                self._fail_lost(handle, "the end of the output was lost: its time is over for long")

    # ---- what comes in -----------------------------------------------------------------------

    def handle(self, message: SchedulerToFrontend) -> None:
        """Take one message of the scheduler. One without a request is counted, not an error."""
        self._heard_at = self._clock.now()
        self._liveness.hear(self._heard_at)
        match message:
            case Outputs(items):
                for item in items:
                    self.deliver(item)
                self._pace.tell()
            case Traced(trace):
                self._tracing.end(self.log.add(trace), None)
                self._metrics.observe_transfer(trace)
            case State():
                self._liveness.hear_state(message, self._heard_at)
                self.late_message_count += not self.calls.answer(message)
            case CallDone():
                self.late_message_count += not self.calls.answer(message)
            case ServerInfo():
                known, self.server_info = self.server_info, message
                self.calls.go_on_with(message)
                if known is not None and known.incarnation != message.incarnation:
                    self._go_on_after(known)
                self._ready.set()
                self._look_now.set()  # what was heard before says that the server is starting
            case _:
                assert_never(message)

    def _handle_tokens(self, message: Tokens) -> None:
        handle = self._open.get(message.request_id)
        if handle is None:
            self._refuse_late(message.request_id, is_end=message.finish is not None)
            return
        if message.offset != len(handle.output_ids):
            self._fail_lost(
                handle,
                f"output was lost on its way from the scheduler: it goes on with token "
                f"{message.offset}, {len(handle.output_ids)} have come",
            )
            return
        if message.token_ids and handle.is_measured and not handle.is_relayed:
            self._pace.note(handle, len(message.token_ids), self._heard_at)
        if message.finish is not None:
            self._close(handle, message.trace, "", message.finish)
        handle.weight_spans.add(self.calls.weights.version, len(message.token_ids))
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
            self._line.queue(Cancel(request_id, "already answered"))

    def _close(
        self,
        handle: RequestHandle,
        trace: RequestTrace | None,
        failure: str,
        finish: FinishReason | None = None,
    ) -> None:
        """Forget and measure a request that has ended. failure: its kind, "" if it went well. One
        that another server has ended is measured there."""
        self._open.remove(handle)
        self._has_changed.set()
        if not handle.is_measured or (handle.is_relayed and trace is not None):
            return
        if failure:
            self._failures.note(failure, handle.rid, trace.message if trace is not None else "")
        if trace is not None:
            self._tracing.end(self.log.add(trace), handle.span_ids)
            kind = finish.kind if finish is not None else None
            self._metrics.observe_end(trace, is_streaming=handle.is_streaming, finish=kind)
        elif failure:
            self._metrics.observe_failure(failure, is_streaming=handle.is_streaming)

    def begin_drain(self) -> None:
        """Take nothing new; the scheduler and its peers are told."""
        self.is_draining = True
        self._line.queue(Drain())

    async def wait_ended(self, timeout_s: float) -> bool:
        """Wait until what is open has ended, but no longer than timeout_s; whether it has."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while len(self._open):
                    self._has_changed.clear()
                    await self._has_changed.wait()
        return not len(self._open)

    def stop_own(self) -> None:
        """What this server's scheduler answers has had its time, and may be tried elsewhere."""
        for handle in self._open:
            if not handle.is_relayed:
                self.cancel(handle.request_id, STOPPING)
                self._fail(handle, Failure(FailureKind.STOPPING, STOPPING))

    def stop(self) -> None:
        """The drain is over: what is still open ends here, and may be tried elsewhere."""
        self.is_draining = True
        self.cancel_matching("", STOPPING)
        self._liveness.lose(STOPPING)
        for handle in self._open:
            self._fail(handle, Failure(FailureKind.STOPPING, STOPPING))

    def lose(self, reason: str) -> None:
        """The scheduler is known to be gone: answer what is open, and take nothing more."""
        self._liveness.lose(reason)
        self._fail_open(reason)

    def _fail_open(self, reason: str) -> None:
        """Answer in the scheduler's place what nobody else does."""
        for handle in self._open:
            if not handle.is_relayed:
                self._fail(handle, Failure(FailureKind.SCHEDULER_LOST, reason))

    def _fail_lost(self, handle: RequestHandle, reason: str) -> None:
        """End a request whose answer can't be whole any more, here and at the scheduler."""
        self.cancel(handle.request_id, reason)
        self._fail(handle, Failure(FailureKind.OUTPUT_LOST, reason))

    def _fail(self, handle: RequestHandle, failure: Failure) -> None:
        """Answer a request in the scheduler's place; one whose answer is complete went well."""
        self._close(handle, None, "" if handle.is_complete else failure.kind)
        handle.deliver(Failed.of(handle.request_id, failure))
