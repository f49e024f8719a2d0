"""The bounds of `SamplingParams`, which every process that takes them holds them to.

Knows nothing of messages.
"""

from __future__ import annotations

import msgspec

from common.errors import ProtocolError
from common.protocol.value_checks import (
    Check,
    check_count,
    check_int,
    check_ints,
    check_number,
    check_text,
    int_in,
    ints_in,
    number_in,
)
from common.request import Grammar, SamplingParams
from common.request_bounds import (
    ALLOWED_TOKEN_COUNT_MAX,
    ASKED_LOGPROB_COUNT_MAX,
    BAD_WORD_COUNT_MAX,
    BAD_WORD_LENGTH_MAX,
    GRAMMAR_LENGTH_MAX,
    LOGIT_BIAS,
    LOGIT_BIAS_COUNT_MAX,
    SAMPLING_NUMBERS,
    SEED_MAX,
    STOP_TOKEN_COUNT_MAX,
    TOKEN_COUNT_MAX,
    TOKEN_ID_MAX,
    TOP_K_ALL,
    TOP_K_MAX,
    TOP_LOGPROB_COUNT_MAX,
)


def check_sampling_params(name: str, params: SamplingParams) -> None:
    """What the HTTP readers hold a client's options to. Raises: ProtocolError."""
    for field, option in msgspec.structs.asdict(params).items():
        SAMPLING_CHECKS[field](f"{name}.{field}", option)


def _check_top_k(name: str, value: object) -> None:
    if value != TOP_K_ALL:
        check_int(name, value, 1, TOP_K_MAX)


def _check_logit_bias(name: str, value: object) -> None:
    assert isinstance(value, dict), f"{name} is decoded as a mapping"
    check_ints(name, list(value), 0, TOKEN_ID_MAX, LOGIT_BIAS_COUNT_MAX)
    for token_id, bias in value.items():
        check_number(f"{name}[{token_id}]", bias, LOGIT_BIAS)


def _check_bad_words(name: str, value: object) -> None:
    assert isinstance(value, tuple), f"{name} is decoded as a tuple"
    check_count(name, len(value), BAD_WORD_COUNT_MAX)
    for word in value:
        check_ints(name, word, 0, TOKEN_ID_MAX, BAD_WORD_LENGTH_MAX)
        if not word:
            raise ProtocolError(f"{name}: a word without tokens")


def _check_grammar(name: str, value: object) -> None:
    if isinstance(value, Grammar):
        check_text(name, value.text, GRAMMAR_LENGTH_MAX)


def _check_nothing(name: str, value: object) -> None:
    """Of a bool, which decoding has checked."""


SAMPLING_CHECKS: dict[str, Check] = {
    "max_new_tokens": int_in(0, TOKEN_COUNT_MAX),
    "min_new_tokens": int_in(0, TOKEN_COUNT_MAX),
    "seed": int_in(0, SEED_MAX),
    "top_k": _check_top_k,
    **{field: number_in(bounds) for field, bounds in SAMPLING_NUMBERS.items()},
    "logit_bias": _check_logit_bias,
    "stop_token_ids": ints_in(0, TOKEN_ID_MAX, STOP_TOKEN_COUNT_MAX),
    "ignore_eos": _check_nothing,
    "return_logprob": _check_nothing,
    "top_logprobs_num": int_in(0, TOP_LOGPROB_COUNT_MAX),
    "token_ids_logprob": ints_in(0, TOKEN_ID_MAX, ASKED_LOGPROB_COUNT_MAX),
    "logprob_start_len": int_in(-1, TOKEN_COUNT_MAX),
    "grammar": _check_grammar,
    "allowed_token_ids": ints_in(0, TOKEN_ID_MAX, ALLOWED_TOKEN_COUNT_MAX),
    "bad_words": _check_bad_words,
}
"""Every field of `SamplingParams`."""
