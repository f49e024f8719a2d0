"""POST /tokenize and /detokenize, and the same under /v1: the tokenizer alone.

vLLM's shapes, with the lists that SGLang takes beside them. Nothing is sent to a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Request, Response
from msgspec import Meta

from common.frontend.apis.openai_chat import TemplateFields, render
from common.frontend.bodies.body import TOKEN_IDS, Body, Json, read, refusal, schema_of
from common.frontend.bodies.fields import JsonObject, JsonValue, check_token_ids
from common.frontend.bodies.prompts import check_sample_count
from common.frontend.bodies.sample import Limits
from common.frontend.bodies.tools import read_tools
from common.frontend.bodies.validation import check_model
from common.frontend.context import FrontendContext
from common.frontend.http.errors import json_response
from common.frontend.requests.generation import request_limits
from common.frontend.text.parsing.parsing import Parsers
from common.frontend.text.tokenizer import Tokenizer

Answer = Callable[[JsonObject, Tokenizer, Limits], dict[str, object]]
LISTS: JsonObject = {"anyOf": [TOKEN_IDS, {"type": "array", "items": TOKEN_IDS}]}
TOKENS = "a list of token ids, or a list of such lists"


class TokenizeFields(Body, frozen=True):
    """One of prompt and messages."""

    model: str = ""
    prompt: str | list[str] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class DetokenizeFields(Body, frozen=True, kw_only=True):
    model: str = ""
    tokens: Annotated[list[Json], Meta(description=TOKENS, extra_json_schema=LISTS)]
    skip_special_tokens: bool = False


TOKENIZE = schema_of(TemplateFields, TokenizeFields, optional=("messages",))
DETOKENIZE = schema_of(DetokenizeFields)


def build_router(context: FrontendContext) -> APIRouter:
    router = APIRouter()
    _add_routes(router, context, "/tokenize", tokenize_body)
    _add_routes(router, context, "/detokenize", detokenize_body)
    return router


def _add_routes(router: APIRouter, context: FrontendContext, path: str, answer: Answer) -> None:
    @router.post(path, name=path[1:])
    @router.post(f"/v1{path}", name=path[1:])
    async def run(request: Request) -> Response:
        limits = request_limits(context)
        tokenizer = context.tokenizer
        return json_response(
            await context.bodies.read(request, lambda body: answer(body, tokenizer, limits))
        )


def tokenize_body(body: JsonObject, tokenizer: Tokenizer, limits: Limits) -> dict[str, object]:
    """Raises: RequestError."""
    given = read(TokenizeFields, body)
    check_model(given.model, limits)
    reply: dict[str, object] = {"max_model_len": limits.request_token_max}
    has_messages = body.get("messages") is not None
    if (given.prompt is not None) == has_messages:
        raise refusal("prompt", body.get("prompt"), "given, or messages; exactly one of them")
    # Beside a prompt nothing of it is used, but what is given must be right.
    template = read(TemplateFields, body if has_messages else {**body, "messages": [{}]})
    tools = read_tools(template, Parsers()).shown
    has_special, has_strings = given.add_special_tokens, given.return_token_strs
    if has_special is None:
        has_special = not has_messages  # a template writes them itself
    prompt = given.prompt
    if prompt is None:
        prompt = render(template, tokenizer, tools)
    if isinstance(prompt, str):
        return reply | _told(prompt, has_special, has_strings, tokenizer)
    check_sample_count(len(prompt))
    told = [_told(one, has_special, has_strings, tokenizer) for one in prompt]
    names = ("count", "tokens", "token_strs")
    return reply | {name: [item[name] for item in told] for name in names}


def _told(
    text: str, has_special: bool, has_strings: bool, tokenizer: Tokenizer
) -> dict[str, object]:
    token_ids = tokenizer.encode(text, add_special_tokens=has_special)
    strings = [tokenizer.token_text(token_id) for token_id in token_ids] if has_strings else None
    return {"count": len(token_ids), "tokens": token_ids, "token_strs": strings}


def detokenize_body(body: JsonObject, tokenizer: Tokenizer, limits: Limits) -> dict[str, object]:
    """The text under both names: vLLM's is prompt, SGLang's is text. Raises: RequestError."""
    given = read(DetokenizeFields, body)
    check_model(given.model, limits)

    def text_of(value: JsonValue, name: str) -> str:
        if not isinstance(value, list):
            raise refusal("tokens", given.tokens, TOKENS)
        token_ids = check_token_ids(value, name, limits.vocab_size)
        return tokenizer.decode(token_ids, skip_special_tokens=given.skip_special_tokens)

    if given.tokens and isinstance(given.tokens[0], list):
        check_sample_count(len(given.tokens))
        texts = [text_of(value, f"tokens[{i}]") for i, value in enumerate(given.tokens)]
        return {"prompt": texts, "text": texts}
    text = text_of(given.tokens, "tokens")
    return {"prompt": text, "text": text}
