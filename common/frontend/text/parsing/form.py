"""What a format of reasoning or of calls is made of: markers, and what stands between them.

Values only; the formats that exist are in `formats.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from common.frontend.text.parsing.bodies import CallBody
from common.frontend.text.parsing.listed import ListFormat


class CallIds(Enum):
    """How calls are named: at random, by as many characters as some templates insist on, or by
    function and number, as some models were trained to."""

    RANDOM = auto()
    NINE_CHARACTERS = auto()
    NUMBERED = auto()


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """opening, closing: around reasoning. is_implied: an output begins inside it, though nothing
    in the prompt says so. is_anywhere: it may come again later, else only at the beginning.

    ends: markers that end it without being a part of it. passed: markers that are dropped wherever
    they stand in text. introduction: what stands before an answer; next_message: between reasoning
    and that.
    """

    opening: str
    closing: str
    is_implied: bool = False
    is_anywhere: bool = False
    ends: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    introduction: str = ""
    next_message: str = ""


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """How a call with one JSON object as its arguments is written, for grammars.

    begin: behind the first opening, with the function as {name} and a number as {index}. end:
    behind the object.
    """

    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class CallFormat:
    """openings: each begins a call, or a list without closing. closings: each ends a call, as the
    next opening and the end of the output do.

    body: None if `listed` says how calls are written that nothing marks. passed: as of
    `ReasoningFormat`. inner: markers inside the body. written: None if arguments are no
    JSON, or what stands around them varies.
    """

    openings: tuple[str, ...] = ()
    closings: tuple[str, ...] = ()
    body: CallBody | None = None
    listed: ListFormat | None = None
    passed: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    ids: CallIds = CallIds.RANDOM
    written: WrittenCall | None = None


def markers_in(reasoning: ReasoningFormat | None, calls: CallFormat | None) -> set[str]:
    """All that has to be seen in the text of an output."""
    found: set[str] = set()
    if reasoning is not None:
        found |= {reasoning.opening, reasoning.closing, reasoning.introduction}
        found |= {reasoning.next_message, *reasoning.ends, *reasoning.passed}
    if calls is not None:
        found |= {*calls.openings, *calls.closings, *calls.passed, *calls.inner}
        if calls.written is not None:
            found |= {calls.written.begin, calls.written.end}
    return found
