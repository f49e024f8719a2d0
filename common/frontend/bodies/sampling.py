"""A client's sampling options, checked against SGLang's ranges and fitted to a prompt.

One reader for both dialects: they differ in the names of four fields. Knows nothing of HTTP.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from common.errors import RequestError
from common.frontend.bodies.body import (
    Body,
    Count,
    Object,
    Positive,
    Refused,
    check_known,
    check_number,
    path,
    read,
    refusal,
    within,
)
from common.frontend.bodies.constraints import Constraint, Grammars, read_sglang_constraint
from common.frontend.bodies.fields import JsonObject, JsonValue, shown
from common.frontend.bodies.sample import Limits, TextOptions
from common.frontend.bodies.token_rules import (
    BadWordIds,
    TokenRules,
    check_bad_word,
    check_word_count,
    read_allowed_token_ids,
    read_bad_words,
    read_stop_token_ids,
)
from common.request import SamplingParams, logprobs_nbytes
from common.request_bounds import (
    LOGIT_BIAS,
    LOGIT_BIAS_COUNT_MAX,
    N_MAX,
    PROMPT_LOGPROBS_NBYTES_MAX,
    SAMPLING_NUMBERS,
    SEED_MAX,
    TOP_K_ALL,
    TOP_K_MAX,
)

STOP_COUNT_MAX = 64  # each costs a step per character of output
STOP_LENGTH_MAX = 1024
STOP_REGEX_COUNT_MAX = 8  # each costs some microseconds per character of output
MAX_NEW_TOKENS_DEFAULT = 128  # SGLang's
GREEDY_BELOW = 1e-6  # SGLang's: a smaller temperature overflows the logits

# ---- fields --------------------------------------------------------------------------------------

TOP_K = f"{TOP_K_ALL} for all tokens, or an integer in 1..{TOP_K_MAX}"
NOT_ZERO: JsonObject = {"not": {"const": 0}}
BIAS: JsonObject = {
    "propertyNames": {"pattern": "^[0-9]{1,19}$"},
    "additionalProperties": msgspec.json.schema(Annotated[float, within(LOGIT_BIAS)]),
    "description": "From token ids to the number that is added to their logits.",
}
Stop: TypeAlias = Annotated[str, Meta(min_length=1, max_length=STOP_LENGTH_MAX)]
Seed: TypeAlias = Annotated[int, Meta(ge=-SEED_MAX - 1, le=SEED_MAX)]
"""Any integer of 64 bits. Negative ones are folded into the engine's range."""


class Sampling(TokenRules, frozen=True):
    """The fields that all dialects call the same."""

    n: Annotated[int, Meta(ge=1, le=N_MAX)] = 1
    temperature: Annotated[float, within(SAMPLING_NUMBERS["temperature"])] = 1.0
    top_k: Annotated[
        int, Meta(ge=TOP_K_ALL, le=TOP_K_MAX, description=TOP_K, extra_json_schema=NOT_ZERO)
    ] = TOP_K_ALL
    top_p: Annotated[float, within(SAMPLING_NUMBERS["top_p"])] = 1.0
    min_p: Annotated[float, within(SAMPLING_NUMBERS["min_p"])] = 0.0
    repetition_penalty: Annotated[float, within(SAMPLING_NUMBERS["repetition_penalty"])] = 1.0
    presence_penalty: Annotated[float, within(SAMPLING_NUMBERS["presence_penalty"])] = 0.0
    frequency_penalty: Annotated[float, within(SAMPLING_NUMBERS["frequency_penalty"])] = 0.0
    logit_bias: Annotated[
        Object, Meta(max_length=LOGIT_BIAS_COUNT_MAX, extra_json_schema=BIAS)
    ] = {}
    stop: Stop | Annotated[list[Stop], Meta(max_length=STOP_COUNT_MAX)] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    structural_tag: Refused = None
    stop_regex: Stop | Annotated[list[Stop], Meta(max_length=STOP_REGEX_COUNT_MAX)] = []


class SglangSampling(Body, frozen=True):
    """The other fields of SGLang's `sampling_params`."""

    max_new_tokens: Count | None = None
    min_new_tokens: Count = 0
    sampling_seed: Seed | None = None
    seed: Seed | None = None
    spaces_between_special_tokens: bool = True
    stream_interval: Positive = 1
    custom_params: Object = {}
    bad_word_ids: BadWordIds = []


SGLANG_SAMPLING = (SglangSampling, Grammars, Sampling)

# ---- readers -------------------------------------------------------------------------------------


class OutputBounds(msgspec.Struct, frozen=True):
    """How long an output may be, and the names under which a dialect asks for it.

    max_new_tokens: None means as many as fit. is_max_given: the client insisted, so a number
    that does not fit is refused, not lowered.
    """

    max_name: str
    max_new_tokens: int | None
    is_max_given: bool
    min_name: str
    min_new_tokens: int


class SamplingChoice(msgspec.Struct, frozen=True):
    """The options of one prompt, not yet fitted to it.

    seed: None means a random one. params: all else; its max_new_tokens, seed and grammar are not
    set yet. constraint: the grammar that it gets. told_field: of the one that asks for
    log-probabilities of the prompt.
    """

    n: int
    output: OutputBounds
    seed: int | None
    params: SamplingParams
    text: TextOptions
    constraint: Constraint | None = None
    told_field: str = "logprob_start_len"


def read_sglang_sampling(values: JsonValue, where: str, limits: Limits) -> SamplingChoice:
    """SGLang's `sampling_params`. Raises: RequestError; unknown keys are refused as SGLang does."""
    if not isinstance(values, dict):
        raise refusal(where, values, "an object")
    check_known(SGLANG_SAMPLING, values, where)
    if values.get("sampling_seed") is not None:
        values = {**values, "seed": None}  # the first seed that is given counts
    given = read(SglangSampling, values, where)
    default = None if "max_new_tokens" in values else MAX_NEW_TOKENS_DEFAULT
    output = OutputBounds(
        max_name=path(where, "max_new_tokens"),
        max_new_tokens=default if given.max_new_tokens is None else given.max_new_tokens,
        is_max_given=given.max_new_tokens is not None,
        min_name=path(where, "min_new_tokens"),
        min_new_tokens=given.min_new_tokens,
    )
    seed = given.seed if given.sampling_seed is None else given.sampling_seed
    choice = read_sampling(read(Sampling, values, where), where, output, seed, limits)
    if given.bad_word_ids:
        name = path(where, "bad_word_ids")
        words = [*choice.params.bad_words]
        for index, item in enumerate(given.bad_word_ids):
            words.append(check_bad_word(item, f"{name}[{index}]", limits))
        check_word_count(len(words), name)
        params = msgspec.structs.replace(choice.params, bad_words=tuple(words))
        choice = msgspec.structs.replace(choice, params=params)
    return msgspec.structs.replace(choice, constraint=read_sglang_constraint(values, where))


def read_sampling(
    given: Sampling, where: str, output: OutputBounds, seed: int | None, limits: Limits
) -> SamplingChoice:
    """The options that a body asks for. where: the path of its options.

    Raises: RequestError naming the field, its value and its range.
    """
    max_new_tokens, min_new_tokens = output.max_new_tokens, output.min_new_tokens
    # A prefill server answers one token whatever is asked for, so there is nothing to compare.
    if max_new_tokens is not None and min_new_tokens > max_new_tokens and not limits.is_prefill:
        raise refusal(output.min_name, min_new_tokens, f"an integer in 0..{max_new_tokens}")
    if given.top_k == 0:
        raise refusal(path(where, "top_k"), 0, TOP_K)
    params = SamplingParams(
        max_new_tokens=1,
        seed=0,
        min_new_tokens=min_new_tokens,
        temperature=given.temperature if given.temperature >= GREEDY_BELOW else 0.0,
        top_k=given.top_k,
        top_p=given.top_p,
        min_p=given.min_p,
        repetition_penalty=given.repetition_penalty,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        logit_bias=_read_logit_bias(given.logit_bias, path(where, "logit_bias"), limits.vocab_size),
        stop_token_ids=read_stop_token_ids(
            given.stop_token_ids, path(where, "stop_token_ids"), limits.vocab_size
        ),
        ignore_eos=given.ignore_eos,
        allowed_token_ids=read_allowed_token_ids(
            given.allowed_token_ids, path(where, "allowed_token_ids"), limits
        ),
        bad_words=read_bad_words(given.bad_words, path(where, "bad_words"), limits),
    )
    stops = [given.stop] if isinstance(given.stop, str) else given.stop
    regexes = [given.stop_regex] if isinstance(given.stop_regex, str) else given.stop_regex
    return SamplingChoice(
        n=given.n,
        output=output,
        seed=None if seed is None else seed & SEED_MAX,
        params=params,
        text=TextOptions(
            stops=tuple(dict.fromkeys(stops)),
            keeps_stop=given.no_stop_trim,
            skip_special_tokens=given.skip_special_tokens,
            min_new_tokens=min_new_tokens,
            regexes=tuple(dict.fromkeys(regexes)),
            regex_field=path(where, "stop_regex") if regexes else "",
        ),
    )


def fit_to_prompt(
    choice: SamplingChoice, sample_index: int, prompt_length: int, limits: Limits
) -> SamplingParams:
    """The options of sample `sample_index`, 0 .. n-1, of a prompt that fits the server.

    Raises: RequestError if the client insists on more output than fits, or on too many
        log-probabilities of the prompt.
    """
    seed = secrets.randbelow(SEED_MAX) if choice.seed is None else choice.seed
    _check_told(choice, prompt_length)
    grammar = None if choice.constraint is None else choice.constraint.grammar
    if limits.is_prefill:
        return msgspec.structs.replace(
            choice.params,
            max_new_tokens=1,
            min_new_tokens=min(choice.params.min_new_tokens, 1),
            seed=derive_seed(seed, sample_index),
            grammar=grammar,
        )
    room_left = limits.request_token_max - prompt_length
    output = choice.output
    asked = room_left if output.max_new_tokens is None else output.max_new_tokens
    for name, count, is_given in (
        (output.max_name, asked, output.is_max_given),
        (output.min_name, output.min_new_tokens, True),
    ):
        if is_given and count > room_left:
            raise RequestError(
                f"{name}={count}: must be at most {room_left} for a prompt of {prompt_length} "
                f"tokens; a request may have {limits.request_token_max} in all",
                field=name,
            )
    return msgspec.structs.replace(
        choice.params,
        max_new_tokens=max(1, min(asked, room_left)),
        seed=derive_seed(seed, sample_index),
        grammar=grammar,
    )


def _check_told(choice: SamplingChoice, prompt_length: int) -> None:
    """Raises: RequestError if all samples together would tell more of a prompt than travels."""
    start = choice.params.logprob_start_len
    if start < 0:
        return
    nbytes = choice.n * logprobs_nbytes(choice.params, prompt_length - start)
    if nbytes > PROMPT_LOGPROBS_NBYTES_MAX:
        raise RequestError(
            f"{choice.told_field}: log-probabilities of {prompt_length - start} prompt tokens may "
            f"take {nbytes} bytes, at most {PROMPT_LOGPROBS_NBYTES_MAX} are told; ask for a later "
            "start, fewer likely tokens, fewer samples or fewer token ids",
            field=choice.told_field,
        )


def derive_seed(seed: int, sample_index: int) -> int:
    """A seed of its own for each sample of a prompt; the first one keeps the client's."""
    if sample_index == 0:
        return seed
    digest = hashlib.blake2b(struct.pack("<QQ", seed, sample_index), digest_size=8).digest()
    return int.from_bytes(digest, "little") & SEED_MAX


def _read_logit_bias(given: Object, name: str, vocab_size: int) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 20 and int(key) < vocab_size):
            raise RequestError(
                f"{name}: {shown(key)} must be a token id in 0..{vocab_size - 1}", field=name
            )
        bias[int(key)] = check_number(value, path(name, key), LOGIT_BIAS)
    return bias
