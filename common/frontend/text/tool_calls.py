"""Finds the calls of tools in what a model says, as the text comes in.

One parser per format; what turns out to be no call is given back as the text that it is. A call is
told when it is complete. Knows nothing of replies.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Set
from enum import StrEnum
from typing import Protocol, assert_never

from common.errors import RequestError
from common.frontend.bodies.fields import parse_object
from common.frontend.text.parsing.items import Said, ToolCall, joined

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
BETWEEN_OBJECTS = frozenset(" \t\r\n,;[]")


class ToolFormat(StrEnum):
    """hermes: `<tool_call>{...}</tool_call>` among text. llama3: the output is objects and nothing
    else, or text. list: what a required call is forced to be."""

    HERMES = "hermes"
    LLAMA3 = "llama3"
    LIST = "list"


class ToolParser(Protocol):
    """Takes the text of one output in pieces."""

    def push(self, piece: str) -> Said:
        """What is certain now, in order."""

    def flush(self) -> Said:
        """The rest, once no text follows."""


def tool_parser(tool_format: ToolFormat, names: Set[str]) -> ToolParser:
    """names: tools that exist; a call of any other is text."""
    match tool_format:
        case ToolFormat.HERMES:
            return TaggedCalls(names)
        case ToolFormat.LLAMA3 | ToolFormat.LIST:
            return ListedCalls(names)
        case _:
            assert_never(tool_format)


class TaggedCalls:
    """Calls between tags, text before and after them. Space around calls is theirs."""

    def __init__(self, names: Set[str]) -> None:
        self._names = names
        self._buffer = ""
        self._is_inside = False
        self._space = ""  # may turn out to stand before a call
        self._is_after_call = False

    def push(self, piece: str) -> Said:
        said: Said = []
        searched = max(0, len(self._buffer) - len(CLOSING))
        self._buffer += piece
        while True:
            tag = CLOSING if self._is_inside else OPENING
            place = self._buffer.find(tag, searched)
            searched = 0
            if place < 0:
                break
            before = self._buffer[:place]
            self._buffer = self._buffer[place + len(tag) :]
            if self._is_inside:
                said += self._call(before, OPENING + before + CLOSING)
            else:
                said += self._text(before)
            self._is_inside = not self._is_inside
        if not self._is_inside:
            certain = len(self._buffer) - overlap(self._buffer, OPENING)
            said += self._text(self._buffer[:certain])
            self._buffer = self._buffer[certain:]
        return joined(said)

    def flush(self) -> Said:
        rest, self._buffer = self._buffer, ""
        if self._is_inside:  # a model may end without the last tag
            return self._call(rest, OPENING + rest)
        said = self._text(rest)
        if self._space and not self._is_after_call:
            said.append(self._space)
        return joined(said)

    def _text(self, text: str) -> Said:
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if not shown:
            return []
        if self._is_after_call:
            shown = shown.lstrip()
            self._is_after_call = False
        return [shown]

    def _call(self, text: str, raw: str) -> Said:
        call = read_call_text(text, self._names)
        if call is None:
            space, self._space = self._space, ""
            return [space + raw]
        self._space = ""
        self._is_after_call = True
        return [call]


class ListedCalls:
    """Nothing but objects, each a call, with spaces, brackets, commas or semicolons between them.

    As soon as there is anything else, all from there on is text.
    """

    def __init__(self, names: Set[str]) -> None:
        self._names = names
        self._pending = ""  # not told yet
        self._object_at = -1  # where in it an object begins
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self._is_text = False

    def push(self, piece: str) -> Said:
        if self._is_text:
            return [piece] if piece else []
        said: Said = []
        place = len(self._pending)
        self._pending += piece
        while place < len(self._pending):
            character = self._pending[place]
            place += 1
            if self._object_at < 0:
                if character in BETWEEN_OBJECTS:
                    continue
                if character != "{":
                    return joined([*said, *self._give_up()])
                self._object_at = place - 1
            if not self._ends_object(character):
                continue
            call = read_call_text(self._pending[self._object_at : place], self._names)
            if call is None:
                return joined([*said, *self._give_up()])
            said.append(call)
            self._pending = self._pending[place:]
            self._object_at = -1
            place = 0
        return said

    def flush(self) -> Said:
        if self._object_at < 0 and not self._pending.strip("".join(BETWEEN_OBJECTS)):
            return []
        return self._give_up()

    def _give_up(self) -> Said:
        self._is_text = True
        rest, self._pending = self._pending, ""
        return [rest] if rest else []

    def _ends_object(self, character: str) -> bool:
        """Whether this character closes the object that is open."""
        if self._is_in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._is_in_string = False
            return False
        if character == '"':
            self._is_in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        return self._depth == 0


def read_call_text(text: str, names: Set[str]) -> ToolCall | None:
    """A call spelled as {"name", "arguments"} or {"name", "parameters"}; None if it is none."""
    try:
        value = parse_object(text.encode())
    except RequestError:
        return None
    name = value.get("name")
    if not isinstance(name, str) or name not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(f"call_{secrets.token_hex(12)}", name, arguments)


def overlap(text: str, tag: str) -> int:
    """Characters at the end of `text` that may be the beginning of `tag`."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
