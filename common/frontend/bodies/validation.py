"""Bodies of /generate, checked and turned into samples; and what all dialects share of it.

Every refusal is a `RequestError` that names the field, its value and what is allowed. Top-level
keys that are not known are let through, as SGLang does, since routers send many; but not those
known to change the answer in ways that this server can't follow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from common.errors import RequestError
from common.frontend.bodies.bootstrap_address import read_bootstraps, spread, transfer_params
from common.frontend.bodies.fields import (
    NOT_SUPPORTED,
    Fields,
    JsonObject,
    JsonValue,
    check_token_ids,
    shown,
)
from common.frontend.bodies.sample import Limits, Sample
from common.frontend.bodies.sampling import SamplingChoice, fit_to_prompt, read_sglang_sampling
from common.frontend.text.tokenizer import Tokenizer
from common.request import Bootstrap, SamplingParams
from common.request_bounds import (
    ASKED_LOGPROB_COUNT_MAX,
    RID_LENGTH_MAX,
    SAMPLE_COUNT_MAX,
    TOP_LOGPROB_COUNT_MAX,
    NumberBounds,
)

# What SGLang knows and we do not; each would change the answer.
UNSUPPORTED_KEYS = (
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "modalities",
    "lora_path",
    "session_params",
    "custom_logit_processor",
    "return_hidden_states",
    "return_routed_experts",
    "return_indexer_topk",
    "return_entropy",
    "return_bytes",
    "return_sampling_mask",
    "return_prompt_token_ids",
    "max_thinking_tokens",
    "background",
)


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One body of /generate. is_list: the reply is a list, also of one.

    transfer_params: what a decode server is to be told of it, if it is held here.
    """

    samples: tuple[Sample, ...]
    is_list: bool
    is_streaming: bool
    shows_logprob_text: bool
    transfer_params: JsonObject | None


@dataclass(frozen=True, slots=True)
class Prompt:
    """text: "" if the client sent token ids."""

    text: str
    token_ids: list[int]


def parse_generate(
    body: JsonObject, tokenizer: Tokenizer, limits: Limits, fallback_rid: str
) -> GenerateCall:
    """The samples that a /generate body asks for. fallback_rid: the rid if the body has none.

    Raises: RequestError.
    """
    fields = Fields(body)
    fields.refuse(UNSUPPORTED_KEYS, NOT_SUPPORTED)
    check_model(fields, limits)
    prompts, is_batch = _read_prompts(fields, tokenizer, limits)
    choices = _read_choices(fields, len(prompts), limits)
    n = choices[0].n
    check_sample_count(len(prompts) * n)
    rids = read_rids(fields, len(prompts), n, fallback_rid)
    bootstraps = read_bootstraps(fields, len(prompts), n, limits)
    timeout_s = read_timeout(fields, limits)
    samples = []
    for prompt_index, (prompt, choice) in enumerate(zip(prompts, choices, strict=True)):
        logprobs = _logprob_fields(fields, prompt_index, len(prompts), prompt, limits)
        fitted = replace(choice, params=_with_logprobs(choice.params, logprobs))
        samples += make_samples(
            prompt, fitted, limits, prompt_index * n, rids, bootstraps, timeout_s
        )
    return GenerateCall(
        samples=tuple(samples),
        is_list=is_batch or n > 1,
        is_streaming=fields.boolean("stream", False),
        shows_logprob_text=fields.boolean("return_text_in_logprobs", False),
        transfer_params=transfer_params(bootstraps, limits),
    )


# ---- what all dialects share ---------------------------------------------------------------------


def make_samples(
    prompt: Prompt,
    choice: SamplingChoice,
    limits: Limits,
    first_index: int,
    rids: list[str],
    bootstraps: list[Bootstrap | None],
    timeout_s: float,
) -> list[Sample]:
    """The `n` samples of one prompt. rids, bootstraps: of all samples of the body."""
    return [
        Sample(
            index=first_index + i,
            rid=rids[first_index + i],
            prompt_text=prompt.text,
            token_ids=prompt.token_ids,
            sampling=fit_to_prompt(choice, i, len(prompt.token_ids), limits),
            text=choice.text,
            grammar_field="" if choice.constraint is None else choice.constraint.field,
            bootstrap=bootstraps[first_index + i],
            hides_output=choice.max_new_tokens == 0,
            timeout_s=timeout_s,
        )
        for i in range(choice.n)
    ]


def check_model(fields: Fields, limits: Limits) -> None:
    """Raises: RequestError 404 if the body names a model that is not served here."""
    name = fields.text("model", "")
    if name and name not in limits.model_names:
        raise RequestError(
            f"model={shown(name)}: is not served here; the model is {limits.model_names[0]!r}",
            field="model",
            status=404,
        )


def read_timeout(fields: Fields, limits: Limits) -> float:
    """Seconds that a request may take: as `timeout` says, within what the server allows.

    Raises: RequestError.
    """
    longest_s = limits.request_timeout_s
    return fields.number("timeout", longest_s, NumberBounds(0.0, longest_s, is_low_allowed=False))


def check_sample_count(count: int) -> None:
    if count > SAMPLE_COUNT_MAX:
        raise RequestError(f"the body asks for {count} samples; at most {SAMPLE_COUNT_MAX}")


def encode_prompt(
    text: JsonValue, name: str, tokenizer: Tokenizer, limits: Limits, *, has_special: bool = True
) -> Prompt:
    """A prompt given as text. has_special: whether the tokenizer adds its special tokens.

    Raises: RequestError if it is empty or too long.
    """
    if not isinstance(text, str):
        raise RequestError(f"{name}={shown(text)}: must be a string", field=name)
    if not text:
        raise RequestError(f"{name}: must not be empty", field=name)
    check_token_count(tokenizer.token_count_min(text), name, limits, "at least ")
    token_ids = tokenizer.encode(text, add_special_tokens=has_special)
    check_length(token_ids, name, limits)
    if max(token_ids) >= limits.vocab_size:
        raise RequestError(
            f"{name}: the tokenizer makes the token {max(token_ids)} of it; the model has tokens "
            f"0..{limits.vocab_size - 1}",
            field=name,
        )
    return Prompt(text, token_ids)


def check_prompt_ids(value: JsonValue, name: str, limits: Limits) -> Prompt:
    """A prompt given as ids. Raises: RequestError if it is empty, too long or no list of ids."""
    if not isinstance(value, list):
        raise RequestError(f"{name}={shown(value)}: must be a list of token ids", field=name)
    check_length(value, name, limits)
    return Prompt("", check_token_ids(value, name, limits.vocab_size))


def check_length(token_ids: list[JsonValue] | list[int], name: str, limits: Limits) -> None:
    """Raises: RequestError unless the prompt has a token and leaves room for one more."""
    if not token_ids:
        raise RequestError(f"{name}: the prompt is empty; it must have a token", field=name)
    check_token_count(len(token_ids), name, limits)


def check_token_count(count: int, name: str, limits: Limits, about: str = "") -> None:
    """about: what is known of the count. Raises: RequestError unless one more token has room."""
    if count >= limits.request_token_max:
        raise RequestError(
            f"{name}: the prompt has {about}{count} tokens; must be at most "
            f"{limits.request_token_max - 1}, since a request may have {limits.request_token_max} "
            "in all (the context length or the KV pool)",
            field=name,
        )


def read_rids(fields: Fields, prompt_count: int, n: int, fallback_rid: str) -> list[str]:
    """A name for every sample: as given for a single one, else with the sample's index."""
    value = fields.get("rid")
    count = prompt_count * n
    bases = value if isinstance(value, list) else [fallback_rid if value is None else value]
    rids: list[str] = []
    for base in bases:
        if not isinstance(base, str) or not 1 <= len(base) <= RID_LENGTH_MAX:
            raise fields.error("rid", f"a string of 1..{RID_LENGTH_MAX} characters, or a list")
        rids.append(base)
    if not isinstance(value, list):
        return rids if count == 1 else [f"{rids[0]}_{i}" for i in range(count)]
    if len(rids) != prompt_count or len(set(rids)) != prompt_count:
        raise fields.error("rid", f"a list of {prompt_count} different strings, one per prompt")
    return rids if n == 1 else [f"{rid}_{i}" for rid in rids for i in range(n)]


# ---- /generate only ------------------------------------------------------------------------------


def _read_prompts(
    fields: Fields, tokenizer: Tokenizer, limits: Limits
) -> tuple[list[Prompt], bool]:
    """The prompts, and whether they came as a list."""
    if fields.has("text") == fields.has("input_ids"):
        found = "both are" if fields.has("text") else "neither is"
        raise RequestError(
            f"text, input_ids: {found} given; exactly one of them must be",
            field="text" if not fields.has("text") else "input_ids",
        )
    key = "text" if fields.has("text") else "input_ids"
    value = fields.get(key)
    if value == []:
        raise RequestError(f"{key}: must not be empty", field=key)
    if key == "text":
        texts = value if isinstance(value, list) else [value]
        check_sample_count(len(texts))
        names = [f"text[{i}]" for i in range(len(texts))] if isinstance(value, list) else ["text"]
        prompts = [
            encode_prompt(text, name, tokenizer, limits)
            for text, name in zip(texts, names, strict=True)
        ]
        return prompts, isinstance(value, list)
    if isinstance(value, list) and isinstance(value[0], list):
        check_sample_count(len(value))
        return [
            check_prompt_ids(ids, f"input_ids[{i}]", limits) for i, ids in enumerate(value)
        ], True
    return [check_prompt_ids(value, "input_ids", limits)], False


def _read_choices(fields: Fields, count: int, limits: Limits) -> list[SamplingChoice]:
    """Sampling options of each prompt; all have the same n."""
    value = fields.get("sampling_params")
    if not isinstance(value, list):
        choice = read_sglang_sampling(Fields.of(value, "sampling_params"), limits)
        return [choice] * count
    if len(value) != count:
        raise RequestError(
            f"sampling_params: a list of {len(value)}; must have one object per prompt, {count}",
            field="sampling_params",
        )
    choices = [
        read_sglang_sampling(Fields.of(item, f"sampling_params[{i}]"), limits)
        for i, item in enumerate(value)
    ]
    counts = sorted({choice.n for choice in choices})
    if len(counts) > 1:
        raise RequestError(
            f"sampling_params: n differs ({counts}); must be the same for all prompts of a batch",
            field="sampling_params",
        )
    return choices


def _logprob_fields(
    fields: Fields, prompt_index: int, count: int, prompt: Prompt, limits: Limits
) -> SamplingParams:
    """What is reported per token of one prompt; a record whose other fields mean nothing."""
    one: JsonObject = {
        key: spread(fields, key, count)[prompt_index]
        for key in ("return_logprob", "logprob_start_len", "top_logprobs_num")
    }
    asked = fields.get("token_ids_logprob")
    is_nested = isinstance(asked, list) and any(isinstance(ids, list) for ids in asked)
    one["token_ids_logprob"] = (
        spread(fields, "token_ids_logprob", count)[prompt_index] if is_nested else asked
    )
    choice = Fields(one)
    found = SamplingParams(
        max_new_tokens=1,
        seed=0,
        return_logprob=choice.boolean("return_logprob", False),
        logprob_start_len=choice.integer("logprob_start_len", -1, -1, len(prompt.token_ids)),
        top_logprobs_num=choice.integer("top_logprobs_num", 0, 0, TOP_LOGPROB_COUNT_MAX),
        token_ids_logprob=choice.token_ids(
            "token_ids_logprob", limits.vocab_size, ASKED_LOGPROB_COUNT_MAX
        ),
    )
    return found if found.return_logprob else SamplingParams(max_new_tokens=1, seed=0)


def _with_logprobs(params: SamplingParams, logprobs: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(
        params,
        return_logprob=logprobs.return_logprob,
        logprob_start_len=logprobs.logprob_start_len,
        top_logprobs_num=logprobs.top_logprobs_num,
        token_ids_logprob=logprobs.token_ids_logprob,
    )
