"""The document at /openapi.json: the routes, the schemas of their bodies, and the form of errors.

The structs that bodies are read as define their schemas.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from common.frontend.apis import (
    fleet_api,
    info,
    messages_api,
    messages_body,
    openai_api,
    openai_chat,
    responses_api,
    responses_body,
    sglang_api,
    token_api,
    weights_api,
)
from common.frontend.apis.cross_rules import CROSS_RULES
from common.frontend.bodies import resume, validation
from common.frontend.bodies.fields import JsonObject
from common.frontend.http.answers import EVENT_STREAM
from common.frontend.peers import routes as peers

PATH = "/openapi.json"
BODY_METHODS = frozenset({"post", "put"})

ERROR: JsonObject = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string", "minLength": 1},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message"],
        }
    },
    "required": ["error"],
}
ERROR_RESPONSE: JsonObject = {
    "description": "The error. Routes under /v1 give all of its members, others the message only; "
    "/v1/messages gives type and message, as Anthropic does.",
    "content": {"application/json": {"schema": ERROR}},
}
BODIES: dict[str, JsonObject] = {
    sglang_api.PATH: validation.GENERATE,
    openai_api.PATH: openai_api.COMPLETION,
    openai_chat.PATH: openai_chat.CHAT,
    responses_api.PATH: responses_body.RESPONSES,
    messages_api.PATH: messages_body.MESSAGES_BODY,
    messages_api.COUNT_PATH: messages_body.COUNT_BODY,
    "/tokenize": token_api.TOKENIZE,
    "/v1/tokenize": token_api.TOKENIZE,
    "/detokenize": token_api.DETOKENIZE,
    "/v1/detokenize": token_api.DETOKENIZE,
    "/abort_request": info.ABORT,
    fleet_api.RESUME_PATH: resume.RESUME,
    fleet_api.DRAIN_PATH: fleet_api.DRAIN,
    fleet_api.SWITCH_PATH: fleet_api.SWITCH,
    weights_api.PAUSE_PATH: weights_api.PAUSE,
    weights_api.CONTINUE_PATH: weights_api.CONTINUE,
    weights_api.UPDATE_PATH: weights_api.UPDATE,
    weights_api.VERSION_PATH: weights_api.VERSION,
    peers.PATH: peers.ADDRESS,
}
UNAVAILABLE: JsonObject = {
    **ERROR_RESPONSE,
    "description": "The server starts, stops, waits for a prefill server, is full or can't answer "
    "in time: ask again, here or elsewhere, after `Retry-After` seconds.",
    "headers": {"Retry-After": {"schema": {"type": "integer", "minimum": 1}}},
}
FAILED: JsonObject = {
    **ERROR_RESPONSE,
    "description": "The transfer or the computation of this request failed: ask again.",
}
TOO_LATE: JsonObject = {
    **ERROR_RESPONSE,
    "description": "The request had not ended within its `timeout`, or --request-timeout.",
}
# Failures that are meant: of what asks the scheduler, and of what generates.
ASKING = {"503": UNAVAILABLE}
GENERATING = {"500": FAILED, "503": UNAVAILABLE, "504": TOO_LATE}
ASKING_PATHS = frozenset(
    {"/health", "/ready", "/ping", "/health_generate", "/flush_cache", fleet_api.SWITCH_PATH}
)
FLUSH_TIMEOUT: JsonObject = {
    "name": "timeout",
    "in": "query",
    "required": False,
    "description": "Seconds to wait for requests under way.",
    "schema": {
        "anyOf": [
            {"type": "number", "exclusiveMinimum": 0, "maximum": info.FLUSH_TIMEOUT_S_MAX},
            {"const": "", "description": "As if it were not given."},
        ]
    },
}
PEER_ADDRESS: JsonObject = {
    "name": "address",
    "in": "query",
    "required": True,
    "description": "host:port of the prefill server.",
    "schema": {"type": "string"},
}


class DescribedApp(FastAPI):
    """An application whose document tells bodies and errors too. Requests come to it through what
    `put_in_front` made, so that those answered there do not pass FastAPI's own layers."""

    _front: ASGIApp | None = None

    def put_in_front(self, make: Callable[[ASGIApp], ASGIApp]) -> None:
        """make: builds what requests pass around this application."""
        self._front = make(super().__call__)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._front or super().__call__)(scope, receive, send)

    def openapi(self) -> JsonObject:
        if self.openapi_schema is None:
            with warnings.catch_warnings(action="ignore"):  # two methods of one route share an id
                describe(super().openapi()["paths"])
        return super().openapi()


def describe(paths: dict[str, dict[str, JsonObject]]) -> None:
    """Add to every operation its answers, and the schema of its body if it reads one."""
    for path, operations in paths.items():
        for method, operation in operations.items():
            operation["operationId"] = re.sub(r"\W+", "_", f"{method}{path}").rstrip("_")
            responses = operation["responses"]
            assert isinstance(responses, dict), "FastAPI tells of one answer at least"
            _describe_answers(path, method, responses)
            if path == "/flush_cache":
                operation["parameters"] = [FLUSH_TIMEOUT]
            if (path, method) == (peers.PATH, "delete"):
                operation["parameters"] = [PEER_ADDRESS]
            if path in BODIES and method in BODY_METHODS:
                operation["requestBody"] = _body_of(path)


def _describe_answers(path: str, method: str, responses: JsonObject) -> None:
    """Content types of a success, failures that are meant, and the form of all others."""
    responses.pop("422", None)  # FastAPI's own; ours are told alike
    success = responses["200"]
    assert isinstance(success, dict)
    if method == "head":
        success.pop("content", None)
    elif is_streaming(path):
        content = success["content"]
        assert isinstance(content, dict)
        content[EVENT_STREAM] = {"schema": {"type": "string"}}
    if is_streaming(path) or path == fleet_api.RESUME_PATH:
        responses.update(GENERATING)
    elif path in ASKING_PATHS or path in BODIES:
        responses.update(ASKING)
    responses["default"] = ERROR_RESPONSE


def is_streaming(path: str) -> bool:
    """Whether a body says if its answer is a stream of events."""
    fields = BODIES.get(path, {}).get("properties", {})
    return isinstance(fields, dict) and "stream" in fields


def _body_of(path: str) -> JsonObject:
    """The schema of a body, with what its fields mean for each other."""
    schema = BODIES[path]
    rules = CROSS_RULES.get(path)
    if rules is not None:
        described = schema.get("description", "")
        texts = "\n".join(f"- {text}" for text in rules.texts)
        schema = {**schema, **rules.schema, "description": f"{described}\n\n{texts}".strip()}
    content: JsonObject = {"application/json": {"schema": schema}}
    # A server drains without being told anything more.
    return {"required": path != fleet_api.DRAIN_PATH, "content": content}
