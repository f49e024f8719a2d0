"""What stands between the markers of a call: the function's name and its arguments.

A body reads what it is given whole; the reader of the output finds where it ends. Knows no markers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from common.errors import RequestError
from common.frontend.bodies.fields import JsonObject, JsonValue, parse_object
from common.frontend.text.parsing.literals import RAW_QUOTE, LiteralReader, read_literal

Tools: TypeAlias = Mapping[str, JsonObject]
"""Name -> the JSON schema of the parameters."""


@dataclass(frozen=True, slots=True)
class Call:
    """arguments: JSON text."""

    name: str
    arguments: str


class CallBody(Protocol):
    def is_open(self, text: str) -> bool:
        """Whether `text` ends inside a value that may hold any text, a closing marker too."""

    def read(self, text: str, tools: Tools) -> list[Call] | None:
        """The calls that `text` is; None if it is none, or calls what is no tool."""


@dataclass(frozen=True, slots=True)
class Objects:
    """{"name": NAME, "arguments": {...}} or "parameters", one or a list of them."""

    def is_open(self, text: str) -> bool:
        return text.lstrip()[:1] in ("{", "[") and is_in_string(text)

    def read(self, text: str, tools: Tools) -> list[Call] | None:
        value = _parsed(f'{{"calls": {text}}}')
        items = value.get("calls") if value is not None else None
        several = items if isinstance(items, list) else [items]
        return _all_of(_read_object(item, tools) for item in several)


@dataclass(frozen=True, slots=True)
class Named:
    """The name, then the arguments as one JSON object. header: all before it, with a group `name`.
    trailer: what may follow it."""

    header: re.Pattern[str]
    trailer: str = ""

    def is_open(self, text: str) -> bool:
        found = self.header.match(text)
        return found is not None and is_in_string(text[found.end() :])

    def read(self, text: str, tools: Tools) -> list[Call] | None:
        found = self.header.match(text)
        if found is None or found["name"] not in tools:
            return None
        rest = text[found.end() :].strip().removesuffix(self.trailer).strip()
        arguments = _parsed(rest) if rest else {}
        return None if arguments is None else [_call(found["name"], arguments)]


@dataclass(frozen=True, slots=True)
class Parameters:
    """The name, then each parameter between markers of its own.

    header: all before them, with a group `name`. opening: of a parameter, with a group `key`, and
    `is_string` where the model says whether the value is text. closing: of a parameter. has_lines:
    a value stands on lines of its own. trailer: what may follow the last one.

    A value has the type that the tool's schema gives to its parameter.
    """

    header: re.Pattern[str]
    opening: re.Pattern[str]
    closing: str
    has_lines: bool = False
    trailer: str = ""

    def is_open(self, text: str) -> bool:
        place = 0
        while (opened := self.opening.search(text, place)) is not None:
            place = text.find(self.closing, opened.end())
            if place < 0:
                return True
        return False

    def read(self, text: str, tools: Tools) -> list[Call] | None:
        found = self.header.match(text)
        if found is None or found["name"] not in tools:
            return None
        schema = tools[found["name"]]
        values: JsonObject = {}
        place = found.end()
        while (opened := self.opening.match(text, place)) is not None:
            end = text.find(self.closing, opened.end())
            end = len(text) if end < 0 else end
            value = text[opened.end() : end]
            if self.has_lines:
                value = value.removeprefix("\n").removesuffix("\n")
            says = opened.groupdict().get("is_string")
            typed = _typed(value, _types_of(schema, opened["key"]) if says is None else None)
            values[opened["key"]] = value if says == "true" else typed
            place = end + len(self.closing)
        if text[place:].strip() not in ("", self.trailer):
            return None
        return _checked(found["name"], values)


@dataclass(frozen=True, slots=True)
class Keyed:
    """The name, then {key: value} with bare keys and raw quotes. header: as of `Named`."""

    header: re.Pattern[str]

    def is_open(self, text: str) -> bool:
        return text.count(RAW_QUOTE) % 2 == 1

    def read(self, text: str, tools: Tools) -> list[Call] | None:
        found = self.header.match(text)
        if found is None or found["name"] not in tools:
            return None
        reader = LiteralReader(text[found.end() :], takes_bare=True)
        try:
            values = reader.members("{", "}", ":")
            reader.expect_end()
        except ValueError:
            return None
        return _checked(found["name"], values)


@dataclass(frozen=True, slots=True)
class Pythonic:
    """name(key=value, ...), with values as Python writes them."""

    def is_open(self, text: str) -> bool:
        return is_in_string(text, "\"'")

    def read(self, text: str, tools: Tools) -> list[Call] | None:
        reader = LiteralReader(text)
        try:
            name = reader.word()
            values = reader.members("(", ")", "=")
            reader.expect_end()
        except ValueError:
            return None
        return _checked(name, values) if name in tools else None


@dataclass(frozen=True, slots=True)
class AnyOf:
    """The first of several bodies that fits: models of one family write more than one."""

    bodies: tuple[CallBody, ...]

    def is_open(self, text: str) -> bool:
        return any(body.is_open(text) for body in self.bodies)

    def read(self, text: str, tools: Tools) -> list[Call] | None:
        for body in self.bodies:
            calls = body.read(text, tools)
            if calls is not None:
                return calls
        return None


def is_in_string(text: str, quotes: str = '"') -> bool:
    """Whether `text` ends inside quotes."""
    quote = ""
    is_escaped = False
    for character in text:
        if is_escaped:
            is_escaped = False
        elif quote:
            is_escaped = character == "\\"
            quote = "" if character == quote else quote
        elif character in quotes:
            quote = character
    return bool(quote)


def _parsed(text: str) -> JsonObject | None:
    try:
        return parse_object(text.encode())
    except (RequestError, UnicodeEncodeError):
        return None


def _read_object(value: JsonValue, tools: Tools) -> Call | None:
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    if not isinstance(name, str) or name not in tools:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return Call(name, arguments) if isinstance(arguments, str) else _call(name, arguments)


def _all_of(calls: Iterable[Call | None]) -> list[Call] | None:
    found: list[Call] = []
    for call in calls:
        if call is None:
            return None
        found.append(call)
    return found or None


def _call(name: str, arguments: JsonValue) -> Call:
    return Call(name, json.dumps(arguments, ensure_ascii=False))


def _checked(name: str, values: JsonObject) -> list[Call] | None:
    """None if JSON can't say it: infinities, halves of characters."""
    try:
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError:
        return None
    return [Call(name, text)]


# ---- types ---------------------------------------------------------------------------------------


def _types_of(schema: JsonObject, key: str) -> frozenset[str]:
    """The JSON types that a parameter may have; empty if the schema does not say."""
    properties = schema.get("properties")
    return _types(properties.get(key) if isinstance(properties, dict) else None, schema, 4)


def _types(value: JsonValue, root: JsonObject, depth: int) -> frozenset[str]:
    if not isinstance(value, dict) or not depth:
        return frozenset()
    found: set[str] = set()
    kind = value.get("type")
    for one in kind if isinstance(kind, list) else [kind]:
        if isinstance(one, str):
            found.add(one)
    choices = value.get("enum")
    if not found and isinstance(choices, list):
        found |= {_type_of(choice) for choice in choices}
    for key in ("anyOf", "oneOf", "allOf"):
        several = value.get(key)
        for one in several if isinstance(several, list) else []:
            found |= _types(one, root, depth - 1)
    reference = value.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: JsonValue = root
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, dict) else None
        found |= _types(target, root, depth - 1)
    return frozenset(found)


def _type_of(value: JsonValue) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"


def _typed(text: str, types: frozenset[str] | None) -> JsonValue:
    """A value that stands there as text. types: it may have, empty for any, None: what JSON says.

    Text stays text where the types leave no better choice.
    """
    if types == frozenset({"string"}):
        return text
    value = _value_of(text.strip())
    found = _type_of(value)
    fits = not types or found in types or (found == "integer" and "number" in types)
    return value if fits and value != text.strip() else text


def _value_of(text: str) -> JsonValue:
    """JSON or a Python literal; the text itself if it is neither."""
    wrapped = _parsed(f'{{"value": {text}}}')
    if wrapped is not None and wrapped.keys() == {"value"}:
        return wrapped["value"]
    try:
        value = read_literal(text)
    except ValueError:
        return text
    return text if isinstance(value, float) and not math.isfinite(value) else value
