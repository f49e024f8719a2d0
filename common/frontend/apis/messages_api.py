"""POST /v1/messages and /v1/messages/count_tokens, Anthropic's Messages API."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from common.frontend.apis.call_route import add_call_route
from common.frontend.apis.messages_body import MESSAGES_BODY, count_tokens, parse_messages
from common.frontend.apis.messages_shape import MessagesShape
from common.frontend.apis.openai_call import OpenAiCall
from common.frontend.apis.typed_run import TypedRun
from common.frontend.bodies.fields import JsonObject
from common.frontend.bodies.sample import Limits
from common.frontend.bodies.unknown_names import known_names
from common.frontend.context import FrontendContext
from common.frontend.http.errors import json_response
from common.frontend.requests.generation import request_limits

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"
NAME_PREFIX = "msg_"


def build_router(context: FrontendContext) -> APIRouter:
    def messages(body: JsonObject, limits: Limits, name: str) -> tuple[OpenAiCall, MessagesShape]:
        call, parsing, shows_thinking = parse_messages(
            body, context.tokenizer, limits, name, context.parsers
        )
        model = context.config.served_model_name
        return call, MessagesShape(call, parsing, model=model, shows_thinking=shows_thinking)

    router = APIRouter()
    known = known_names(MESSAGES_BODY)
    add_call_route(router, context, PATH, NAME_PREFIX, messages, TypedRun, known)

    @router.post(COUNT_PATH, name="count_tokens")
    async def count(request: Request) -> Response:
        limits = request_limits(context)
        return json_response(
            await context.bodies.read(
                request, lambda body: count_tokens(body, context.tokenizer, limits)
            )
        )

    return router
