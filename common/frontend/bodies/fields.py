"""Typed access to a client's JSON body: a wrong value is a 400 that names it and its range.

Strict on purpose: true is not 1, "1" is not 1, and null means that a field was not given. Knows
nothing of what the fields mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import TypeAlias, TypeGuard

import msgspec

from common.errors import RequestError
from common.request_bounds import INT64_MAX, NumberBounds

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
JsonObject: TypeAlias = dict[str, JsonValue]

# Objects and lists in each other. What reads them goes down with them, up to three calls a level,
# and the interpreter allows a thousand; a schema of a hundred nested objects has two hundred.
NESTING_MAX = 256
SHOWN_LENGTH_MAX = 80
NOT_SUPPORTED = "is not supported by this server"


def parse_object(body: bytes | bytearray, what: str = "the body") -> JsonObject:
    """The JSON object in `body`; integers are exact at any size. what: how errors call it.

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
    them."""
    if isinstance(value, list):
        return any(is_given(item) for item in value)
    return bool(value)


class Fields:
    """The members of one object of a body. where: its path, put before every name in errors."""

    def __init__(self, values: JsonObject, where: str = "") -> None:
        self.values = values
        self._where = f"{where}." if where else ""

    @classmethod
    def of(cls, value: JsonValue, where: str) -> Fields:
        """Raises: RequestError if `value` is no object; null is an empty one."""
        if value is None:
            return cls({}, where)
        if not isinstance(value, dict):
            raise RequestError(f"{where}={shown(value)}: must be an object", field=where)
        return cls(value, where)

    def get(self, key: str) -> JsonValue:
        return self.values.get(key)

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def name(self, key: str) -> str:
        return f"{self._where}{key}"

    def error(self, key: str, allowed: str) -> RequestError:
        name = self.name(key)
        return RequestError(f"{name}={shown(self.get(key))}: must be {allowed}", field=name)

    def integer(self, key: str, default: int, low: int, high: int = INT64_MAX) -> int:
        value = self.optional_integer(key, low, high)
        return default if value is None else value

    def optional_integer(self, key: str, low: int, high: int = INT64_MAX) -> int | None:
        value = self.get(key)
        if value is None:
            return None
        if not is_integer(value) or not low <= value <= high:
            raise self.error(key, f"an integer in {low}..{high}")
        return value

    def number(self, key: str, default: float, bounds: NumberBounds) -> float:
        value = self.get(key)
        if value is None:
            return default
        if is_number(value) and bounds.admits(value):
            return float(value)
        raise self.error(key, f"a finite number in {bounds}")

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def texts(self, key: str, count_max: int, length_max: int) -> tuple[str, ...]:
        """One string or a list of them, none empty, without repetitions."""
        value = self.get(key)
        if value is None:
            return ()
        found = [value] if isinstance(value, str) else value
        allowed = f"a string or a list of at most {count_max} strings of 1..{length_max} characters"
        if not isinstance(found, list) or len(found) > count_max:
            raise self.error(key, allowed)
        texts: dict[str, None] = {}
        for item in found:
            if not isinstance(item, str) or not 1 <= len(item) <= length_max:
                raise self.error(key, allowed)
            texts[item] = None
        return tuple(texts)

    def token_ids(self, key: str, vocab_size: int, count_max: int) -> tuple[int, ...]:
        """A list of ids inside the vocabulary, without repetitions."""
        value = self.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or len(value) > count_max:
            raise self.error(key, f"a list of at most {count_max} token ids")
        return tuple(dict.fromkeys(check_token_ids(value, self.name(key), vocab_size)))

    def refuse(self, keys: Iterable[str], why: str) -> None:
        """Raises: RequestError if one of `keys` asks for something."""
        for key in keys:
            if is_given(self.get(key)):
                name = self.name(key)
                raise RequestError(f"{name}={shown(self.get(key))}: {why}", field=name)


def check_token_ids(value: list[JsonValue], name: str, vocab_size: int) -> list[int]:
    """`value` as token ids. Raises: RequestError naming the first that is none."""
    for index, item in enumerate(value):
        if not is_integer(item) or not 0 <= item < vocab_size:
            raise RequestError(
                f"{name}[{index}]={shown(item)}: must be a token id in 0..{vocab_size - 1}",
                field=name,
            )
    return [item for item in value if is_integer(item)]
