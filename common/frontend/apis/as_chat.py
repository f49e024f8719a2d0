"""Bodies of other dialects as bodies of a chat: their texts, and the names of fields in errors.

A dialect makes the body of a chat of its own, so that both have one reader. What that refuses is
named as the client wrote it. Knows nothing of routes and replies.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import structs

from common.errors import RequestError
from common.frontend.apis.openai_call import OpenAiCall
from common.frontend.apis.openai_chat import parse_chat
from common.frontend.bodies.body import Body, path, read, refusal
from common.frontend.bodies.fields import JsonObject, JsonValue, parse_object, shown
from common.frontend.bodies.sample import Limits
from common.frontend.text.parsing.parsing import Parsers, Parsing
from common.frontend.text.tokenizer import Tokenizer

Names = Sequence[tuple[re.Pattern[str], str]]
"""How a chat's names of fields begin, and what they are in a dialect."""


def own_names(*renamed: tuple[str, str]) -> Names:
    """From regular expressions for a chat's names."""
    return [(re.compile(rf"{pattern}(?=\W|$)"), name) for pattern, name in renamed]


def parse_as_chat(
    body: JsonObject,
    renamed: Names,
    tokenizer: Tokenizer,
    limits: Limits,
    name: str,
    parsers: Parsers,
) -> tuple[OpenAiCall, Parsing]:
    """As `parse_chat`. Raises: RequestError in the names of the dialect."""
    try:
        call, parsing = parse_chat(body, tokenizer, limits, name, parsers)
    except RequestError as error:
        raise in_own_names(error, renamed) from error
    samples = tuple(
        structs.replace(sample, grammar_field=_in_own_names(sample.grammar_field, renamed))
        for sample in call.samples
    )
    return structs.replace(call, samples=samples), parsing


def in_own_names(error: RequestError, renamed: Names) -> RequestError:
    field = None if error.field is None else _in_own_names(error.field, renamed)
    return RequestError(_in_own_names(error.message, renamed), field=field, status=error.status)


def _in_own_names(text: str, renamed: Names) -> str:
    for pattern, name in renamed:
        if pattern.match(text):
            return pattern.sub(name, text, count=1)
    return text


class TypedPart(Body, frozen=True, kw_only=True):
    """Of a list in a message."""

    type: str
    text: str | None = None


def text_parts(value: JsonValue, where: str, types: Sequence[str]) -> list[str]:
    """The texts of a list of parts that must be of one of these types.

    Raises: RequestError naming the first part that is none.
    """
    if not isinstance(value, list):
        raise refusal(where, value, f"a string or a list of parts of the type {_either(types)}")
    texts: list[str] = []
    for index, item in enumerate(value):
        place = f"{where}[{index}]"
        part = read(TypedPart, item, place)
        if part.type not in types:
            allowed = f"{_either(types)}; this server takes text only"
            raise refusal(path(place, "type"), part.type, allowed)
        if part.text is None:
            raise refusal(path(place, "text"), None, "a string")
        texts.append(part.text)
    return texts


def chat_content(texts: list[str]) -> JsonValue:
    """Texts as the content of one message."""
    if len(texts) < 2:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def check_arguments(text: str, name: str) -> str:
    """Raises: RequestError unless these are the arguments of a call: a JSON object, or nothing."""
    if text:
        try:
            parse_object(text.encode())
        except RequestError as exc:
            raise refusal(name, text, "a JSON object") from exc
    return text


def _either(types: Sequence[str]) -> str:
    return " or ".join(map(shown, types))
