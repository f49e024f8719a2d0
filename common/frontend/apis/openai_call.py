"""The common part of bodies of /v1/completions and /v1/chat/completions, checked.

Every refusal is a `RequestError` that names the field, its value and its range. Unknown keys
are let through; those known to change the answer in ways this server can't follow are not.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from common.frontend.bodies.body import Body, Count, Object, nested, read, refusal, refused
from common.frontend.bodies.bootstrap_address import transfer_params
from common.frontend.bodies.constraints import OpenAiGrammars, read_openai_constraint
from common.frontend.bodies.fields import JsonObject
from common.frontend.bodies.sample import Limits, Sample
from common.frontend.bodies.sampling import (
    OutputBounds,
    Sampling,
    SamplingChoice,
    Seed,
    read_sampling,
)
from common.frontend.bodies.validation import Prompt, RequestFields, check_model, make_samples


class StreamOptions(Body, frozen=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class OpenAiFields(Body, frozen=True):
    """The fields of both OpenAI APIs."""

    min_tokens: Count = 0
    seed: Seed | None = None
    include_stop_str_in_output: bool = False
    stream_options: Annotated[Object, nested(StreamOptions)] = {}
    return_token_ids: bool = False


UNSUPPORTED = refused(
    "lora_path", "session_params", "custom_logit_processor", "return_hidden_states",
    "return_routed_experts", "guided_decoding_backend", "logits_processors", "use_beam_search",
    "prompt_logprobs", "prompt_embeds", "truncate_prompt_tokens",
    "images_config", "ngram_corpus_id",
)  # fmt: skip
# Each is read from the same object; with `Meeting` and `SaltFields`, which may have lists.
OPENAI = (UNSUPPORTED, RequestFields, Sampling, OpenAiGrammars, OpenAiFields)


class OpenAiCall(msgspec.Struct, frozen=True):
    """One body. name: its id in every reply. n: samples per prompt, in order of prompts.

    includes_usage: a stream ends with a chunk of its own for usage. has_running_usage: every chunk
    has the usage so far. tells_ids: token ids of prompt and output stand beside their text.
    transfer_params: for the decode server, if the samples are held here.
    """

    name: str
    samples: tuple[Sample, ...]
    n: int
    is_streaming: bool
    includes_usage: bool
    has_running_usage: bool
    tells_ids: bool
    transfer_params: JsonObject | None


def read_choice(
    body: JsonObject,
    limits: Limits,
    max_name: str,
    max_new_tokens: int | None,
    *,
    default: int | None,
    top_count: int | None,
    has_prompt: bool = False,
) -> SamplingChoice:
    """Sampling options of all prompts of a body. max_name: of the field that says max_new_tokens.

    top_count: of the likely tokens that are told with each one; None for no log-probabilities.
    has_prompt: the prompt's are told too. Raises: RequestError.
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
    params = choice.params
    if top_count is not None:
        params = msgspec.structs.replace(
            params,
            return_logprob=True,
            top_logprobs_num=top_count,
            logprob_start_len=0 if has_prompt else -1,
        )
    return msgspec.structs.replace(
        choice,
        params=params,
        text=msgspec.structs.replace(choice.text, keeps_stop=keeps_stop),
        constraint=read_openai_constraint(body),
    )


def make_call(
    body: JsonObject, prompts: list[Prompt], choice: SamplingChoice, limits: Limits, name: str
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
        includes_usage=options.include_usage,
        has_running_usage=options.continuous_usage_stats,
        tells_ids=given.return_token_ids,
        transfer_params=transfer_params(samples[0].bootstrap, limits),
    )
