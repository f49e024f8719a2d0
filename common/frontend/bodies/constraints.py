"""The form that a client asks of an output's text: OpenAI's response_format, vLLM's
structured_outputs and guided_*, SGLang's json_schema, regex and ebnf. At most one of them.

Every refusal names the field. Whether a grammar can be compiled is asked later, off the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from common.errors import GrammarError, RequestError
from common.frontend.bodies.body import (
    B,
    Body,
    Json,
    Object,
    Refused,
    fields_of,
    nested,
    path,
    read,
    refusal,
)
from common.frontend.bodies.fields import JsonObject, JsonValue, parse_object, shown
from common.grammar import STYLE_KEY, lark_of
from common.request import Grammar, GrammarKind
from common.request_bounds import GRAMMAR_LENGTH_MAX

ANY_OBJECT: JsonObject = {"type": "object"}
CHOICE_COUNT_MAX = 1024

# ---- fields --------------------------------------------------------------------------------------

IS_SCHEMA = Meta(description="a JSON schema: an object, or its text")
SchemaField: TypeAlias = Annotated[str | Object, IS_SCHEMA] | None
GrammarField: TypeAlias = Annotated[str, Meta(max_length=GRAMMAR_LENGTH_MAX)] | None
Choice: TypeAlias = Annotated[str, Meta(min_length=1, max_length=GRAMMAR_LENGTH_MAX)]
ChoicesField: TypeAlias = Choice | Annotated[list[Choice], Meta(max_length=CHOICE_COUNT_MAX)] | None


class Grammars(Body, frozen=True):
    json_schema: SchemaField = None
    regex: GrammarField = None
    ebnf: GrammarField = None


class JsonSchema(Body, frozen=True):
    schema: Annotated[str | Object, IS_SCHEMA]
    strict: bool = False  # a schema is followed to the letter either way


class ResponseFormat(Body, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[Json, nested(JsonSchema)] = None


class StructuredGrammars(Body, frozen=True):
    json: SchemaField = None
    regex: GrammarField = None
    choice: ChoicesField = None
    grammar: GrammarField = None


class StructuredStyle(Body, frozen=True):
    json_object: bool = False
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    structural_tag: Refused = None


class OpenAiGrammars(Grammars, frozen=True):
    guided_json: SchemaField = None
    guided_regex: GrammarField = None
    guided_grammar: GrammarField = None
    guided_choice: ChoicesField = None
    response_format: Annotated[Object, nested(ResponseFormat)] = {}
    structured_outputs: Annotated[Object, nested(StructuredGrammars, StructuredStyle)] = {}


# ---- readers -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar, and the field that asked for it, which errors name."""

    field: str
    grammar: Grammar


def read_sglang_constraint(values: JsonObject, where: str) -> Constraint | None:
    """Of SGLang's sampling_params. Raises: RequestError."""
    return only_one(_grammars_of(_read_asked(Grammars, values, where), where))


def read_openai_constraint(body: JsonObject) -> Constraint | None:
    """Of a body of /v1/completions or /v1/chat/completions. Raises: RequestError."""
    asked = _read_asked(OpenAiGrammars, body, "")
    found = _grammars_of(asked, "")
    for constraint in (
        _read_response_format(asked.response_format) if asked.response_format else None,
        _read_structured_outputs(asked.structured_outputs) if asked.structured_outputs else None,
    ):
        if constraint is not None:
            found.append(constraint)
    return only_one(found)


def only_one(found: list[Constraint]) -> Constraint | None:
    """Raises: RequestError if there are two: an output can't be told to follow both."""
    if len(found) > 1:
        names = ", ".join(constraint.field for constraint in found)
        raise RequestError(f"{names}: at most one of them may be given", field=found[1].field)
    return found[0] if found else None


def read_schema(schema: JsonValue, name: str) -> Grammar:
    """A JSON schema, as an object or as its text."""
    if isinstance(schema, str):
        try:
            schema = parse_object(schema.encode(), "it")
        except RequestError as exc:
            raise refusal(name, schema, f"a JSON schema, and can't be read: {exc}") from exc
    assert isinstance(schema, dict), f"{name} is read as an object or a string"
    return schema_grammar(schema, name)


def schema_grammar(schema: JsonObject, name: str) -> Grammar:
    """Properties come in the order of the schema, which JSON objects keep."""
    return _bounded(GrammarKind.JSON_SCHEMA, msgspec.json.encode(schema).decode(), name)


def lark_grammar(text: str, name: str) -> Grammar:
    return _bounded(GrammarKind.LARK, text, name)


def read_regex(text: JsonValue, name: str) -> Grammar:
    assert isinstance(text, str), f"{name} is read as a string"
    return _bounded(GrammarKind.REGEX, text, name)


def read_ebnf(text: JsonValue, name: str) -> Grammar:
    """GBNF, as SGLang and vLLM have it, or Lark."""
    assert isinstance(text, str), f"{name} is read as a string"
    try:
        return lark_grammar(lark_of(lark_grammar(text, name).text), name)
    except GrammarError as error:
        raise RequestError(f"{name}: must be a grammar in GBNF or Lark: {error}", field=name) from (
            error
        )


def read_choice(choices: JsonValue, name: str) -> Grammar:
    """One terminal, which is one item of a parser's row however many choices there are: as rules,
    as many as are taken could not be followed."""
    texts = choices if isinstance(choices, list) else [choices]
    terminal = " | ".join(map(json.dumps, dict.fromkeys(texts)))
    return lark_grammar(f"start: CHOICE\nCHOICE: {terminal}", name)


READERS: dict[str, Callable[[JsonValue, str], Grammar]] = {
    **dict.fromkeys(("json_schema", "json", "guided_json"), read_schema),
    **dict.fromkeys(("regex", "guided_regex"), read_regex),
    **dict.fromkeys(("ebnf", "grammar", "guided_grammar"), read_ebnf),
    **dict.fromkeys(("choice", "guided_choice"), read_choice),
}


CHOICES = ("choice", "guided_choice")


def _read_asked(kind: type[B], values: JsonObject, where: str) -> B:
    """An empty text asks for nothing, nor does an empty list of choices: clients send them for what
    they don't want. Anything else is of its type or is refused."""
    asked: JsonObject = {
        key: item
        for key, item in values.items()
        if item is not None and item != ([] if key in CHOICES else "")
    }
    return read(kind, asked, where)


def _grammars_of(asked: Body, where: str) -> list[Constraint]:
    return [
        Constraint(path(where, key), READERS[key](value, path(where, key)))
        for key, value in msgspec.structs.asdict(asked).items()
        if key in READERS and value is not None
    ]


def _read_response_format(value: JsonObject) -> Constraint | None:
    key = "response_format"
    where = f"{key}.json_schema"
    chosen = read(ResponseFormat, value, key)
    # Checked also where it is not followed.
    if chosen.type == "json_schema" or chosen.json_schema is not None:
        schema = {} if chosen.json_schema is None else chosen.json_schema
        described = read(JsonSchema, schema, where)
    match chosen.type:
        case "text":
            return None
        case "json_object":
            return Constraint(key, schema_grammar(ANY_OBJECT, key))
        case "json_schema":
            return Constraint(f"{where}.schema", read_schema(described.schema, f"{where}.schema"))


def _read_structured_outputs(value: JsonObject) -> Constraint | None:
    key = "structured_outputs"
    style = read(StructuredStyle, value, key)
    for name in fields_of(StructuredGrammars):
        if value.get(name) in ("", []):
            # vLLM refuses an empty grammar too; without this, the output would follow none.
            raise refusal(path(key, name), value[name], "not empty, or absent")
    found = _grammars_of(_read_asked(StructuredGrammars, value, key), key)
    if style.json_object:
        found.append(Constraint(f"{key}.json_object", schema_grammar(ANY_OBJECT, key)))
    constraint = only_one(found)
    options: JsonObject = {}
    if style.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if style.whitespace_pattern is not None:
        options["whitespace_pattern"] = style.whitespace_pattern
    if not options:
        return constraint
    if constraint is None or constraint.grammar.kind is not GrammarKind.JSON_SCHEMA:
        raise RequestError(
            f"{key}={shown(value)}: says how JSON is written, but has no schema", field=key
        )
    schema: dict[str, JsonValue] = msgspec.json.decode(constraint.grammar.text)
    return Constraint(constraint.field, schema_grammar({**schema, STYLE_KEY: options}, key))


def _bounded(kind: GrammarKind, text: str, name: str) -> Grammar:
    if not 1 <= len(text) <= GRAMMAR_LENGTH_MAX:
        raise RequestError(
            f"{name}: has {len(text)} characters; must have 1..{GRAMMAR_LENGTH_MAX}", field=name
        )
    return Grammar(kind, text)
