"""POST /v1/completions, and the router of both OpenAI APIs.

Beyond OpenAI's own fields it takes SGLang's (top_k, min_p, ignore_eos, ...) and, with `echo` and
`logprobs`, tells the log-probabilities of the prompt, which evaluation harnesses score by.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from msgspec import Meta

from common.errors import RequestError
from common.frontend.apis import openai_chat
from common.frontend.apis.call_route import add_call_route
from common.frontend.apis.openai_call import OPENAI, OpenAiCall, make_call, read_choice
from common.frontend.apis.openai_chat_shape import ChatShape
from common.frontend.apis.openai_run import (
    PROMPT_NULLS,
    Growth,
    OpenAiRun,
    Shape,
    finish_fields,
    stop_reason,
)
from common.frontend.bodies.body import (
    NOT_SUPPORTED,
    Body,
    Count,
    Json,
    Positive,
    Refused,
    read,
    refusal,
    schema_of,
)
from common.frontend.bodies.bootstrap_address import Meeting
from common.frontend.bodies.fields import JsonObject
from common.frontend.bodies.prefixes import SaltFields
from common.frontend.bodies.sample import Limits, Sample
from common.frontend.bodies.validation import PROMPT_IDS, PROMPT_TEXT, prompt_schema, read_prompts
from common.frontend.context import FrontendContext
from common.frontend.requests.generation import Continuation
from common.frontend.text.tokenizer import Tokenizer
from common.request import TokenLogprobs
from common.request_bounds import INT64_MAX, TOP_LOGPROB_COUNT_MAX

PATH = "/v1/completions"
NAME_PREFIX = "cmpl-"
MAX_TOKENS_DEFAULT = 16  # OpenAI's
PROMPTS = "a string, a list of strings, a list of token ids, or a list of such lists"


class CompletionFields(Body, frozen=True):
    prompt: Annotated[
        Json, prompt_schema(PROMPT_TEXT, PROMPT_IDS, description=f"{PROMPTS}, not empty")
    ]
    max_tokens: Count | None = None
    echo: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROB_COUNT_MAX)] | None = None
    best_of: Annotated[
        Positive | None, Meta(extra_json_schema={"description": "No other number than n."})
    ] = None
    suffix: Refused = None


COMPLETION = schema_of(*OPENAI, CompletionFields, spread=(Meeting, SaltFields))


def build_router(context: FrontendContext) -> APIRouter:
    """Of both APIs."""

    def completion(body: JsonObject, limits: Limits, name: str) -> tuple[OpenAiCall, Shape]:
        call, has_echo = parse_completion(body, context.tokenizer, limits, name)
        return call, CompletionShape(context.tokenizer, has_echo=has_echo)

    def chat(body: JsonObject, limits: Limits, name: str) -> tuple[OpenAiCall, Shape]:
        call, parsing = openai_chat.parse_chat(
            body, context.tokenizer, limits, name, context.parsers
        )
        return call, ChatShape(context.tokenizer, parsing)

    router = APIRouter()
    add_call_route(router, context, PATH, NAME_PREFIX, completion, OpenAiRun)
    chat_path, chat_prefix = openai_chat.PATH, openai_chat.NAME_PREFIX
    add_call_route(router, context, chat_path, chat_prefix, chat, OpenAiRun)
    return router


def parse_completion(
    body: JsonObject, tokenizer: Tokenizer, limits: Limits, name: str
) -> tuple[OpenAiCall, bool]:
    """The call, and whether the prompt is part of the reply. Raises: RequestError."""
    given = read(CompletionFields, body)
    if given.max_tokens == 0 and not given.echo:
        raise refusal("max_tokens", 0, f"an integer in 1..{INT64_MAX}")
    choice = read_choice(
        body,
        limits,
        "max_tokens",
        given.max_tokens,
        default=MAX_TOKENS_DEFAULT,
        top_count=given.logprobs,
        has_prompt=given.echo,
    )
    if given.best_of not in (None, choice.n):
        raise RequestError(
            f"best_of={given.best_of}: {NOT_SUPPORTED}; must be n={choice.n}", field="best_of"
        )
    prompt = given.prompt
    first = prompt[0] if isinstance(prompt, list) and prompt else prompt
    if prompt == [] or not isinstance(prompt, str | list):
        raise refusal("prompt", prompt, f"{PROMPTS}, not empty")
    is_text = isinstance(first, str)
    prompts, _ = read_prompts(prompt, "prompt", tokenizer, limits, is_text=is_text)
    return make_call(body, prompts, choice, limits, name), given.echo


class CompletionShape:
    """text_completion objects. has_echo: the text begins with the prompt."""

    object_name = "text_completion"
    chunk_object_name = "text_completion"
    has_prompt_in_choice = True

    def __init__(self, tokenizer: Tokenizer, *, has_echo: bool) -> None:
        self._tokenizer = tokenizer
        self._has_echo = has_echo

    def choice(self, one: Continuation) -> dict[str, object]:
        whole = Growth(text=one.text, start=0, stop=one.settled_count(), is_first=True)
        told = self._told(one, whole)
        return {**told, "stop_reason": stop_reason(one), "token_ids": None, **PROMPT_NULLS}

    def chunks(self, one: Continuation, growth: Growth) -> list[dict[str, object]]:
        has_logprobs = bool(one.logprobs) and growth.stop > growth.start
        has_prompt = growth.is_first and self._has_echo
        if not (growth.text or has_logprobs or has_prompt or one.is_ended):
            return []
        return [self._told(one, growth)]

    def reasoning_token_count(self, one: Continuation) -> int:
        return 0

    def _told(self, one: Continuation, growth: Growth) -> dict[str, object]:
        echo = self._echo(one.sample) if self._has_echo else ""
        return {
            "index": one.sample.index,
            "text": echo + growth.text if growth.is_first else growth.text,
            "logprobs": self._logprobs(one, growth, len(echo)),
            **finish_fields(one),
        }

    def _echo(self, sample: Sample) -> str:
        if sample.prompt_text:
            return sample.prompt_text
        return self._tokenizer.decode(
            sample.token_ids, skip_special_tokens=sample.text.skip_special_tokens
        )

    def _logprobs(
        self, one: Continuation, growth: Growth, echo_length: int
    ) -> dict[str, object] | None:
        """OpenAI's four parallel lists, for the prompt too if it is told of."""
        if not one.sample.sampling.return_logprob:
            return None
        prompt = one.prompt_logprobs if growth.is_first else []
        offsets: list[int] = []
        length = 0
        for entry in prompt:
            offsets.append(length)
            length += len(self._tokenizer.token_text(entry.token_id))
        offsets += [echo_length + at for at in one.text_starts[growth.start : growth.stop]]
        entries = [*prompt, *one.logprobs[growth.start : growth.stop]]
        has_top = one.sample.sampling.top_logprobs_num > 0
        return {
            "text_offset": offsets,
            "token_logprobs": [entry.logprob for entry in entries],
            "tokens": [self._tokenizer.token_text(entry.token_id) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries] if has_top else None,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float] | None:
        """Token text -> log-probability, the token's own included; the likelier of equal texts."""
        if entry.logprob is None:
            return None
        top: dict[str, float] = {}
        for token_id, logprob in [*entry.top, (entry.token_id, entry.logprob)]:
            text = self._tokenizer.token_text(token_id)
            top[text] = max(logprob, top.get(text, logprob))
        return top
