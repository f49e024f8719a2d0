"""What bodies of /v1/completions and /v1/chat/completions have in common, checked.

Every refusal is a `RequestError` that names the field, its value and what is allowed. Unknown keys
are let through; those known to change the answer in ways this server can't follow are not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from common.frontend.bodies.bootstrap_address import read_bootstraps, transfer_params
from common.frontend.bodies.constraints import read_openai_constraint
from common.frontend.bodies.fields import NOT_SUPPORTED, Fields, JsonObject
from common.frontend.bodies.sample import Limits, Sample
from common.frontend.bodies.sampling import (
    SamplingChoice,
    SamplingNames,
    read_sampling,
)
from common.frontend.bodies.validation import (
    Prompt,
    check_model,
    check_sample_count,
    make_samples,
    read_rids,
    read_timeout,
)

UNSUPPORTED_KEYS = (
    "lora_path",
    "session_params",
    "custom_logit_processor",
    "return_hidden_states",
    "return_routed_experts",
    "guided_decoding_backend",
    "logits_processors",
    "use_beam_search",
    "prompt_logprobs",
    "prompt_embeds",
    "truncate_prompt_tokens",
    "allowed_token_ids",
    "bad_words",
    "images_config",
    "ngram_corpus_id",
)


@dataclass(frozen=True, slots=True)
class OpenAiCall:
    """One body. name: its id in every reply. n: samples per prompt, in order of prompts.

    includes_usage: a stream ends with a chunk of its own for usage. has_running_usage: every chunk
    tells the usage so far. tells_ids: token ids of prompt and output stand beside their text.
    transfer_params: what a decode server is to be told of it, if it is held here.
    """

    name: str
    samples: tuple[Sample, ...]
    n: int
    is_streaming: bool
    includes_usage: bool
    has_running_usage: bool
    tells_ids: bool
    transfer_params: JsonObject | None


@dataclass(frozen=True, slots=True)
class LogprobChoice:
    """What is reported per token. top_count: None for nothing at all."""

    top_count: int | None = None
    has_prompt: bool = False


def read_choice(
    fields: Fields,
    limits: Limits,
    names: SamplingNames,
    logprobs: LogprobChoice,
    *,
    max_new_tokens_default: int | None,
) -> SamplingChoice:
    """Sampling options of all prompts of a body. Raises: RequestError."""
    fields.refuse(UNSUPPORTED_KEYS, NOT_SUPPORTED)
    choice = read_sampling(fields, limits, names, max_new_tokens_default=max_new_tokens_default)
    choice = replace(choice, constraint=read_openai_constraint(fields))
    if logprobs.top_count is None:
        return choice
    params = msgspec.structs.replace(
        choice.params,
        return_logprob=True,
        top_logprobs_num=logprobs.top_count,
        logprob_start_len=0 if logprobs.has_prompt else -1,
    )
    return replace(choice, params=params)


def make_call(
    fields: Fields, prompts: list[Prompt], choice: SamplingChoice, limits: Limits, name: str
) -> OpenAiCall:
    """The call for `prompts`. name: the request's name unless the body has one."""
    check_model(fields, limits)
    count = len(prompts) * choice.n
    check_sample_count(count)
    rids = read_rids(fields, len(prompts), choice.n, name)
    bootstraps = read_bootstraps(fields, len(prompts), choice.n, limits)
    timeout_s = read_timeout(fields, limits)
    samples: list[Sample] = []
    for index, prompt in enumerate(prompts):
        first_index = index * choice.n
        samples += make_samples(prompt, choice, limits, first_index, rids, bootstraps, timeout_s)
    is_streaming = fields.boolean("stream", False)
    options = Fields.of(fields.get("stream_options"), "stream_options")
    if options.values and not is_streaming:
        raise fields.error("stream_options", "absent, since stream is not true")
    given = fields.get("rid")
    return OpenAiCall(
        name=given if isinstance(given, str) else name,
        samples=tuple(samples),
        n=choice.n,
        is_streaming=is_streaming,
        includes_usage=options.boolean("include_usage", False),
        has_running_usage=options.boolean("continuous_usage_stats", False),
        tells_ids=fields.boolean("return_token_ids", False),
        transfer_params=transfer_params(bootstraps, limits),
    )
