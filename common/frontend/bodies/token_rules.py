"""Fields that name tokens: those that may be drawn, those that end an output, and bad words.

Knows nothing of the rest of a body.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

from common.errors import RequestError
from common.frontend.bodies.body import TOKEN_IDS, Body, Json, refusal
from common.frontend.bodies.fields import (
    JsonObject,
    JsonValue,
    check_token_ids,
    is_integer,
    shown,
)
from common.frontend.bodies.sample import Limits
from common.request_bounds import (
    ALLOWED_TOKEN_COUNT_MAX,
    BAD_WORD_COUNT_MAX,
    BAD_WORD_LENGTH_MAX,
    STOP_TOKEN_COUNT_MAX,
)

BAD_WORD_TEXT_LENGTH_MAX = 1024  # characters, as of a stop string
INTEGERS: JsonObject = {
    "type": "array", "items": {"type": "integer", "description": "an integer"}
}  # fmt: skip
BAD_WORD_IDS: JsonObject = {
    "type": "array", "items": {**TOKEN_IDS, "minItems": 1, "maxItems": BAD_WORD_LENGTH_MAX}
}  # fmt: skip


class TokenRules(Body, frozen=True):
    """allowed_token_ids, bad_words: vLLM's."""

    stop_token_ids: Annotated[
        list[Json], Meta(max_length=STOP_TOKEN_COUNT_MAX, extra_json_schema=INTEGERS)
    ] = []
    allowed_token_ids: (
        Annotated[
            list[Json],
            Meta(
                min_length=1,
                max_length=ALLOWED_TOKEN_COUNT_MAX,
                description=f"a list of 1..{ALLOWED_TOKEN_COUNT_MAX} token ids",
                extra_json_schema=TOKEN_IDS,
            ),
        ]
        | None
    ) = None
    bad_words: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=BAD_WORD_TEXT_LENGTH_MAX)]],
        Meta(max_length=BAD_WORD_COUNT_MAX),
    ] = []


BadWordIds: TypeAlias = Annotated[
    list[Json], Meta(max_length=BAD_WORD_COUNT_MAX, extra_json_schema=BAD_WORD_IDS)
]
"""Bad words as the token ids that another server made of them."""


def read_stop_token_ids(given: list[Json], name: str, vocab_size: int) -> tuple[int, ...]:
    """Those that can be drawn. Others end nothing, here as in other servers: clients send the ids
    of one model to another. Raises: RequestError."""
    for index, item in enumerate(given):
        if not is_integer(item):
            raise RequestError(f"{name}[{index}]={shown(item)}: must be an integer", field=name)
    ids = [item for item in given if is_integer(item) and 0 <= item < vocab_size]
    return tuple(dict.fromkeys(ids))


def read_allowed_token_ids(given: list[Json] | None, name: str, limits: Limits) -> tuple[int, ...]:
    """Raises: RequestError."""
    if given is None:
        return ()
    return tuple(sorted(set(check_token_ids(given, name, limits.vocab_size))))


def read_bad_words(texts: list[str], name: str, limits: Limits) -> tuple[tuple[int, ...], ...]:
    """Each word as tokens, as vLLM has it: at the beginning of a text, and behind a space if that
    only makes another first token. Raises: RequestError."""
    words: dict[tuple[int, ...], None] = {}
    for index, text in enumerate(texts):
        where = f"{name}[{index}]"
        word = text.lstrip()
        if not word:
            raise refusal(where, text, "a text that is not blank")
        if limits.encode is None:
            raise refusal(where, text, "absent: text stays where its client is")
        first, spaced = (tuple(limits.encode(spelled)) for spelled in (word, f" {word}"))
        found = [first]
        if len(spaced) == len(first) and spaced[0] != first[0]:
            found.append(spaced)
        for tokens in found:
            words[check_bad_word([*tokens], where, limits)] = None
    check_word_count(len(words), name)
    return tuple(words)


def check_bad_word(tokens: JsonValue, name: str, limits: Limits) -> tuple[int, ...]:
    """Raises: RequestError."""
    if not isinstance(tokens, list):
        raise refusal(name, tokens, "a list of token ids")
    if not 1 <= len(tokens) <= BAD_WORD_LENGTH_MAX:
        raise RequestError(
            f"{name}: has {len(tokens)} tokens; must have 1..{BAD_WORD_LENGTH_MAX}", field=name
        )
    return tuple(check_token_ids(tokens, name, limits.vocab_size))


def check_word_count(count: int, name: str) -> None:
    if count > BAD_WORD_COUNT_MAX:
        raise RequestError(
            f"{name}: {count} sequences of tokens; at most {BAD_WORD_COUNT_MAX} are taken",
            field=name,
        )
