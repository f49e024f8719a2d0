"""Prompts of bodies: as text or as token ids, one or several, cut where that is asked for.

Every refusal is a `RequestError` that names the field. Knows nothing of the rest of a body.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from common.errors import RequestError
from common.frontend.bodies.body import TOKEN_IDS, Body, Json, path, read, refusal
from common.frontend.bodies.bootstrap_address import KEY
from common.frontend.bodies.fields import JsonObject, JsonValue, check_token_ids
from common.frontend.bodies.sample import Limits
from common.frontend.text.tokenizer import Tokenizer
from common.request_bounds import SAMPLE_COUNT_MAX

T = TypeVar("T")

# ---- fields --------------------------------------------------------------------------------------

PROMPT_TEXT: JsonObject = {"type": "string", "minLength": 1}
PROMPT_IDS: JsonObject = {**TOKEN_IDS, "minItems": 1}


def prompt_schema(*kinds: JsonObject, description: str | None = None) -> Meta:
    """Of a field that holds a prompt of one of these kinds, or a list of them."""
    lists: list[JsonValue] = [{"type": "array", "items": kind, "minItems": 1} for kind in kinds]
    return Meta(description=description, extra_json_schema={"anyOf": [*kinds, *lists]})


class ComputedPrompt(Body, frozen=True):
    """What proxies add to the prefill server's answer, as vLLM reads it."""

    prompt_token_ids: Annotated[
        Json, Meta(description="a list of token ids", extra_json_schema=TOKEN_IDS)
    ] = None


# ---- readers -------------------------------------------------------------------------------------


class Prompt(msgspec.Struct, frozen=True):
    """text: "" if the client sent token ids, or of a prompt that was cut."""

    text: str
    token_ids: list[int]


class Encoding(msgspec.Struct, frozen=True):
    """has_special: the tokenizer adds its special tokens. kept_count: longer prompts are cut to so
    many tokens, to the last ones if keeps_end; None: they are refused."""

    has_special: bool = True
    kept_count: int | None = None
    keeps_end: bool = True

    def cut(self, token_ids: list[T]) -> list[T]:
        if self.kept_count is None or len(token_ids) <= self.kept_count:
            return token_ids
        return token_ids[-self.kept_count :] if self.keeps_end else token_ids[: self.kept_count]


AS_SENT = Encoding()


def check_sample_count(count: int) -> None:
    if count > SAMPLE_COUNT_MAX:
        raise RequestError(f"the body asks for {count} samples; at most {SAMPLE_COUNT_MAX}")


def read_prompts(
    value: JsonValue,
    name: str,
    tokenizer: Tokenizer,
    limits: Limits,
    *,
    is_text: bool,
    encoding: Encoding = AS_SENT,
    computed: Prompt | None = None,
) -> tuple[list[Prompt], bool]:
    """One prompt or several, as texts or else as token ids, and whether they came as a list.

    computed: what is taken instead of one prompt. Raises: RequestError.
    """

    def read_one(one: JsonValue, name: str) -> Prompt:
        if is_text:
            return encode_prompt(one, name, tokenizer, limits, encoding)
        return check_prompt_ids(one, name, limits, encoding)

    if value == []:
        raise RequestError(f"{name}: must not be empty", field=name)
    is_list = isinstance(value, list) and (is_text or isinstance(value[0], list))
    if computed is not None:
        if is_list and isinstance(value, list) and len(value) > 1:
            raise refusal(name, value, f"one prompt, since {KEY}.prompt_token_ids is given")
        return [computed], is_list
    if not is_list:
        return [read_one(value, name)], False
    assert isinstance(value, list), "it is a list"
    check_sample_count(len(value))
    return [read_one(one, f"{name}[{i}]") for i, one in enumerate(value)], True


def encode_prompt(
    text: JsonValue,
    name: str,
    tokenizer: Tokenizer,
    limits: Limits,
    encoding: Encoding = AS_SENT,
) -> Prompt:
    """A prompt given as text. Raises: RequestError if it is empty or too long."""
    if not isinstance(text, str):
        raise refusal(name, text, "a string")
    if not text:
        raise RequestError(f"{name}: must not be empty", field=name)
    if encoding.kept_count is None:
        check_length(tokenizer.token_count_min(text), name, limits, "at least ")
    whole = tokenizer.encode(text, add_special_tokens=encoding.has_special)
    token_ids = encoding.cut(whole)
    check_length(len(token_ids), name, limits)
    if max(token_ids) >= limits.vocab_size:
        raise RequestError(
            f"{name}: the tokenizer makes the token {max(token_ids)} of it; the model has tokens "
            f"0..{limits.vocab_size - 1}",
            field=name,
        )
    return Prompt(text if len(token_ids) == len(whole) else "", token_ids)


def check_prompt_ids(
    value: JsonValue, name: str, limits: Limits, encoding: Encoding = AS_SENT
) -> Prompt:
    """A prompt given as ids. Raises: RequestError if it is empty, too long or no list of ids."""
    if not isinstance(value, list):
        raise refusal(name, value, "a list of token ids")
    value = encoding.cut(value)
    check_length(len(value), name, limits)
    return Prompt("", check_token_ids(value, name, limits.vocab_size))


def read_computed_prompt(body: JsonObject, limits: Limits) -> Prompt | None:
    """The prompt as the server that computed it made tokens of it, if a body has them: they need
    not be made again. Raises: RequestError."""
    params = body.get(KEY)
    ids = read(ComputedPrompt, params, KEY).prompt_token_ids if params else None
    return check_prompt_ids(ids, path(KEY, "prompt_token_ids"), limits) if ids else None


def check_length(count: int, name: str, limits: Limits, about: str = "") -> None:
    """Raises: RequestError unless a prompt has a token and leaves room for one more. about: said
    before the count."""
    if not count:
        raise RequestError(f"{name}: the prompt is empty; it must have a token", field=name)
    if count >= limits.request_token_max:
        raise RequestError(
            f"{name}: the prompt has {about}{count} tokens; must be at most "
            f"{limits.request_token_max - 1}, since a request may have {limits.request_token_max} "
            "in all (the context length or the KV pool)",
            field=name,
        )
