"""Calls that nothing marks: the output is a list of them and nothing else, or it is text.

As soon as there is anything else, all from there on is text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.frontend.text.parsing.bodies import Call, CallBody, Tools

HEAD_LENGTH_MAX = 128  # of a name before its bracket; what is longer is text


@dataclass(frozen=True, slots=True)
class ListFormat:
    """body: of each call. between: characters that may stand around calls.

    starts: the characters that a call may begin with; its brackets are what ends it. quotes: inside
    which brackets mean nothing. lead: what the whole list begins with, "" for nothing.
    """

    body: CallBody
    between: str
    starts: Callable[[str], bool]
    quotes: str = '"'
    lead: str = ""


class ListedCalls:
    """Takes the text of one output in pieces; calls are told as soon as they are complete."""

    def __init__(self, form: ListFormat, tools: Tools) -> None:
        self._form = form
        self._tools = tools
        self._pending = ""  # not told yet
        self._place = 0  # looked at in it
        self._call_at = -1  # where in it a call begins
        self._is_led = not form.lead
        self._depth = 0
        self._has_bracket = False
        self._quote = ""
        self._is_escaped = False
        self._is_text = False

    def push(self, piece: str) -> list[str | Call]:
        if self._is_text:
            return [piece] if piece else []
        self._pending += piece
        said: list[str | Call] = []
        while self._place < len(self._pending):
            character = self._pending[self._place]
            self._place += 1
            if self._call_at < 0:
                if self._is_between(character):
                    continue
                if not (self._is_led and self._form.starts(character)):
                    return [*said, *self._give_up()]
                self._call_at = self._place - 1
            if self._is_too_long():
                return [*said, *self._give_up()]
            if not self._ends_call(character):
                continue
            calls = self._form.body.read(self._pending[self._call_at : self._place], self._tools)
            if calls is None:
                return [*said, *self._give_up()]
            said += calls
            self._pending = self._pending[self._place :]
            self._place, self._call_at, self._has_bracket = 0, -1, False
        return said

    def flush(self) -> list[str | Call]:
        has_calls = self._call_at < 0 and not self._pending.strip(self._form.between)
        return [] if has_calls else self._give_up()

    def _give_up(self) -> list[str | Call]:
        self._is_text = True
        rest, self._pending = self._pending, ""
        return [rest] if rest else []

    def _is_between(self, character: str) -> bool:
        if character not in self._form.between:
            return False
        self._is_led = self._is_led or character == self._form.lead
        return True

    def _is_too_long(self) -> bool:
        """Whether no bracket has come where one must have."""
        return not self._has_bracket and self._place - self._call_at > HEAD_LENGTH_MAX

    def _ends_call(self, character: str) -> bool:
        """Whether this character closes the call that is open."""
        if self._is_escaped:
            self._is_escaped = False
        elif self._quote:
            self._is_escaped = character == "\\"
            self._quote = "" if character == self._quote else self._quote
        elif self._has_bracket and character in self._form.quotes:
            self._quote = character
        elif character in "{[(":
            self._depth += 1
            self._has_bracket = True
        elif character in "}])":
            self._depth -= 1
            return self._depth <= 0
        return False
