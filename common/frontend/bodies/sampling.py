"""A client's sampling options, checked against SGLang's ranges and fitted to a prompt.

One reader for both dialects: they differ in the names of three fields. Knows nothing of HTTP.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from dataclasses import dataclass, replace

import msgspec

from common.errors import RequestError
from common.frontend.bodies.constraints import Constraint, read_sglang_constraint
from common.frontend.bodies.fields import NOT_SUPPORTED, Fields, shown
from common.frontend.bodies.sample import Limits, TextOptions
from common.request import SamplingParams, logprobs_nbytes
from common.request_bounds import (
    INT64_MAX,
    LOGIT_BIAS,
    LOGIT_BIAS_COUNT_MAX,
    PROMPT_LOGPROBS_NBYTES_MAX,
    SAMPLING_NUMBERS,
    SEED_MAX,
    STOP_TOKEN_COUNT_MAX,
    TOP_K_ALL,
    TOP_K_MAX,
)

N_MAX = 128  # as OpenAI's
STOP_COUNT_MAX = 64  # each costs a step per character of output
STOP_LENGTH_MAX = 1024
MAX_NEW_TOKENS_DEFAULT = 128  # SGLang's
GREEDY_BELOW = 1e-6  # SGLang's: a smaller temperature overflows the logits

CONSTRAINTS = ("json_schema", "regex", "ebnf")
UNSUPPORTED_KEYS = ("structural_tag", "stop_regex")
KNOWN_KEYS = frozenset(
    (
        "max_new_tokens",
        "min_new_tokens",
        "stop",
        "stop_token_ids",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "n",
        "ignore_eos",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "no_stop_trim",
        "custom_params",
        "stream_interval",
        "logit_bias",
        "sampling_seed",
        "seed",
        *CONSTRAINTS,
        *UNSUPPORTED_KEYS,
    )
)


@dataclass(frozen=True, slots=True)
class SamplingNames:
    """What a dialect calls the fields that not all call the same; the first seed given counts."""

    max_tokens: tuple[str, ...]
    min_tokens: str
    seeds: tuple[str, ...]


SGLANG_NAMES = SamplingNames(("max_new_tokens",), "min_new_tokens", ("sampling_seed", "seed"))


@dataclass(frozen=True, slots=True)
class SamplingChoice:
    """The options of one prompt, not yet fitted to it.

    max_name, min_name: the fields that bound the output, for errors. max_new_tokens: None means as
    many as fit. is_max_given: the client insisted, so what does not fit is refused, not lowered.
    seed: None means a random one. params: all else; its max_new_tokens, seed and grammar are not
    set yet. constraint: the grammar that it gets.
    """

    n: int
    max_name: str
    min_name: str
    max_new_tokens: int | None
    is_max_given: bool
    seed: int | None
    params: SamplingParams
    text: TextOptions
    constraint: Constraint | None = None


def read_sglang_sampling(fields: Fields, limits: Limits) -> SamplingChoice:
    """SGLang's `sampling_params`. Raises: RequestError; unknown keys are refused as SGLang does."""
    for key in fields.values:
        if key not in KNOWN_KEYS:
            known = ", ".join(sorted(KNOWN_KEYS))
            raise RequestError(
                f"{fields.name(key)}: unknown field; must be one of {known}",
                field=fields.name(key),
            )
    fields.boolean("spaces_between_special_tokens", True)
    fields.optional_integer("stream_interval", 1)
    Fields.of(fields.get("custom_params"), fields.name("custom_params"))
    is_default = "max_new_tokens" not in fields.values
    choice = read_sampling(
        fields,
        limits,
        SGLANG_NAMES,
        max_new_tokens_default=MAX_NEW_TOKENS_DEFAULT if is_default else None,
    )
    return replace(choice, constraint=read_sglang_constraint(fields))


def read_sampling(
    fields: Fields, limits: Limits, names: SamplingNames, *, max_new_tokens_default: int | None
) -> SamplingChoice:
    """The options in `fields`. Raises: RequestError naming the field, its value and its range."""
    fields.refuse(UNSUPPORTED_KEYS, NOT_SUPPORTED)
    max_name, max_new_tokens = _read_max(fields, names)
    is_max_given = max_new_tokens is not None
    if max_new_tokens is None:
        max_new_tokens = max_new_tokens_default
    # A prefill server answers one token whatever is asked for, so there is nothing to compare.
    high = INT64_MAX if max_new_tokens is None or limits.is_prefill else max_new_tokens
    min_new_tokens = fields.integer(names.min_tokens, 0, 0, high)
    temperature = _read_number(fields, "temperature", 1.0)
    params = SamplingParams(
        max_new_tokens=1,
        seed=0,
        min_new_tokens=min_new_tokens,
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_k=_read_top_k(fields),
        top_p=_read_number(fields, "top_p", 1.0),
        min_p=_read_number(fields, "min_p", 0.0),
        repetition_penalty=_read_number(fields, "repetition_penalty", 1.0),
        presence_penalty=_read_number(fields, "presence_penalty", 0.0),
        frequency_penalty=_read_number(fields, "frequency_penalty", 0.0),
        logit_bias=_read_logit_bias(fields, limits.vocab_size),
        stop_token_ids=fields.token_ids("stop_token_ids", limits.vocab_size, STOP_TOKEN_COUNT_MAX),
        ignore_eos=fields.boolean("ignore_eos", False),
    )
    text = TextOptions(
        stops=fields.texts("stop", STOP_COUNT_MAX, STOP_LENGTH_MAX),
        keeps_stop=fields.boolean("no_stop_trim", False)
        or fields.boolean("include_stop_str_in_output", False),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        min_new_tokens=min_new_tokens,
    )
    return SamplingChoice(
        n=fields.integer("n", 1, 1, N_MAX),
        max_name=max_name,
        min_name=fields.name(names.min_tokens),
        max_new_tokens=max_new_tokens,
        is_max_given=is_max_given,
        seed=_read_seed(fields, names),
        params=params,
        text=text,
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
    asked = room_left if choice.max_new_tokens is None else choice.max_new_tokens
    for name, count, is_given in (
        (choice.max_name, asked, choice.is_max_given),
        (choice.min_name, choice.params.min_new_tokens, True),
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
            f"logprob_start_len={start}: log-probabilities of {prompt_length - start} prompt "
            f"tokens may take {nbytes} bytes, at most {PROMPT_LOGPROBS_NBYTES_MAX} are told; ask "
            "for a later start, fewer likely tokens, fewer samples or fewer token ids",
            field="logprob_start_len",
        )


def derive_seed(seed: int, sample_index: int) -> int:
    """A seed of its own for each sample of a prompt; the first one keeps the client's."""
    if sample_index == 0:
        return seed
    digest = hashlib.blake2b(struct.pack("<QQ", seed, sample_index), digest_size=8).digest()
    return int.from_bytes(digest, "little") & SEED_MAX


def _read_max(fields: Fields, names: SamplingNames) -> tuple[str, int | None]:
    """The first bound on the output that is given, and its name."""
    for key in names.max_tokens:
        value = fields.optional_integer(key, 0)
        if value is not None:
            return fields.name(key), value
    return fields.name(names.max_tokens[0]), None


def _read_top_k(fields: Fields) -> int:
    top_k = fields.integer("top_k", TOP_K_ALL, TOP_K_ALL, TOP_K_MAX)
    if top_k == 0:
        raise fields.error("top_k", f"{TOP_K_ALL} for all tokens, or an integer in 1..{TOP_K_MAX}")
    return top_k


def _read_number(fields: Fields, key: str, default: float) -> float:
    return fields.number(key, default, SAMPLING_NUMBERS[key])


def _read_seed(fields: Fields, names: SamplingNames) -> int | None:
    """Clients may send any 64-bit integer; negative ones are folded into what the engine takes."""
    for key in names.seeds:
        seed = fields.optional_integer(key, -SEED_MAX - 1, SEED_MAX)
        if seed is not None:
            return seed & SEED_MAX
    return None


def _read_logit_bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    name = fields.name("logit_bias")
    given = Fields.of(fields.get("logit_bias"), name)
    if len(given.values) > LOGIT_BIAS_COUNT_MAX:
        raise RequestError(
            f"{name}: has {len(given.values)} entries; at most {LOGIT_BIAS_COUNT_MAX}", field=name
        )
    bias: dict[int, float] = {}
    for key in given.values:
        if not (key.isascii() and key.isdecimal() and len(key) < 20 and int(key) < vocab_size):
            raise RequestError(
                f"{name}: {shown(key)} must be a token id in 0..{vocab_size - 1}", field=name
            )
        if not given.has(key):
            raise given.error(key, "a finite number")
        bias[int(key)] = given.number(key, 0.0, LOGIT_BIAS)
    return bias
