"""JSON values that a client sent: parsed, shown in errors, told apart by their type.

Knows nothing of their meaning.
"""

from __future__ import annotations

import json
import math
from typing import TypeAlias, TypeGuard

import msgspec

from common.errors import RequestError

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
JsonObject: TypeAlias = dict[str, JsonValue]

# Objects and lists in each other. Readers recurse into them with up to three calls a level,
# and the interpreter allows a thousand; a schema of a hundred nested objects has two hundred.
NESTING_MAX = 256
SHOWN_LENGTH_MAX = 80


def parse_object(body: bytes | bytearray, what: str = "the body") -> JsonObject:
    """The JSON object in `body`; integers are exact at any size. what: its name in errors.

    Raises: RequestError if it is not JSON, no object, or nested deeper than NESTING_MAX; NaN and
        infinity are named by their field.
    """
    too_deep = f"{what} is nested too deeply: at most {NESTING_MAX} levels are read"
    try:
        value: JsonValue = msgspec.json.decode(body)
    except RecursionError as exc:
        raise RequestError(too_deep) from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        where = _find_not_finite(body)
        if where is not None:
            raise RequestError(f"{where}: must be a finite number", field=where) from exc
        raise RequestError(f"{what} is not JSON: {exc}") from exc
    # Hardly a body has so many brackets, and then its values need not be looked at.
    if body.count(b"[") + body.count(b"{") > NESTING_MAX and _is_too_deep(value):
        raise RequestError(too_deep)
    if not isinstance(value, dict):
        raise RequestError(f"{what} must be a JSON object, not {shown(value)}")
    return value


def _is_too_deep(value: JsonValue) -> bool:
    """Whether objects and lists lie more than NESTING_MAX deep in each other."""
    level = [value]
    for _ in range(NESTING_MAX):
        level = [
            item
            for one in level
            if isinstance(one, list | dict)
            for item in (one.values() if isinstance(one, dict) else one)
            if isinstance(item, list | dict)
        ]
        if not level:
            return False
    return True


def _find_not_finite(body: bytes | bytearray) -> str | None:
    """The first field that holds NaN or an infinity, which JSON does not have but people send."""
    try:
        value: JsonValue = json.loads(body)
    except (ValueError, RecursionError):
        return None
    pending = [("body", value)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, float) and not math.isfinite(value):
            # This reader also takes names with lone surrogates, which no answer could spell.
            return path.removeprefix("body.").encode("utf-8", "replace").decode()
        if isinstance(value, dict):
            pending.extend((f"{path}.{key}", item) for key, item in reversed(value.items()))
        elif isinstance(value, list):
            pending.extend((f"{path}[{i}]", item) for i, item in reversed(list(enumerate(value))))
    return None


def shown(value: JsonValue) -> str:
    """A value as a client wrote it, short enough for a message."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_LENGTH_MAX else f"{text[:SHOWN_LENGTH_MAX]}..."


def is_integer(value: JsonValue) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: JsonValue) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_given(value: JsonValue) -> bool:
    """Whether an option asks for anything; null, false, zero and empty ones do not, nor lists of
    them, but for numbers: [0] names a token."""
    if isinstance(value, list):
        return any(is_given(item) or is_number(item) for item in value)
    return bool(value)


def check_token_ids(value: list[JsonValue], name: str, vocab_size: int) -> list[int]:
    """`value` as token ids. Raises: RequestError naming the first that is none."""
    for index, item in enumerate(value):
        if not is_integer(item) or not 0 <= item < vocab_size:
            raise RequestError(
                f"{name}[{index}]={shown(item)}: must be a token id in 0..{vocab_size - 1}",
                field=name,
            )
    return [item for item in value if is_integer(item)]
