"""POST /v1/responses, OpenAI's Responses API without a store."""

from __future__ import annotations

from fastapi import APIRouter

from common.frontend.apis.call_route import add_call_route
from common.frontend.apis.openai_call import OpenAiCall
from common.frontend.apis.responses_body import RESPONSES, parse_responses
from common.frontend.apis.responses_shape import ResponsesShape
from common.frontend.apis.typed_run import TypedRun
from common.frontend.bodies.fields import JsonObject
from common.frontend.bodies.sample import Limits
from common.frontend.bodies.unknown_names import known_names
from common.frontend.context import FrontendContext

PATH = "/v1/responses"
NAME_PREFIX = "resp_"


def build_router(context: FrontendContext) -> APIRouter:
    def respond(body: JsonObject, limits: Limits, name: str) -> tuple[OpenAiCall, ResponsesShape]:
        tokenizer, parsers = context.tokenizer, context.parsers
        call, parsing, given = parse_responses(body, tokenizer, limits, name, parsers)
        model, wall = context.config.served_model_name, context.clock.wall
        return call, ResponsesShape(call, parsing, given, tokenizer, model=model, wall=wall)

    router = APIRouter()
    add_call_route(router, context, PATH, NAME_PREFIX, respond, TypedRun, known_names(RESPONSES))
    return router
