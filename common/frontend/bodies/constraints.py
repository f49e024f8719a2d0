"""What the text of an output must be, as clients ask for it: OpenAI's response_format, vLLM's
structured_outputs and guided_*, SGLang's json_schema, regex and ebnf. At most one of them.

Every refusal names the field. Whether a grammar can be compiled is asked later, off the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from common.errors import GrammarError, RequestError
from common.frontend.bodies.fields import (
    NOT_SUPPORTED,
    Fields,
    JsonObject,
    JsonValue,
    is_given,
    parse_object,
    shown,
)
from common.grammar import STYLE_KEY, lark_of
from common.request import Grammar, GrammarKind
from common.request_bounds import GRAMMAR_LENGTH_MAX

ANY_OBJECT: JsonObject = {"type": "object"}
CHOICE_COUNT_MAX = 1024


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar, and the field that asked for it, which errors name."""

    field: str
    grammar: Grammar


Reader = Callable[[Fields, str], Grammar]


def read_sglang_constraint(fields: Fields) -> Constraint | None:
    """Of SGLang's sampling_params, or of an OpenAI body that uses SGLang's names."""
    return only_one(
        _read_each(fields, {"json_schema": read_schema, "regex": read_regex, "ebnf": read_ebnf})
    )


def read_openai_constraint(fields: Fields) -> Constraint | None:
    """Of a body of /v1/completions or /v1/chat/completions. Raises: RequestError."""
    found = _read_each(
        fields,
        {
            "json_schema": read_schema,
            "regex": read_regex,
            "ebnf": read_ebnf,
            "guided_json": read_schema,
            "guided_regex": read_regex,
            "guided_grammar": read_ebnf,
            "guided_choice": read_choice,
        },
    )
    for constraint in (_read_response_format(fields), _read_structured_outputs(fields)):
        if constraint is not None:
            found.append(constraint)
    return only_one(found)


def only_one(found: list[Constraint]) -> Constraint | None:
    """Raises: RequestError if there are two: an output can't be told to follow both."""
    if len(found) > 1:
        names = ", ".join(constraint.field for constraint in found)
        raise RequestError(f"{names}: at most one of them may be given", field=found[1].field)
    return found[0] if found else None


def read_schema(fields: Fields, key: str) -> Grammar:
    """A JSON schema, as an object or as its text."""
    schema = fields.get(key)
    if isinstance(schema, str):
        try:
            schema = parse_object(schema.encode(), "it")
        except RequestError as exc:
            raise fields.error(key, f"a JSON schema, and can't be read: {exc}") from exc
    if not isinstance(schema, dict):
        raise fields.error(key, "a JSON schema: an object, or its text")
    return schema_grammar(schema, fields.name(key))


def schema_grammar(schema: JsonObject, name: str) -> Grammar:
    """Properties come in the order of the schema, which JSON objects keep."""
    return _bounded(GrammarKind.JSON_SCHEMA, msgspec.json.encode(schema).decode(), name)


def lark_grammar(text: str, name: str) -> Grammar:
    return _bounded(GrammarKind.LARK, text, name)


def read_regex(fields: Fields, key: str) -> Grammar:
    return _bounded(GrammarKind.REGEX, fields.text(key, ""), fields.name(key))


def read_ebnf(fields: Fields, key: str) -> Grammar:
    """GBNF, as SGLang and vLLM have it, or Lark."""
    name = fields.name(key)
    text = _bounded(GrammarKind.LARK, fields.text(key, ""), name).text
    try:
        return _bounded(GrammarKind.LARK, lark_of(text), name)
    except GrammarError as error:
        raise RequestError(f"{name}: must be a grammar in GBNF or Lark: {error}", field=name) from (
            error
        )


def read_choice(fields: Fields, key: str) -> Grammar:
    """One terminal, which is one item of a parser's row however many choices there are: as rules,
    as many as are taken could not be followed."""
    texts = fields.texts(key, CHOICE_COUNT_MAX, GRAMMAR_LENGTH_MAX)
    choices = " | ".join(map(json.dumps, texts))
    return _bounded(GrammarKind.LARK, f"start: CHOICE\nCHOICE: {choices}", fields.name(key))


def _read_each(fields: Fields, readers: dict[str, Reader]) -> list[Constraint]:
    return [
        Constraint(fields.name(key), read(fields, key))
        for key, read in readers.items()
        if is_given(fields.get(key)) or fields.get(key) == {}
    ]


def _read_response_format(fields: Fields) -> Constraint | None:
    key = "response_format"
    if not is_given(fields.get(key)):
        return None
    chosen = Fields.of(fields.get(key), key)
    match chosen.text("type", ""):
        case "text":
            return None
        case "json_object":
            return Constraint(key, schema_grammar(ANY_OBJECT, key))
        case "json_schema":
            where = f"{key}.json_schema"
            described = Fields.of(chosen.get("json_schema"), where)
            described.boolean("strict", False)  # a schema is followed to the letter either way
            if not described.has("schema"):
                raise described.error("schema", "a JSON schema")
            return Constraint(f"{where}.schema", read_schema(described, "schema"))
        case _:
            raise chosen.error("type", "'text', 'json_object' or 'json_schema'")


def _read_structured_outputs(fields: Fields) -> Constraint | None:
    key = "structured_outputs"
    if not is_given(fields.get(key)):
        return None
    chosen = Fields.of(fields.get(key), key)
    chosen.refuse(("structural_tag",), NOT_SUPPORTED)
    found = _read_each(
        chosen,
        {"json": read_schema, "regex": read_regex, "choice": read_choice, "grammar": read_ebnf},
    )
    if chosen.boolean("json_object", False):
        found.append(Constraint(f"{key}.json_object", schema_grammar(ANY_OBJECT, key)))
    constraint = only_one(found)
    style: JsonObject = {}
    if chosen.boolean("disable_any_whitespace", False):
        style["whitespace_flexible"] = False
    if chosen.has("whitespace_pattern"):
        style["whitespace_pattern"] = chosen.text("whitespace_pattern", "")
    if not style:
        return constraint
    if constraint is None or constraint.grammar.kind is not GrammarKind.JSON_SCHEMA:
        raise RequestError(
            f"{key}={shown(fields.get(key))}: says how JSON is written, but has no schema",
            field=key,
        )
    schema: dict[str, JsonValue] = msgspec.json.decode(constraint.grammar.text)
    return Constraint(constraint.field, schema_grammar({**schema, STYLE_KEY: style}, key))


def _bounded(kind: GrammarKind, text: str, name: str) -> Grammar:
    if not 1 <= len(text) <= GRAMMAR_LENGTH_MAX:
        raise RequestError(
            f"{name}: has {len(text)} characters; must have 1..{GRAMMAR_LENGTH_MAX}", field=name
        )
    return Grammar(kind, text)
