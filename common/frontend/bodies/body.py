"""Objects of a body as structs: a field is its name, type, bounds, default and description at once.

`read` makes a struct of an object that a client sent; `schema_of` is its JSON schema. Strict on
purpose: true is not 1, "1" is not 1, and null means that a field was not given. Knows nothing of
the meaning of fields: a server's own bounds and rules over several fields are with their readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, cast

import msgspec
from msgspec import Meta

from common.errors import RequestError
from common.frontend.bodies.fields import JsonObject, JsonValue, is_given, is_number, shown
from common.request_bounds import INT64_MAX, NumberBounds

if TYPE_CHECKING:
    Json: TypeAlias = JsonValue
else:
    Json = Any  # msgspec takes no recursive types, and leaves such a value as it is

NOT_SUPPORTED = "is not supported by this server"
REFUSED: JsonObject = {
    "enum": [None, False, 0, "", [], {}],
    "description": "Not supported: a body that asks for it is answered 400.",
}
NULL: JsonObject = {"type": "null"}
TOKEN_ID: JsonObject = {"type": "integer", "minimum": 0, "description": "a token id of the model"}
TOKEN_IDS: JsonObject = {"type": "array", "items": TOKEN_ID}

Refused: TypeAlias = Annotated[Json, Meta(extra_json_schema=REFUSED)]
"""Of a field that this server knows and can't follow."""
Count: TypeAlias = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Positive: TypeAlias = Annotated[int, Meta(ge=1, le=INT64_MAX)]
Object: TypeAlias = dict[str, Json]


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Some fields of an object. Errors say of a field that it must be as its description says, or
    else as its type and bounds do."""


def refused(*names: str) -> type[Body]:
    """Fields that this server knows and can't follow."""
    fields = [(name, Refused, None) for name in names]
    kind = msgspec.defstruct("RefusedFields", fields, bases=(Body,), frozen=True, kw_only=True)
    return cast("type[Body]", kind)


B = TypeVar("B", bound=Body)


def read(kind: type[B], value: JsonValue, where: str = "") -> B:
    """The fields of `kind` in the object `value`; others are not looked at. where: its path.

    Raises: RequestError naming the first field that is wrong, its value and its range.
    """
    if not isinstance(value, dict):
        raise refusal(where, value, "an object")
    given = value
    if None in value.values():
        given = {key: item for key, item in value.items() if item is not None}
    if not _refused_names(kind).isdisjoint(given):
        _check_refused(kind, given, where)
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as exc:
        raise _first_wrong(kind, given, where) from exc


def _check_refused(kind: type[Body], given: JsonObject, where: str) -> None:
    for key in fields_of(kind):
        if key in _refused_names(kind) and is_given(given.get(key)):
            name = path(where, key)
            raise RequestError(f"{name}={shown(given[key])}: {NOT_SUPPORTED}", field=name)


def _first_wrong(kind: type[Body], given: JsonObject, where: str) -> RequestError:
    for key, field in fields_of(kind).items():
        if key not in given and not field.required:
            continue
        try:
            msgspec.convert(given[key], field.type)
        except (KeyError, msgspec.ValidationError):
            return refusal(
                path(where, key), given.get(key), _in_words(msgspec.json.schema(field.type))
            )
    raise AssertionError(f"{kind.__name__} takes each field of {given} but not all")


@cache
def fields_of(kind: type[Body]) -> dict[str, msgspec.structs.FieldInfo]:
    return {field.encode_name: field for field in msgspec.structs.fields(kind)}


@cache
def _refused_names(kind: type[Body]) -> frozenset[str]:
    return frozenset(key for key, field in fields_of(kind).items() if field.type == Refused)


def check_known(kinds: Sequence[type[Body]], values: JsonObject, where: str) -> None:
    """Raises: RequestError if a member of an object is a field of none of `kinds`."""
    known = {key for kind in kinds for key in fields_of(kind)}
    for key in values:
        if key not in known:
            name = path(where, key)
            text = f"{name}: unknown field; must be one of {', '.join(sorted(known))}"
            raise RequestError(text, field=name)


def check_number(value: JsonValue, name: str, bounds: NumberBounds) -> float:
    """Raises: RequestError unless `value` is a number within `bounds`."""
    if not (is_number(value) and bounds.admits(value)):
        raise refusal(name, value, f"a finite number in {bounds}")
    return float(value)


def path(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def refusal(name: str, value: JsonValue, allowed: str) -> RequestError:
    return RequestError(f"{name}={shown(value)}: must be {allowed}", field=name)


def _in_words(schema: dict[str, Any]) -> str:
    """The values that a schema allows, for an error."""
    match schema:
        case {"type": "object", "maxProperties": count_max}:
            return f"an object of at most {count_max} members"
        case {"type": "object"}:
            return "an object"
        case {"description": str() as description}:
            return description
        case {"enum": choices}:
            return " or ".join(map(shown, choices))
        case {"anyOf": kinds}:
            return ", or ".join(_in_words(kind) for kind in kinds if kind != NULL)
        case {"type": "integer", "minimum": low, "maximum": high}:
            return f"an integer in {low}..{high}"
        case {"type": "number", "minimum": low, "maximum": high}:
            return f"a finite number in {NumberBounds(low, high)}"
        case {"type": "number", "exclusiveMinimum": low, "maximum": high}:
            return f"a finite number in {NumberBounds(low, high, is_low_allowed=False)}"
        case {"type": "boolean"}:
            return "true or false"
        case {"type": "string", "minLength": low, "maxLength": high}:
            return f"a string of {low}..{high} characters"
        case {"type": "string", "maxLength": high}:
            return f"a string of at most {high} characters"
        case {"type": "string"}:
            return "a string"
        case {"type": "array", "maxItems": count_max, "items": items}:
            return f"a list of at most {count_max}, each {_in_words(items)}"
        case {"type": "array", "items": items}:
            return f"a list, each {_in_words(items)}"
    raise AssertionError(f"{schema} needs a description")


# ---- schemas -------------------------------------------------------------------------------------


def within(bounds: NumberBounds) -> Meta:
    if bounds.is_low_allowed:
        return Meta(ge=bounds.low, le=bounds.high)
    return Meta(gt=bounds.low, le=bounds.high)


def nested(*kinds: type[Body]) -> Meta:
    """Of a field that holds an object with the fields of `kinds`."""
    return Meta(extra_json_schema=schema_of(*kinds))


def schema_of(
    *kinds: type[Body],
    spread: Sequence[type[Body]] = (),
    optional: Sequence[str] = (),
    is_closed: bool = False,
) -> JsonObject:
    """The schema of an object with the fields of all `kinds`.

    spread: whose fields may be one value for all samples, or a list of them. optional: fields that
    it need not have after all. is_closed: it has no other members.
    """
    schema: JsonObject = {"type": "object", "additionalProperties": not is_closed}
    properties: JsonObject = {}
    required: list[JsonValue] = []
    for kind in (*kinds, *spread):
        (described,) = msgspec.json.schema_components([kind])[1].values()
        required += [key for key in described["required"] if key not in optional]
        for key, field in described["properties"].items():
            one = field if key in required else or_null(field)
            properties[key] = one_or_list(one) if kind in spread else one
        if "description" in described:
            schema["description"] = described["description"]
    return {**schema, "properties": properties, "required": required}


def or_null(schema: JsonObject) -> JsonObject:
    """The same, or null: a field that was not given."""
    several = schema.get("anyOf")
    if isinstance(several, list):
        kinds = [kind for kind in several if isinstance(kind, dict) and kind != NULL]
        if len(kinds) > 1:
            return {**schema, "anyOf": [*kinds, NULL]}
        schema = {key: value for key, value in schema.items() if key != "anyOf"} | kinds[0]
    kind = schema.get("type")
    return {**schema, "type": [kind, "null"]} if isinstance(kind, str) else schema


def one_or_list(schema: JsonObject) -> JsonObject:
    return {"anyOf": [schema, {"type": "array", "items": schema}]}
