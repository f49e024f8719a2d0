"""The route of an API that turns a body into an `OpenAiCall`: read, checked, run, answered.

Knows nothing of dialects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fastapi import APIRouter, Request, Response

from common.frontend.apis.openai_call import OpenAiCall
from common.frontend.bodies.bootstrap_address import limits_of
from common.frontend.bodies.fields import JsonObject
from common.frontend.bodies.reader import request_name, trace_parent
from common.frontend.bodies.sample import Limits
from common.frontend.bodies.unknown_names import unknown_names
from common.frontend.context import FrontendContext
from common.frontend.http.api_keys import client_of
from common.frontend.http.headers import headers_of, warned
from common.frontend.http.streaming import Run, answer
from common.frontend.requests.generation import request_limits

S = TypeVar("S")


def add_call_route(
    router: APIRouter,
    context: FrontendContext,
    path: str,
    name_prefix: str,
    parse: Callable[[JsonObject, Limits, str], tuple[OpenAiCall, S]],
    make_run: Callable[[FrontendContext, OpenAiCall, S, str], Run],
    known: frozenset[str] = frozenset(),
) -> None:
    """Answers POSTs to `path`.

    name_prefix: of the names that bodies get. parse: from a body, what it is checked against, and
    its name, to the call and the shape of its answer. make_run: of a call, its shape, and the span
    that it belongs to. known: names of fields; a client is told of others, if there are any.
    """
    is_strict = context.config.strict_fields

    @router.post(path, name=parse.__name__)
    async def complete(request: Request) -> Response:
        client = client_of(headers_of(request.scope), context.config)
        limits = request_limits(context, lambda: request.url.hostname, client)
        name = request_name(request, name_prefix)

        def read(body: JsonObject) -> tuple[OpenAiCall, S, list[str]]:
            unknown = unknown_names(body, known, is_strict=is_strict)
            return *parse(body, limits_of(body, limits), name), unknown

        call, shape, unknown = await context.bodies.read(request, read)
        await context.check_grammars(call.samples)
        run = make_run(context, call, shape, trace_parent(request))
        response = await answer(request, run, is_streaming=call.is_streaming)
        return warned(response, unknown)
