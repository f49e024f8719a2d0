"""POST /v1/completions, and the router of both OpenAI APIs.

Beyond OpenAI's own fields it takes SGLang's (top_k, min_p, ignore_eos, ...) and, with `echo` and
`logprobs`, tells the log-probabilities of the prompt, which evaluation harnesses score by.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from common.errors import RequestError
from common.frontend.apis import openai_chat
from common.frontend.apis.openai_call import LogprobChoice, OpenAiCall, make_call, read_choice
from common.frontend.apis.openai_run import Growth, answer, finish_fields
from common.frontend.bodies.fields import NOT_SUPPORTED, Fields, JsonObject, is_integer
from common.frontend.bodies.reader import request_name
from common.frontend.bodies.sample import Limits, Sample
from common.frontend.bodies.sampling import SamplingNames
from common.frontend.bodies.validation import (
    Prompt,
    check_prompt_ids,
    check_sample_count,
    encode_prompt,
)
from common.frontend.context import FrontendContext
from common.frontend.requests.generation import Continuation, request_limits
from common.frontend.text.tokenizer import Tokenizer
from common.request import TokenLogprobs
from common.request_bounds import TOP_LOGPROB_COUNT_MAX

PATH = "/v1/completions"
NAME_PREFIX = "cmpl-"
MAX_TOKENS_DEFAULT = 16  # OpenAI's
NAMES = SamplingNames(("max_tokens",), "min_tokens", ("seed",))


def build_router(context: FrontendContext) -> APIRouter:
    router = APIRouter()

    @router.post(PATH)
    async def completions(request: Request) -> Response:
        limits = request_limits(context, request.url.hostname)
        name = request_name(request, NAME_PREFIX)
        call, has_echo = await context.bodies.read(
            request, lambda body: parse_completion(body, context.tokenizer, limits, name)
        )
        return await answer(
            request, context, call, CompletionShape(context.tokenizer, has_echo=has_echo)
        )

    router.include_router(openai_chat.build_router(context))
    return router


def parse_completion(
    body: JsonObject, tokenizer: Tokenizer, limits: Limits, name: str
) -> tuple[OpenAiCall, bool]:
    """The call, and whether the prompt is part of the reply. Raises: RequestError."""
    fields = Fields(body)
    fields.refuse(("suffix",), NOT_SUPPORTED)
    has_echo = fields.boolean("echo", False)
    if not has_echo and is_integer(fields.get("max_tokens")):
        fields.integer("max_tokens", 1, 1)
    logprobs = LogprobChoice(
        top_count=fields.optional_integer("logprobs", 0, TOP_LOGPROB_COUNT_MAX),
        has_prompt=has_echo,
    )
    choice = read_choice(fields, limits, NAMES, logprobs, max_new_tokens_default=MAX_TOKENS_DEFAULT)
    best_of = fields.integer("best_of", choice.n, 1)
    if best_of != choice.n:
        raise RequestError(
            f"best_of={best_of}: {NOT_SUPPORTED}; must be n={choice.n}", field="best_of"
        )
    prompts = read_prompts(fields, tokenizer, limits)
    return make_call(fields, prompts, choice, limits, name), has_echo


def read_prompts(fields: Fields, tokenizer: Tokenizer, limits: Limits) -> list[Prompt]:
    """One prompt or several, each as text or as token ids."""
    value = fields.get("prompt")
    allowed = "a string, a list of strings, a list of token ids, or a list of such lists"
    if value is None or value == []:
        raise fields.error("prompt", f"{allowed}, not empty")
    if isinstance(value, str):
        return [encode_prompt(value, "prompt", tokenizer, limits)]
    if not isinstance(value, list):
        raise fields.error("prompt", allowed)
    if not isinstance(value[0], str | list):
        return [check_prompt_ids(value, "prompt", limits)]
    check_sample_count(len(value))
    return [
        check_prompt_ids(one, f"prompt[{i}]", limits)
        if isinstance(value[0], list)
        else encode_prompt(one, f"prompt[{i}]", tokenizer, limits)
        for i, one in enumerate(value)
    ]


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
        return self._told(one, whole)

    def chunks(self, one: Continuation, growth: Growth) -> list[dict[str, object]]:
        has_logprobs = bool(one.logprobs) and growth.stop > growth.start
        has_prompt = growth.is_first and self._has_echo
        if not (growth.text or has_logprobs or has_prompt or one.is_ended):
            return []
        return [self._told(one, growth)]

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
