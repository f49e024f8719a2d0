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
from common.frontend.apis.openai_call import (
    OPENAI,
    OpenAiCall,
    make_call,
    read_choice,
    read_encoding,
)
from common.frontend.apis.openai_chat_shape import ChatShape
from common.frontend.apis.openai_logprobs import LikelyCount, LogprobWriter, read_told
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
from common.frontend.bodies.prompts import (
    PROMPT_IDS,
    PROMPT_TEXT,
    prompt_schema,
    read_computed_prompt,
    read_prompts,
)
from common.frontend.bodies.sample import Limits, Sample
from common.frontend.bodies.unknown_names import known_names
from common.frontend.context import FrontendContext
from common.frontend.requests.generation import Continuation
from common.frontend.text.tokenizer import Tokenizer
from common.request_bounds import INT64_MAX

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
    logprobs: LikelyCount | None = None
    best_of: Annotated[
        Positive | None, Meta(extra_json_schema={"description": "No other number than n."})
    ] = None
    suffix: Refused = None


COMPLETION = schema_of(*OPENAI, CompletionFields, spread=(Meeting, SaltFields))


def build_router(context: FrontendContext) -> APIRouter:
    """Of both APIs."""

    def completion(body: JsonObject, limits: Limits, name: str) -> tuple[OpenAiCall, Shape]:
        call, has_echo = parse_completion(body, context.tokenizer, limits, name)
        writer = LogprobWriter(context.tokenizer, call.told)
        return call, CompletionShape(context.tokenizer, writer, has_echo=has_echo)

    def chat(body: JsonObject, limits: Limits, name: str) -> tuple[OpenAiCall, Shape]:
        call, parsing = openai_chat.parse_chat(
            body, context.tokenizer, limits, name, context.parsers
        )
        return call, ChatShape(parsing, LogprobWriter(context.tokenizer, call.told), call.echo)

    router = APIRouter()
    known = known_names(COMPLETION)
    add_call_route(router, context, PATH, NAME_PREFIX, completion, OpenAiRun, known)
    chat_path, chat_prefix = openai_chat.PATH, openai_chat.NAME_PREFIX
    known = known_names(openai_chat.CHAT)
    add_call_route(router, context, chat_path, chat_prefix, chat, OpenAiRun, known)
    return router


def parse_completion(
    body: JsonObject, tokenizer: Tokenizer, limits: Limits, name: str
) -> tuple[OpenAiCall, bool]:
    """The call, and whether the prompt is part of the reply. Raises: RequestError."""
    given = read(CompletionFields, body)
    if given.max_tokens == 0 and not given.echo:
        raise refusal("max_tokens", 0, f"an integer in 1..{INT64_MAX}")
    has_output = given.max_tokens != 0
    told = read_told(body, "logprobs", given.logprobs, limits, is_told=has_output)
    choice = read_choice(
        body,
        limits,
        "max_tokens",
        given.max_tokens,
        default=MAX_TOKENS_DEFAULT,
        told=told,
        has_echo=given.echo,
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
    encoding = read_encoding(body, given.max_tokens, limits, has_special=True)
    prompts, _ = read_prompts(
        prompt,
        "prompt",
        tokenizer,
        limits,
        is_text=is_text,
        encoding=encoding,
        computed=read_computed_prompt(body, limits),
    )
    return make_call(body, prompts, choice, limits, name, told), given.echo


class CompletionShape:
    """text_completion objects. has_echo: the text begins with the prompt."""

    object_name = "text_completion"
    chunk_object_name = "text_completion"
    has_prompt_in_choice = True

    def __init__(self, tokenizer: Tokenizer, writer: LogprobWriter, *, has_echo: bool) -> None:
        self._tokenizer = tokenizer
        self._writer = writer
        self._has_echo = has_echo

    def choice(self, one: Continuation) -> dict[str, object]:
        whole = Growth(text=one.text, start=0, stop=one.settled_count(), is_first=True)
        told = self._told(one, whole)
        return {**told, "stop_reason": stop_reason(one), "token_ids": None, **PROMPT_NULLS}

    def chunks(self, one: Continuation, growth: Growth) -> list[dict[str, object]]:
        has_logprobs = self._writer.tells_output and growth.stop > growth.start
        has_prompt = growth.is_first and self._has_echo
        has_more = has_logprobs or has_prompt or growth.has_ids or one.is_ended
        if not (growth.text or has_more):
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
        if not self._writer.tells_output:
            return None
        prompt = one.prompt_logprobs if growth.is_first and self._has_echo else []
        offsets: list[int] = []
        length = 0
        for entry in prompt:
            offsets.append(length)
            length += len(self._tokenizer.token_text(entry.token_id))
        offsets += [echo_length + at for at in one.text_starts[growth.start : growth.stop]]
        output = one.logprobs[growth.start : growth.stop]
        top_by_text = self._writer.top_by_text
        return {
            "text_offset": offsets,
            "token_logprobs": [entry.logprob for entry in (*prompt, *output)],
            "tokens": [self._writer.text(entry.token_id) for entry in (*prompt, *output)],
            "top_logprobs": [
                *(top_by_text(entry, is_prompt=True) for entry in prompt),
                *(top_by_text(entry, is_prompt=False) for entry in output),
            ],
        }
