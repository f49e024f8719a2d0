"""Bodies of /generate, checked and turned into samples; and the checks that all dialects share.

Every refusal is a `RequestError` that names the field, its value and its range. Top-level
keys that are not known are let through, as SGLang does, since routers send many; but not those
known to change the answer in ways that this server can't follow.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from common.errors import RequestError
from common.frontend.bodies.body import (
    TOKEN_IDS,
    Body,
    Json,
    Object,
    check_number,
    nested,
    one_or_list,
    or_null,
    read,
    refusal,
    refused,
    schema_of,
)
from common.frontend.bodies.bootstrap_address import (
    Meeting,
    TransferAddress,
    TransferWish,
    read_bootstraps,
    spread,
    transfer_params,
)
from common.frontend.bodies.fields import JsonObject, JsonValue, check_token_ids, shown
from common.frontend.bodies.output_grammars import behind_reasoning
from common.frontend.bodies.prefixes import SaltFields, read_prefix_digests
from common.frontend.bodies.prompts import (
    PROMPT_IDS,
    PROMPT_TEXT,
    ComputedPrompt,
    Prompt,
    check_sample_count,
    prompt_schema,
    read_computed_prompt,
    read_prompts,
)
from common.frontend.bodies.sample import Limits, Sample
from common.frontend.bodies.sampling import (
    SGLANG_SAMPLING,
    SamplingChoice,
    fit_to_prompt,
    read_sglang_sampling,
)
from common.frontend.text.parsing.parsing import NO_PARSERS, Parsers
from common.frontend.text.tokenizer import Tokenizer
from common.request import Claim
from common.request_bounds import (
    ASKED_LOGPROB_COUNT_MAX,
    INT64_MAX,
    PRIORITY_MAX,
    RID_LENGTH_MAX,
    TOP_LOGPROB_COUNT_MAX,
    NumberBounds,
)

# ---- fields --------------------------------------------------------------------------------------

Rid: TypeAlias = Annotated[str, Meta(min_length=1, max_length=RID_LENGTH_MAX)]
TIMEOUT: JsonObject = {
    "type": "number", "exclusiveMinimum": 0, "description": "Seconds, at most --request-timeout's."
}  # fmt: skip


class RequestFields(Body, frozen=True):
    """The fields of every body beside those of its prompt and its sampling."""

    model: str = ""
    rid: Rid | list[Rid] | None = None
    stream: bool = False
    priority: Annotated[int, Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)] = 0
    timeout: Annotated[Json, Meta(extra_json_schema=TIMEOUT)] = None
    kv_transfer_params: Annotated[
        Object, nested(TransferWish, TransferAddress, ComputedPrompt)
    ] = {}


class GenerateFields(Body, frozen=True):
    """One of text and input_ids. A list of them is answered with a list."""

    text: Annotated[Json, prompt_schema(PROMPT_TEXT)] = None
    input_ids: Annotated[Json, prompt_schema(PROMPT_IDS)] = None
    sampling_params: Annotated[
        Json,
        Meta(extra_json_schema=one_or_list(or_null(schema_of(*SGLANG_SAMPLING, is_closed=True)))),
    ] = None
    return_text_in_logprobs: bool = False
    require_reasoning: bool = False


UNSUPPORTED = refused(
    "input_embeds", "image_data", "video_data", "audio_data", "modalities", "lora_path",
    "session_params", "custom_logit_processor", "return_hidden_states", "return_routed_experts",
    "return_indexer_topk", "return_entropy", "return_bytes", "return_sampling_mask",
    "return_prompt_token_ids", "max_thinking_tokens", "background",
)  # fmt: skip


class LogprobFields(Body, frozen=True):
    """The report per token, of one prompt or of all."""

    return_logprob: bool = False
    logprob_start_len: Annotated[int, Meta(ge=-1, le=INT64_MAX)] = -1
    top_logprobs_num: Annotated[int, Meta(ge=0, le=TOP_LOGPROB_COUNT_MAX)] = 0
    token_ids_logprob: Annotated[
        list[Json], Meta(max_length=ASKED_LOGPROB_COUNT_MAX, extra_json_schema=TOKEN_IDS)
    ] = []


GENERATE = schema_of(
    UNSUPPORTED, RequestFields, GenerateFields, spread=(Meeting, SaltFields, LogprobFields)
)

# ---- readers -------------------------------------------------------------------------------------


class GenerateCall(msgspec.Struct, frozen=True):
    """One body of /generate. is_list: the reply is a list, also of one.

    transfer_params: for the decode server, if the samples are held here. reasoning_end_id: the
        token that ends the reasoning that outputs begin with; None: they have none.
    """

    samples: tuple[Sample, ...]
    is_list: bool
    is_streaming: bool
    shows_logprob_text: bool
    transfer_params: JsonObject | None
    reasoning_end_id: int | None = None


def parse_generate(
    body: JsonObject,
    tokenizer: Tokenizer,
    limits: Limits,
    fallback_rid: str,
    parsers: Parsers = NO_PARSERS,
) -> GenerateCall:
    """The samples that a /generate body asks for. fallback_rid: the rid if the body has none.

    parsers: the server's; the output is not parsed, but SGLang's `require_reasoning` has a grammar
    wait for the end of reasoning, which is a token, and has tokens up to it counted.

    Raises: RequestError.
    """
    read(UNSUPPORTED, body)
    given = read(GenerateFields, body)
    request = read(RequestFields, body)
    check_model(request.model, limits)
    computed = read_computed_prompt(body, limits)
    prompts, is_batch = _read_prompts(given, tokenizer, limits, computed)
    count = len(prompts)
    choices = [
        with_logprobs(choice, logprobs, prompt, limits)
        for choice, logprobs, prompt in zip(
            _read_choices(given.sampling_params, count, limits),
            _spread_logprobs(body, count),
            prompts,
            strict=True,
        )
    ]
    reasoning_end_id = None
    if given.require_reasoning:
        reasoning_end_id = _reasoning_end_id(parsers, tokenizer)
        choices = [_behind_reasoning(choice, parsers) for choice in choices]
    samples = make_samples(body, request, prompts, choices, limits, fallback_rid)
    return GenerateCall(
        samples=samples,
        is_list=is_batch or choices[0].n > 1,
        is_streaming=request.stream,
        shows_logprob_text=given.return_text_in_logprobs,
        transfer_params=transfer_params(samples[0].bootstrap, limits),
        reasoning_end_id=reasoning_end_id,
    )


def _reasoning_end_id(parsers: Parsers, tokenizer: Tokenizer) -> int:
    end = "" if parsers.reasoning is None else parsers.reasoning.closing
    token_id = tokenizer.added_tokens.get(end)
    if token_id is None:
        allowed = "false, since --reasoning-parser names no format that ends in a token"
        raise refusal("require_reasoning", True, allowed)
    return token_id


def _behind_reasoning(choice: SamplingChoice, parsers: Parsers) -> SamplingChoice:
    assert parsers.reasoning is not None, "the end of reasoning is known"
    if choice.constraint is None:
        return choice
    held = behind_reasoning(choice.constraint, parsers.reasoning, parsers.tokens, is_inside=True)
    return msgspec.structs.replace(choice, constraint=held)


# ---- all dialects --------------------------------------------------------------------------------


def make_samples(
    body: JsonObject,
    request: RequestFields,
    prompts: list[Prompt],
    choices: list[SamplingChoice],
    limits: Limits,
    fallback_rid: str,
) -> tuple[Sample, ...]:
    """The samples of all prompts, each with its choice; all choices have the same n.

    Raises: RequestError.
    """
    n = choices[0].n
    check_sample_count(len(prompts) * n)
    rids = _read_rids(request.rid, len(prompts), n, fallback_rid)
    wish = request.kv_transfer_params
    bootstraps = read_bootstraps(body, wish, len(prompts), n, limits)
    timeout_s = limits.request_timeout_s
    if request.timeout is not None:
        bounds = NumberBounds(0.0, timeout_s, is_low_allowed=False)
        timeout_s = check_number(request.timeout, "timeout", bounds)
    digests = read_prefix_digests(body, [prompt.token_ids for prompt in prompts], n, limits)
    claim = Claim(-request.priority if limits.is_low_first else request.priority, limits.client)
    return tuple(
        Sample(
            index=index * n + i,
            rid=rids[index * n + i],
            prompt_text=prompt.text,
            token_ids=prompt.token_ids,
            sampling=fit_to_prompt(choice, i, len(prompt.token_ids), limits),
            text=choice.text,
            grammar_field="" if choice.constraint is None else choice.constraint.field,
            bootstrap=bootstraps[index * n + i],
            hides_output=choice.output.max_new_tokens == 0,
            timeout_s=timeout_s,
            prefix_digests=digests[index],
            prompt_index=index,
            claim=claim,
        )
        for index, (prompt, choice) in enumerate(zip(prompts, choices, strict=True))
        for i in range(n)
    )


def check_model(name: str, limits: Limits) -> None:
    """Raises: RequestError 404 if the body names a model that is not served here."""
    if name and name not in limits.model_names:
        raise RequestError(
            f"model={shown(name)}: is not served here; the model is {limits.model_names[0]!r}",
            field="model",
            status=404,
        )


def _read_rids(
    value: str | list[str] | None, prompt_count: int, n: int, fallback_rid: str
) -> list[str]:
    """A name for every sample: as given for a single one, else with the sample's index."""
    count = prompt_count * n
    if not isinstance(value, list):
        rid = fallback_rid if value is None else value
        return [rid] if count == 1 else [f"{rid}_{i}" for i in range(count)]
    if len(value) != prompt_count or len(set(value)) != prompt_count:
        allowed = f"a list of {prompt_count} different strings, one per prompt"
        raise refusal("rid", [*value], allowed)
    return value if n == 1 else [f"{rid}_{i}" for rid in value for i in range(n)]


# ---- /generate only ------------------------------------------------------------------------------


def _read_prompts(
    given: GenerateFields, tokenizer: Tokenizer, limits: Limits, computed: Prompt | None
) -> tuple[list[Prompt], bool]:
    """The prompts, and whether they came as a list."""
    if (given.text is None) == (given.input_ids is None):
        found, field = ("neither is", "text") if given.text is None else ("both are", "input_ids")
        raise RequestError(
            f"text, input_ids: {found} given; exactly one of them must be", field=field
        )
    is_text = given.text is not None
    value, name = (given.text, "text") if is_text else (given.input_ids, "input_ids")
    return read_prompts(value, name, tokenizer, limits, is_text=is_text, computed=computed)


def _read_choices(value: JsonValue, count: int, limits: Limits) -> list[SamplingChoice]:
    """Sampling options of each prompt; all have the same n."""
    if not isinstance(value, list):
        given = {} if value is None else value
        return [read_sglang_sampling(given, "sampling_params", limits)] * count
    if len(value) != count:
        raise RequestError(
            f"sampling_params: a list of {len(value)}; must have one object per prompt, {count}",
            field="sampling_params",
        )
    choices = [
        read_sglang_sampling({} if item is None else item, f"sampling_params[{i}]", limits)
        for i, item in enumerate(value)
    ]
    counts = sorted({choice.n for choice in choices})
    if len(counts) > 1:
        raise RequestError(
            f"sampling_params: n differs ({counts}); must be the same for all prompts of a batch",
            field="sampling_params",
        )
    return choices


def _spread_logprobs(body: JsonObject, count: int) -> list[LogprobFields]:
    """The report per token of each of `count` prompts."""
    asked = body.get("token_ids_logprob")
    if not (isinstance(asked, list) and any(isinstance(ids, list) for ids in asked)):
        body = {**body, "token_ids_logprob": [asked] * count}  # one list for all prompts
    return [read(LogprobFields, fields) for fields in spread(LogprobFields, body, count)]


def with_logprobs(
    choice: SamplingChoice, given: LogprobFields, prompt: Prompt, limits: Limits
) -> SamplingChoice:
    """The choice of a prompt, with its report per token."""
    length = len(prompt.token_ids)
    if given.logprob_start_len > length:
        raise refusal("logprob_start_len", given.logprob_start_len, f"an integer in -1..{length}")
    token_ids = check_token_ids(given.token_ids_logprob, "token_ids_logprob", limits.vocab_size)
    if not given.return_logprob:
        return choice
    params = msgspec.structs.replace(
        choice.params,
        return_logprob=True,
        logprob_start_len=given.logprob_start_len,
        top_logprobs_num=given.top_logprobs_num,
        token_ids_logprob=tuple(dict.fromkeys(token_ids)),
    )
    return msgspec.structs.replace(choice, params=params)
