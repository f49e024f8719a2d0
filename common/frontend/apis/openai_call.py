"""The common part of bodies of /v1/completions and /v1/chat/completions, checked.

Every refusal is a `RequestError` that names the field, its value and its range. Unknown keys
are let through; those known to change the answer in ways this server can't follow are not.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from common.frontend.apis.openai_logprobs import NOTHING_TOLD, LogprobOptions, Told
from common.frontend.bodies.body import Body, Count, Object, nested, read, refusal, refused
from common.frontend.bodies.bootstrap_address import transfer_params
from common.frontend.bodies.constraints import OpenAiGrammars, read_openai_constraint
from common.frontend.bodies.fields import JsonObject
from common.frontend.bodies.prompts import Encoding, Prompt
from common.frontend.bodies.sample import Limits, Sample
from common.frontend.bodies.sampling import (
    NOT_ZERO,
    OutputBounds,
    Sampling,
    SamplingChoice,
    Seed,
    read_sampling,
)
from common.frontend.bodies.validation import RequestFields, check_model, make_samples
from common.request_bounds import INT64_MAX

WHOLE_CONTEXT = -1
CUT = f"{WHOLE_CONTEXT} for as many tokens as fit before the output, or how many are kept"


class StreamOptions(Body, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool = False


class OpenAiFields(Body, frozen=True):
    """The fields of both OpenAI APIs."""

    min_tokens: Count = 0
    seed: Seed | None = None
    include_stop_str_in_output: bool = False
    stream_options: Annotated[Object, nested(StreamOptions)] = {}
    return_token_ids: bool = False
    truncate_prompt_tokens: (
        Annotated[
            int, Meta(ge=WHOLE_CONTEXT, le=INT64_MAX, description=CUT, extra_json_schema=NOT_ZERO)
        ]
        | None
    ) = None
    truncation_side: Literal["left", "right"] = "left"
    add_special_tokens: bool | None = None


UNSUPPORTED = refused(
    "lora_path", "session_params", "custom_logit_processor", "return_hidden_states",
    "return_routed_experts", "guided_decoding_backend", "logits_processors", "use_beam_search",
    "prompt_embeds", "images_config", "ngram_corpus_id", "watermarking", "repetition_detection",
    "thinking_token_budget", "guided_whitespace_pattern", "vllm_xargs", "ec_transfer_params",
    "return_prompt_text",
)  # fmt: skip
# Each is read from the same object; with `Meeting` and `SaltFields`, which may have lists.
OPENAI = (UNSUPPORTED, RequestFields, Sampling, OpenAiGrammars, OpenAiFields, LogprobOptions)


class OpenAiCall(msgspec.Struct, frozen=True):
    """One body. name: its id in every reply. n: samples per prompt, in order of prompts.

    includes_usage: a stream ends with a chunk of its own for usage. has_running_usage: every chunk
    has the usage so far. tells_ids: token ids of prompt and output stand beside their text.
    transfer_params: for the decode server, if the samples are held here. told: of
    log-probabilities. echo: what a chat's answer begins with.
    """

    name: str
    samples: tuple[Sample, ...]
    n: int
    is_streaming: bool
    includes_usage: bool
    has_running_usage: bool
    tells_ids: bool
    transfer_params: JsonObject | None
    told: Told = NOTHING_TOLD
    echo: str = ""


def read_choice(
    body: JsonObject,
    limits: Limits,
    max_name: str,
    max_new_tokens: int | None,
    *,
    default: int | None,
    told: Told,
    has_echo: bool = False,
) -> SamplingChoice:
    """Sampling options of all prompts of a body. max_name: of the field that says max_new_tokens.

    told: of log-probabilities. has_echo: of the prompt's too. Raises: RequestError.
    """
    read(UNSUPPORTED, body)
    given = read(OpenAiFields, body)
    output = OutputBounds(
        max_name=max_name,
        max_new_tokens=default if max_new_tokens is None else max_new_tokens,
        is_max_given=max_new_tokens is not None,
        min_name="min_tokens",
        min_new_tokens=given.min_tokens,
    )
    choice = read_sampling(read(Sampling, body), "", output, given.seed, limits)
    keeps_stop = choice.text.keeps_stop or given.include_stop_str_in_output
    return msgspec.structs.replace(
        choice,
        params=told.apply(choice.params, has_echo=has_echo),
        text=msgspec.structs.replace(choice.text, keeps_stop=keeps_stop),
        constraint=read_openai_constraint(body),
        told_field="echo" if told.prompt_count is None else "prompt_logprobs",
    )


def read_encoding(
    body: JsonObject, max_new_tokens: int | None, limits: Limits, *, has_special: bool
) -> Encoding:
    """How prompts become tokens. max_new_tokens: as the body has it. has_special: whether special
    tokens are added unless the body says. Raises: RequestError."""
    given = read(OpenAiFields, body)
    has_special = has_special if given.add_special_tokens is None else given.add_special_tokens
    count, name = given.truncate_prompt_tokens, "truncate_prompt_tokens"
    if count is None:
        return Encoding(has_special)
    kept_max = limits.request_token_max - max(1, max_new_tokens or 0)
    if count == WHOLE_CONTEXT and kept_max > 0:
        count = kept_max
    if not 1 <= count < limits.request_token_max:
        allowed = f"{WHOLE_CONTEXT}, or an integer in 1..{limits.request_token_max - 1}"
        raise refusal(name, given.truncate_prompt_tokens, allowed)
    return Encoding(has_special, count, keeps_end=given.truncation_side == "left")


def make_call(
    body: JsonObject,
    prompts: list[Prompt],
    choice: SamplingChoice,
    limits: Limits,
    name: str,
    told: Told = NOTHING_TOLD,
) -> OpenAiCall:
    """The call for `prompts`. name: the request's name unless the body has one."""
    given, request = read(OpenAiFields, body), read(RequestFields, body)
    check_model(request.model, limits)
    samples = make_samples(body, request, prompts, [choice] * len(prompts), limits, name)
    options = read(StreamOptions, given.stream_options, "stream_options")
    if given.stream_options and not request.stream:
        allowed = "absent, since stream is not true"
        raise refusal("stream_options", given.stream_options, allowed)
    return OpenAiCall(
        name=request.rid if isinstance(request.rid, str) else name,
        samples=samples,
        n=choice.n,
        is_streaming=request.stream,
        includes_usage=options.include_usage is True,
        # As in vLLM, a body that wants no usage gets none, whatever else it says.
        has_running_usage=options.continuous_usage_stats and options.include_usage is not False,
        tells_ids=given.return_token_ids,
        transfer_params=transfer_params(samples[0].bootstrap, limits),
        told=told,
    )
