"""POST /tokenize and /detokenize, and the same under /v1: what the tokenizer makes of a text.

vLLM's shapes, with the lists that SGLang takes beside them. Nothing is sent to a model.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from common.frontend.apis.openai_chat import render
from common.frontend.bodies.fields import Fields, JsonValue, check_token_ids
from common.frontend.bodies.sample import Limits
from common.frontend.bodies.tools import read_tools
from common.frontend.bodies.validation import check_model, check_sample_count
from common.frontend.context import FrontendContext
from common.frontend.http.errors import json_response
from common.frontend.requests.generation import request_limits
from common.frontend.text.tokenizer import Tokenizer


def build_router(context: FrontendContext) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    @router.post("/v1/tokenize")
    async def tokenize(request: Request) -> Response:
        limits = request_limits(context)
        tokenizer = context.tokenizer
        return json_response(
            await context.bodies.read(
                request, lambda body: tokenize_body(Fields(body), tokenizer, limits)
            )
        )

    @router.post("/detokenize")
    @router.post("/v1/detokenize")
    async def detokenize(request: Request) -> Response:
        limits = request_limits(context)
        tokenizer = context.tokenizer
        return json_response(
            await context.bodies.read(
                request, lambda body: detokenize_body(Fields(body), tokenizer, limits)
            )
        )

    return router


def tokenize_body(fields: Fields, tokenizer: Tokenizer, limits: Limits) -> dict[str, object]:
    """Raises: RequestError."""
    check_model(fields, limits)
    reply: dict[str, object] = {"max_model_len": limits.request_token_max}
    has_strings = fields.boolean("return_token_strs", False)
    if fields.has("prompt") == fields.has("messages"):
        raise fields.error("prompt", "given, or messages; exactly one of them")
    if fields.has("messages"):
        text = render(fields, tokenizer, read_tools(fields, "").shown)
        has_special = fields.boolean("add_special_tokens", False)  # the template writes them
        return reply | _told(text, has_special, has_strings, tokenizer)
    has_special = fields.boolean("add_special_tokens", True)
    prompt = fields.get("prompt")
    if not isinstance(prompt, list):
        return reply | _told(fields.text("prompt", ""), has_special, has_strings, tokenizer)
    check_sample_count(len(prompt))
    told: list[dict[str, object]] = []
    for one in prompt:
        if not isinstance(one, str):
            raise fields.error("prompt", "a string or a list of strings")
        told.append(_told(one, has_special, has_strings, tokenizer))
    names = ("count", "tokens", "token_strs")
    return reply | {name: [item[name] for item in told] for name in names}


def _told(
    text: str, has_special: bool, has_strings: bool, tokenizer: Tokenizer
) -> dict[str, object]:
    token_ids = tokenizer.encode(text, add_special_tokens=has_special)
    strings = [tokenizer.token_text(token_id) for token_id in token_ids] if has_strings else None
    return {"count": len(token_ids), "tokens": token_ids, "token_strs": strings}


def detokenize_body(fields: Fields, tokenizer: Tokenizer, limits: Limits) -> dict[str, object]:
    """The text under both names: vLLM's is prompt, SGLang's is text. Raises: RequestError."""
    check_model(fields, limits)
    skips = fields.boolean("skip_special_tokens", False)
    tokens = fields.get("tokens")
    if not isinstance(tokens, list):
        raise fields.error("tokens", "a list of token ids, or a list of such lists")

    def text_of(value: JsonValue, name: str) -> str:
        if not isinstance(value, list):
            raise fields.error("tokens", "a list of token ids, or a list of such lists")
        token_ids: Sequence[int] = check_token_ids(value, name, limits.vocab_size)
        return tokenizer.decode(token_ids, skip_special_tokens=skips)

    if tokens and isinstance(tokens[0], list):
        check_sample_count(len(tokens))
        texts = [text_of(value, f"tokens[{i}]") for i, value in enumerate(tokens)]
        return {"prompt": texts, "text": texts}
    text = text_of(tokens, "tokens")
    return {"prompt": text, "text": text}
