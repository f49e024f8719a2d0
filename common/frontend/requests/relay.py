"""Requests that another server answers: their clients stay here, and see no difference.

    request ─► POST /resume of the least loaded decode server ─► its tokens ─► handle
                 refused, or broken off: the next one, behind what has come
                 none takes it: this server's own scheduler, or one failure

The relay closes its connection if its client leaves, which ends the request there. Knows nothing of
text.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from common.clock import Clock
from common.failures import STOPPING, Failure, FailureKind
from common.frontend.bodies.resume import resume_body
from common.frontend.http.client import (
    Answer,
    HttpFailed,
    Request,
    ask,
    decode_answer,
    error_message,
)
from common.frontend.http.streaming import DONE, EVENT_START
from common.frontend.requests.fleet import Fleet, FleetServer
from common.frontend.requests.request_handle import Asked, RequestHandle, SampleId
from common.frontend.requests.scheduler_client import SchedulerClient
from common.protocol.frontend import Failed, Tokens

PATH = "/resume"
MOVED = "another server goes on with it"
# While a request waits or computes there, its server sends an empty line so often.
PULSE_S = 2.0
SILENCE_MAX_S = 10.0
# Failures that say something of the server and nothing of the request: another one may do better.
OF_THE_SERVER = (FailureKind.SCHEDULER_LOST, FailureKind.OUTPUT_LOST, FailureKind.TRANSFER_FAILED)

logger = logging.getLogger(__name__)
_DECODER: msgspec.json.Decoder[Tokens | Failed] = msgspec.json.Decoder(Tokens | Failed)


class _Refused(HttpFailed):
    """A server answered that it can't go on with a request. failure: why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Relays:
    """Owner of the tasks that relay.

    may_go_on_here: whether this server's scheduler takes a request that no other one does.
    """

    def __init__(self, client: SchedulerClient, fleet: Fleet, clock: Clock) -> None:
        self._client = client
        self._fleet = fleet
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self.may_go_on_here = False

    def submit_samples(
        self, asked: Asked, samples: Sequence[SampleId], *, is_streaming: bool
    ) -> list[RequestHandle]:
        """Requests of clients that other servers answer from the first token on.

        Raises: RequestError, as `SchedulerClient.submit_samples`.
        """
        handles = self._client.open_relayed(asked, samples, is_streaming=is_streaming)
        for handle in handles:
            self._begin(handle)
        return handles

    def move(self, handle: RequestHandle) -> None:
        """Take a request from this server's scheduler, to go on elsewhere."""
        self._client.move(handle, MOVED)
        self._begin(handle)

    def _begin(self, handle: RequestHandle) -> None:
        task = asyncio.create_task(self._relay(handle))
        self._tasks.add(task)
        handle.on_cancel = task.cancel
        task.add_done_callback(lambda ended: self._end(handle, ended))

    def _end(self, handle: RequestHandle, task: asyncio.Task[None]) -> None:
        """Whatever became of the task, its request is answered."""
        self._tasks.discard(task)
        if handle.is_ended or not handle.is_relayed:
            return
        failure = Failure(FailureKind.ABORTED, handle.cancel_reason or STOPPING)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a relay failed", exc_info=task.exception())
            failure = Failure(FailureKind.OUTPUT_LOST, "internal error in a relay")
        self._client.deliver(Failed.of(handle.request_id, failure))

    async def _relay(self, handle: RequestHandle) -> None:
        """From one server to the next, until the request has ended or goes on here."""
        tried: list[FleetServer] = []
        failure = Failure(FailureKind.NO_DECODE_SERVER, "no other decode server is connected")
        while True:
            if not handle.left_s(self._clock.now()):
                text = "the request's time budget is used up"
                failure = Failure(FailureKind.TIMED_OUT, text)
                break
            server = await self._fleet.least_loaded(one.url for one in tried)
            if server is None:
                break
            tried.append(server)
            try:
                await self._relay_to(handle, server)
                return
            except _Refused as exc:
                failure = exc.failure
                logger.warning("%s: %s does not take it: %s", handle.rid, server.url, exc)
            except HttpFailed as exc:
                failure = Failure(FailureKind.NO_DECODE_SERVER, f"{server.url}: {exc}")
                logger.warning("%s: %s was lost: %s", handle.rid, server.url, exc)
        if self.may_go_on_here:
            self._client.submit_again([handle])
        else:
            self._client.deliver(Failed.of(handle.request_id, failure))

    async def _relay_to(self, handle: RequestHandle, server: FleetServer) -> None:
        """Raises: HttpFailed if it was refused, or broke off."""
        asked = handle.asked
        body = resume_body(
            handle.rid,
            asked.token_ids,
            handle.output_ids.tolist(),
            msgspec.structs.replace(asked.sampling, seed=handle.seed),
            handle.left_s(self._clock.now()),
            asked.prefix_digests,
            asked.claim,
        )
        parent = asked.trace_parent
        headers = (("traceparent", parent),) if parent else ()
        request = Request("POST", PATH, msgspec.json.encode(body), self._fleet.key, headers)
        async with ask(server.url, request, SILENCE_MAX_S) as answer:
            if answer.status != 200:
                raise _Refused(await _refusal(answer))
            async for line in answer.lines():
                if line == DONE.strip():
                    break
                is_event = line.startswith(EVENT_START)
                if is_event and self._take(handle, line.removeprefix(EVENT_START)):
                    return
        raise HttpFailed("its answer ended before the request did")

    def _take(self, handle: RequestHandle, line: bytes) -> bool:
        """Whether that was the end. Raises: HttpFailed if it is not what comes next, or says that
        another server may do better."""
        message = decode_answer(_DECODER, line)
        if isinstance(message, Failed):
            kind = FailureKind.of(message.kind)
            if kind.status == 503 or kind in OF_THE_SERVER:
                retry_s = message.retry_after_s
                raise _Refused(Failure(kind, message.message, retry_after_s=retry_s))
        elif message.offset != len(handle.output_ids):
            raise HttpFailed(
                f"it goes on with token {message.offset}, {len(handle.output_ids)} have come"
            )
        self._client.deliver(msgspec.structs.replace(message, request_id=handle.request_id))
        return handle.is_ended


async def _refusal(answer: Answer) -> Failure:
    """Why a server did not take a request, in its own words."""
    message = ""
    with suppress(HttpFailed):
        message = error_message(await answer.document())
    kind = FailureKind.BAD_REQUEST if answer.status in (400, 413) else FailureKind.NO_DECODE_SERVER
    return Failure(kind, message or f"answered {answer.status}")
