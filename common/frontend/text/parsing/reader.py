"""Reads one output as its text comes in: what is reasoning, what is a call, what is text.

The formats are data (`formats.py`). What is said does not depend on where pieces end. A call is
told when it is complete; what turns out to be no call is given back as the text that it is.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache

from common.frontend.text.parsing.bodies import Call, Tools
from common.frontend.text.parsing.form import CallFormat, CallIds, ReasoningFormat
from common.frontend.text.parsing.items import Reasoning, Said, ToolCall, joined
from common.frontend.text.parsing.listed import ListedCalls
from common.frontend.text.parsing.markers import Markers

# Closing markers that are looked at for one call: all but the last may stand in a text of its.
CLOSING_COUNT_MAX = 8


NO_CALLS = CallFormat()


class _State(Enum):
    TEXT = auto()
    REASONING = auto()
    CALL = auto()


class OutputReader:
    """Takes the text of one output in pieces.

    tools: that may be called. is_inside: the prompt has opened reasoning. call_count: calls before
    this output, for ids that count. spans: where in the output reasoning has stood, [start, end)
    with its markers; the last one ends at -1 while it is open.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        calls: CallFormat | None,
        tools: Tools,
        *,
        is_inside: bool = False,
        holds_reasoning: bool = False,
        call_count: int = 0,
    ) -> None:
        self.spans: list[tuple[int, int]] = []
        self._reasoning = reasoning
        self._calls = calls or NO_CALLS
        self._marks = _marker_sets(reasoning, self._calls)
        self._tools = tools
        self._holds_reasoning = holds_reasoning
        self._call_count = call_count
        self._said: Said = []
        self._buffer = ""
        self._offset = 0  # of the buffer in the output
        self._at = 0  # in the buffer: what is before has been taken
        self._searched = 0  # in the buffer
        self._may_reason = reasoning is not None
        self._space = ""  # of text or reasoning; may turn out to stand before a marker
        self._is_after_mark = False  # space that follows is the marker's
        self._opening = ""  # of the call that is open
        self._first_closing = (-1, "")
        self._closing_count = 0
        self._is_in_reasoning = False
        self._held_reasoning = ""
        self._list = self._new_list()
        self._is_all_text = False  # from here on
        self._state = _State.TEXT
        self._set_markers()
        if is_inside:
            self._begin_reasoning()

    def push(self, piece: str) -> Said:
        """What is certain now, in order."""
        if self._is_all_text:
            return [piece] if piece else []
        self._buffer += piece
        said = self._advance(is_last=False)
        if self._has_only_text_left():
            self._is_all_text = True
            if self._space:
                said = joined([*said, self._space])
                self._space = ""
        return said

    def flush(self) -> Said:
        """The rest, once no text follows."""
        said = self._advance(is_last=True)
        if self._is_in_reasoning:
            self._end_reasoning()
        elif self._space and not self._is_after_mark:
            self._show(self._space)
        if self._list is not None:
            self._add(self._list.flush())
        last, self._said = self._said, []
        return joined([*said, *last])

    def _has_only_text_left(self) -> bool:
        """Whether nothing is looked for any more."""
        is_text = self._state is _State.TEXT and self._list is None
        return is_text and not self._in_text and not self._buffer and not self._is_after_mark

    def _advance(self, *, is_last: bool) -> Said:
        while self._step(is_last=is_last):
            pass
        self._drop_taken()
        said, self._said = self._said, []
        return joined(said) if len(said) > 1 else said

    def _step(self, *, is_last: bool) -> bool:
        """Take the text up to the next marker; whether there was one."""
        if self._state is _State.CALL:
            return self._step_in_call(is_last=is_last)
        if self._state is _State.REASONING:
            return self._step_in_reasoning(is_last=is_last)
        return self._step_in_text(is_last=is_last)

    # ---- text ----

    def _step_in_text(self, *, is_last: bool) -> bool:
        place, marker = self._in_text.find(self._buffer, self._at, is_last=is_last)
        self._text(self._take_to(place))
        if not marker:
            return False
        if self._reasoning is not None and marker == self._reasoning.opening:
            if self._may_reason:  # else there is text before it, and this is text too
                self._begin_reasoning()
                self._at += len(marker)
            return True
        self._at += len(marker)
        if marker in self._calls.openings:
            self._begin_call(marker)
        return True

    def _text(self, text: str) -> None:
        if self._is_after_mark:
            text = text.lstrip()
        if not text:
            return
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if not shown:
            return
        self._is_after_mark = False
        if self._may_reason and self._reasoning and not self._reasoning.is_anywhere:
            self._may_reason = False
            self._set_markers()
        self._show(shown)

    def _show(self, text: str) -> None:
        if self._list is not None:
            self._add(self._list.push(text))
        else:
            self._said.append(text)

    # ---- reasoning ----

    def _begin_reasoning(self) -> None:
        self._state = _State.REASONING
        self._is_in_reasoning = True
        self._space = ""
        self._is_after_mark = True
        self.spans.append((self._offset + self._at, -1))

    def _step_in_reasoning(self, *, is_last: bool) -> bool:
        assert self._reasoning is not None
        place, marker = self._marks.in_reasoning.find(self._buffer, self._at, is_last=is_last)
        self._reason(self._take_to(place))
        if not marker:
            return False
        if marker in self._reasoning.ends:
            self._end_reasoning()
            self._state = _State.TEXT
            return True
        self._at += len(marker)
        if marker == self._reasoning.closing:
            self._end_reasoning()
            self._state = _State.TEXT
        elif marker in self._calls.openings:
            self._begin_call(marker)
        elif not (self._is_after_mark or self._reasoning.is_anywhere):
            self._reason(marker)  # else the model repeats what is open already
        return True

    def _reason(self, text: str) -> None:
        if self._is_after_mark:
            text = text.lstrip()
        if not text:
            return
        self._is_after_mark = False
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if not shown:
            return
        if self._holds_reasoning:
            self._held_reasoning += shown
        else:
            self._said.append(Reasoning(shown))

    def _end_reasoning(self, back: int = 0) -> None:
        """back: so many characters ago."""
        assert self._reasoning is not None
        self.spans[-1] = (self.spans[-1][0], self._offset + self._at - back)
        if self._held_reasoning:
            self._said.append(Reasoning(self._held_reasoning))
        self._held_reasoning = self._space = ""
        self._is_in_reasoning = False
        self._is_after_mark = True
        self._may_reason = self._reasoning.is_anywhere
        self._set_markers()

    # ---- calls ----

    def _begin_call(self, opening: str) -> None:
        if self._calls.body is None:  # a list of calls begins here
            if self._list is not None:
                self._add(self._list.flush())
            self._list = self._new_list()
            self._is_after_mark = True
            return
        self._state = _State.CALL
        self._opening = opening
        self._searched = self._at
        self._first_closing = (-1, "")
        self._closing_count = 0

    def _step_in_call(self, *, is_last: bool) -> bool:
        assert self._calls.body is not None
        marks = self._marks
        markers = marks.in_reasoned_call if self._is_in_reasoning else marks.in_call
        place, marker = markers.find(self._buffer, self._searched, is_last=is_last)
        if not marker:
            self._searched = place
            return is_last and self._end_call_at_last()
        if self._reasoning and self._is_in_reasoning and marker == self._reasoning.closing:
            self._give_up(self._at)
            return True
        is_open = self._calls.body.is_open(self._buffer[self._at : place])
        if self._first_closing[0] < 0:
            self._first_closing = (place, marker)
        self._closing_count += 1
        if not is_open:
            self._end_call(place, marker)
        elif self._closing_count < CLOSING_COUNT_MAX:
            self._searched = place + len(marker)
        else:
            self._end_call(*self._first_closing)
        return True

    def _end_call_at_last(self) -> bool:
        """The output has ended inside a call: the model's last marker is often no text."""
        assert self._calls.body is not None
        place, marker = self._first_closing
        if place >= 0:
            self._end_call(place, marker)
        elif self._calls.body.is_open(self._buffer[self._at :]):
            self._give_up(len(self._buffer))
        else:
            self._end_call(len(self._buffer), "")
        return True

    def _end_call(self, place: int, marker: str) -> None:
        assert self._calls.body is not None
        length = len(marker) if marker in self._calls.closings else 0
        calls = self._calls.body.read(self._buffer[self._at : place], self._tools)
        if calls is None:
            self._give_up(place + length)
            return
        if self._is_in_reasoning:
            self._end_reasoning(back=len(self._opening))
        self._at = place + length
        self._state = _State.TEXT
        self._space = ""
        self._is_after_mark = True
        self._may_reason = self._reasoning is not None and self._reasoning.is_anywhere
        self._set_markers()
        self._add(calls)

    def _give_up(self, end: int) -> None:
        """What was taken for a call is no call, up to `end` in the buffer."""
        raw = self._opening + self._take_to(end)
        if self._is_in_reasoning:
            self._state = _State.REASONING
            self._is_after_mark = False
            self._reason(raw)
        else:
            self._state = _State.TEXT
            self._is_after_mark = False
            self._text(raw)

    def _take_to(self, place: int) -> str:
        """The text before `place` that has not been taken yet."""
        taken = self._buffer[self._at : place]
        self._at = place
        return taken

    def _drop_taken(self) -> None:
        """Once a piece, not once a marker: a whole output may come as one and be full of them."""
        at, (place, marker) = self._at, self._first_closing
        self._buffer = self._buffer[at:]
        self._offset += at
        self._searched -= at
        self._first_closing = (place - at if place >= 0 else -1, marker)
        self._at = 0

    def _new_list(self) -> ListedCalls | None:
        form = self._calls.listed
        return None if form is None else ListedCalls(form, self._tools)

    def _add(self, found: Iterable[str | Call]) -> None:
        for item in found:
            if isinstance(item, str):
                self._said.append(item)
            else:
                self._said.append(ToolCall(self._call_id(item.name), item.name, item.arguments))
                self._call_count += 1

    def _call_id(self, name: str) -> str:
        match self._calls.ids:
            case CallIds.RANDOM:
                return f"call_{secrets.token_hex(12)}"
            case CallIds.NINE_CHARACTERS:
                letters = string.ascii_letters + string.digits
                return "".join(secrets.choice(letters) for _ in range(9))
            case CallIds.NUMBERED:
                return f"functions.{name}:{self._call_count}"

    def _set_markers(self) -> None:
        """What is looked for in text depends on whether reasoning may begin."""
        begins = self._reasoning is not None and self._may_reason
        self._in_text = self._marks.in_reasoning_text if begins else self._marks.in_text


@dataclass(frozen=True, slots=True)
class _MarkerSets:
    in_text: Markers
    in_reasoning_text: Markers  # where reasoning may begin
    in_reasoning: Markers
    in_call: Markers
    in_reasoned_call: Markers  # of a call before reasoning was closed


@lru_cache(maxsize=64)  # a server has two formats, of which a body may leave out one
def _marker_sets(reasoning: ReasoningFormat | None, calls: CallFormat) -> _MarkerSets:
    around = (reasoning.opening, reasoning.closing) if reasoning else ()
    ends = reasoning.ends if reasoning else ()
    passed = calls.passed + (reasoning.passed if reasoning else ())
    return _MarkerSets(
        in_text=Markers((*calls.openings, *passed)),
        in_reasoning_text=Markers((*around[:1], *calls.openings, *passed)),
        in_reasoning=Markers((*around, *ends, *calls.openings)),
        in_call=Markers((*calls.closings, *calls.openings)),
        in_reasoned_call=Markers((*calls.closings, *calls.openings, *around[1:])),
    )
