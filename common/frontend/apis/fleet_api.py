"""What the servers of a fleet, and their administrators, ask of each other: POST /resume, /drain,
/switch_role.

/resume is not for clients. It goes on with a request that another server has begun or taken in, and
answers with the scheduler's own messages as server-sent events. Closing the connection ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from common.config import Role
from common.errors import RequestError
from common.flags.values import server_url
from common.frontend.bodies.body import Body, read, schema_of
from common.frontend.bodies.fields import JsonObject
from common.frontend.bodies.reader import trace_parent
from common.frontend.bodies.resume import parse_resume
from common.frontend.bodies.sample import Sample
from common.frontend.context import FrontendContext
from common.frontend.http.answers import EVENT_STREAM, answered_as
from common.frontend.http.errors import error_body, json_response
from common.frontend.http.headers import has_body
from common.frontend.http.streaming import DONE, EVENT_END, EVENT_START, PULSE, EventStream
from common.frontend.requests.fleet import SERVER_COUNT_MAX
from common.frontend.requests.generation import request_limits
from common.frontend.requests.relay import PATH, PULSE_S
from common.frontend.requests.request_handle import Asked, SampleId

RESUME_PATH = PATH
DRAIN_PATH = "/drain"
SWITCH_PATH = "/switch_role"


URLS = Meta(
    min_length=1,
    max_length=SERVER_COUNT_MAX,
    description=f"a list of URLs, not empty and at most {SERVER_COUNT_MAX}, or absent",
)


class DrainFields(Body, frozen=True):
    """to: URLs of the decode servers that open requests may move to, instead of --drain-to's."""

    to: Annotated[list[str], URLS] | None = None


class RoleFields(Body, frozen=True):
    """role: prefill or decode."""

    role: Literal["prefill", "decode"]


DRAIN = schema_of(DrainFields)
SWITCH = schema_of(RoleFields)


def build_router(context: FrontendContext) -> APIRouter:
    router = APIRouter()

    @router.post(PATH, response_class=Response, responses=answered_as(EVENT_STREAM))
    async def resume(request: Request) -> Response:
        """Internal: go on with a request of another server of the fleet."""
        if context.config.role is not Role.DECODE:
            raise RequestError("/resume: this is a prefill server; decode servers resume requests")
        limits = request_limits(context)
        sample = await context.bodies.read(request, lambda body: parse_resume(body, limits))
        await context.check_grammars([sample])
        run = ResumeRun(context, sample, trace_parent(request))
        return EventStream(run.events(), lambda error: error_body(PATH, error))

    @router.post(DRAIN_PATH)
    async def drain(request: Request) -> Response:
        """Do what a first SIGTERM does: take nothing new, let open requests end or move, and stop.
        A SIGTERM after it ends the server at once."""
        order = context.drain_order
        to = await context.bodies.read(request, read_targets) if has_body(request.scope) else None
        is_decode = context.config.role is Role.DECODE
        if to is not None and not is_decode:
            raise RequestError("to: a prefill server moves nothing", field="to")
        if to is not None and order.is_given:
            raise RequestError("to: the server drains already", field="to")
        if to is not None:
            context.fleet.targets = to
            order.must_move = True
        order.give()
        open_count = context.scheduler.open_request_count
        return json_response({"success": True, "open_requests": open_count})

    @router.post(SWITCH_PATH)
    async def switch_role(request: Request) -> Response:
        """Let open requests end or move, and go on as a server of the other role; weights and pool
        are kept. /health is red until it has."""
        role = await context.bodies.read(request, lambda body: Role(read(RoleFields, body).role))
        return json_response(_switch(context, role))

    return router


def _switch(context: FrontendContext, role: Role) -> JsonObject:
    """Begin it; the answer. Raises: RequestError if this server can't."""
    config, order = context.config, context.drain_order
    is_done = role is config.role and not config.standby
    answer: JsonObject = {"success": True, "role": str(role), "is_done": is_done}
    if is_done:
        return {**answer, "open_requests": 0}
    if role is not config.role and not config.enable_role_switch:
        raise RequestError(
            f"role={str(role)!r}: this {config.role} server was started without "
            "--enable-role-switch",
            field="role",
        )
    if order.is_given:
        raise RequestError("role: the server drains already", status=503, field="role")
    order.give_role(role)
    return {**answer, "open_requests": context.scheduler.open_request_count}


def read_targets(body: JsonObject) -> tuple[str, ...] | None:
    """None if the body names none. Raises: RequestError."""
    to = read(DrainFields, body).to
    if to is None:
        return None
    urls: list[str] = []
    for index, text in enumerate(to):
        try:
            urls.append(server_url(text))
        except ValueError as exc:
            raise RequestError(f"to[{index}]={text[:128]!r}: {exc}", field="to") from exc
    return tuple(dict.fromkeys(urls))


class ResumeRun:
    """One body on its way to an answer."""

    def __init__(self, context: FrontendContext, sample: Sample, trace_parent: str) -> None:
        self._context = context
        self._sample = sample
        self._trace_parent = trace_parent

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Raises: RequestError if it is not taken."""
        sample = self._sample
        asked = Asked(
            sample.token_ids,
            sample.sampling,
            sample.timeout_s,
            prefix_digests=sample.prefix_digests,
            trace_parent=self._trace_parent,
            claim=sample.claim,
        )
        (handle,) = self._context.scheduler.submit_samples(
            asked,
            [SampleId(sample.rid, sample.sampling.seed)],
            output_ids=sample.output_ids,
            is_streaming=True,
        )
        changed = asyncio.Event()
        with handle:
            handle.tell(changed.set)
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(PULSE_S):
                        await changed.wait()
                changed.clear()
                is_ended = handle.is_ended
                told = b"".join(
                    EVENT_START + msgspec.json.encode(message) + EVENT_END
                    for message in handle.take()
                )
                yield told + DONE if is_ended else told or PULSE
                if is_ended:
                    return
