"""Values as models write them outside of JSON: Python's literals, and objects with bare keys.

A reader of its own: Python's runs out of stack on what a model may well say. Knows no calls.
"""

from __future__ import annotations

import re

from common.frontend.bodies.fields import JsonObject, JsonValue

DEPTH_MAX = 64  # of values in each other
_SPACE = re.compile(r"\s*")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"|' + r"'((?:[^'\\]|\\.)*)'", re.DOTALL)
RAW_QUOTE = '<|"|>'  # of strings without escapes
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])")
_WORD = re.compile(r"[^\W\d][\w.-]*")
_BARE = re.compile(r"[^\s,:\[\]{}()\"'=][^,:\[\]{}()\"'=]*")
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_NAMED: dict[str, JsonValue] = {
    "True": True, "true": True, "False": False, "false": False, "None": None, "null": None,
}  # fmt: skip


def read_literal(text: str) -> JsonValue:
    """The one value in `text`. Raises: ValueError."""
    reader = LiteralReader(text)
    value = reader.value()
    reader.expect_end()
    return value


class LiteralReader:
    """Reads `text` from left to right. Every method raises ValueError where it does not fit.

    takes_bare: words without quotes are strings.
    """

    def __init__(self, text: str, *, takes_bare: bool = False) -> None:
        self._text = text
        self._place = 0
        self._depth = 0
        self._takes_bare = takes_bare

    def value(self) -> JsonValue:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise ValueError("nested too deeply")
        self._skip_space()
        character = self._text[self._place : self._place + 1]
        if self.take(RAW_QUOTE):
            value: JsonValue = self._raw_string()
        elif character == "{":
            value = self.members("{", "}", ":")
        elif character in ("[", "("):
            value = self._items("[" if character == "[" else "(")
        elif character in ('"', "'"):
            value = self._string()
        else:
            value = self._plain()
        self._depth -= 1
        return value

    def members(self, opening: str, closing: str, between: str) -> JsonObject:
        """Names with values, as in {"a": 1}, {a: 1} and (a=1)."""
        self._expect(opening)
        members: JsonObject = {}
        while not self.take(closing):
            if members:
                self._expect(",")
                if self.take(closing):
                    break
            key = self._key()
            self._expect(between)
            members[key] = self.value()
        return members

    def word(self) -> str:
        """A name, with dots and dashes."""
        self._skip_space()
        return self._match(_WORD)

    def take(self, mark: str) -> bool:
        """Whether `mark` came next; it is taken then."""
        self._skip_space()
        if not self._text.startswith(mark, self._place):
            return False
        self._place += len(mark)
        return True

    def expect_end(self) -> None:
        self._skip_space()
        if self._place < len(self._text):
            raise ValueError("more text")

    def _items(self, opening: str) -> JsonValue:
        closing = "]" if opening == "[" else ")"
        self._expect(opening)
        items: list[JsonValue] = []
        has_comma = False
        while not self.take(closing):
            if items and not has_comma:
                raise ValueError("no comma")
            items.append(self.value())
            has_comma = self.take(",")
        # Brackets around one value without a comma are no list in Python.
        return items[0] if opening == "(" and len(items) == 1 and not has_comma else items

    def _key(self) -> str:
        self._skip_space()
        if self._text[self._place : self._place + 1] in ('"', "'"):
            return self._string()
        if self.take(RAW_QUOTE):
            return self._raw_string()
        return self._match(_WORD)

    def _string(self) -> str:
        found = _STRING.match(self._text, self._place)
        if found is None:
            raise ValueError("no string")
        self._place = found.end()
        inner = found[1] if found[1] is not None else found[2]
        return _ESCAPE.sub(_unescaped, inner)

    def _raw_string(self) -> str:
        end = self._text.find(RAW_QUOTE, self._place)
        if end < 0:
            raise ValueError("a string without end")
        value = self._text[self._place : end]
        self._place = end + len(RAW_QUOTE)
        return value

    def _plain(self) -> JsonValue:
        found = _NUMBER.match(self._text, self._place)
        if found is not None:
            self._place = found.end()
            is_whole = found[0].lstrip("+-").isdigit()
            if is_whole and len(found[0]) > 64:  # what Python converts at once has a bound
                raise ValueError("a number of so many digits")
            return int(found[0]) if is_whole else float(found[0])
        word = self._match(_BARE if self._takes_bare else _WORD).rstrip()
        if word in _NAMED:
            return _NAMED[word]
        if self._takes_bare:
            return word
        raise ValueError("a name, and no value")

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._place)
        if found is None:
            raise ValueError("something else")
        self._place = found.end()
        return found[0]

    def _expect(self, mark: str) -> None:
        if not self.take(mark):
            raise ValueError(f"no {mark!r}")

    def _skip_space(self) -> None:
        found = _SPACE.match(self._text, self._place)
        assert found is not None, "no space is space too"
        self._place = found.end()


def _unescaped(found: re.Match[str]) -> str:
    escaped = found[1]
    if len(escaped) > 1:
        return chr(int(escaped[1:], 16))
    return _ESCAPED.get(escaped, escaped)
