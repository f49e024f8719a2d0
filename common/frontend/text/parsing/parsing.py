"""How the outputs of a body are read, chosen from what the server and the body say.

Knows nothing of samples or replies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Protocol

from common.frontend.text.parsing.bodies import Tools
from common.frontend.text.parsing.form import CallFormat, ReasoningFormat
from common.frontend.text.parsing.formats import LISTED
from common.frontend.text.parsing.items import Said
from common.frontend.text.parsing.reader import OutputReader


class OutputParser(Protocol):
    """Takes the text of one output in pieces."""

    def push(self, piece: str) -> Said:
        """What is certain now, in order."""

    def flush(self) -> Said:
        """The rest, once no text follows."""

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """Where reasoning has stood, see `OutputReader`."""


@dataclass(frozen=True, slots=True)
class GrammarTokens:
    """Tokens that are no text in a grammar, by their text. markers: those that stand in markers.
    texts: others that the checkpoint takes for text."""

    markers: Mapping[str, int] = field(default_factory=dict)
    texts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Parsers:
    """How a server's model writes; None: as text. shown_ids: of the special tokens among the
    markers, which are shown so that they can be found."""

    reasoning: ReasoningFormat | None = None
    calls: CallFormat | None = None
    shown_ids: frozenset[int] = frozenset()
    tokens: GrammarTokens = GrammarTokens()

    @property
    def listed(self) -> CallFormat:
        """Of calls that a grammar forces, whatever the model was trained on."""
        return LISTED if self.calls is None else replace(LISTED, ids=self.calls.ids)


NO_PARSERS = Parsers()


@dataclass(frozen=True, slots=True)
class Parsing:
    """How to read the outputs of one body.

    reasoning: None if none is looked for. is_inside: outputs begin inside it. tools: that may be
    called. call_count: calls of earlier messages. holds_reasoning: reasoning is told when it is
    complete; drops_reasoning: it is not told. is_single: the first call is the only one that is.
    """

    reasoning: ReasoningFormat | None = None
    calls: CallFormat | None = None
    tools: Tools = field(default_factory=dict)
    is_inside: bool = False
    call_count: int = 0
    holds_reasoning: bool = False
    drops_reasoning: bool = False
    is_single: bool = False

    @property
    def is_verbatim(self) -> bool:
        """Whether outputs are text and nothing else."""
        return self.reasoning is None and self.calls is None

    def parser(self) -> OutputParser:
        """For one output."""
        if self.is_verbatim:
            return Verbatim()
        return OutputReader(
            self.reasoning,
            self.calls,
            self.tools,
            is_inside=self.is_inside,
            holds_reasoning=self.holds_reasoning,
            call_count=self.call_count,
        )


class Verbatim:
    """An output that is text and nothing else."""

    spans: Sequence[tuple[int, int]] = ()

    def push(self, piece: str) -> Said:
        return [piece] if piece else []

    def flush(self) -> Said:
        return []


class Beginning(Enum):
    """Where an output begins: inside reasoning, where it may begin, or behind it."""

    INSIDE = auto()
    BEFORE = auto()
    BEHIND = auto()


def beginning(form: ReasoningFormat | None, prompt: str, continued: str | None) -> Beginning:
    """Where an output behind `prompt` begins, which templates open or close reasoning in.

    continued: the text of the message that it continues, None if it is one of its own.
    """
    if form is None:
        return Beginning.BEHIND
    if continued:
        is_open = continued.rfind(form.opening) > continued.rfind(form.closing)
        return Beginning.INSIDE if is_open else Beginning.BEHIND
    end = prompt.rstrip()
    if end.endswith(form.opening.rstrip()):
        return Beginning.INSIDE
    if end.endswith(form.closing):
        return Beginning.BEHIND
    return Beginning.INSIDE if form.is_implied else Beginning.BEFORE
