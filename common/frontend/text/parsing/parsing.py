"""How the outputs of a body are read, chosen from what the server and the body say.

Knows nothing of samples or replies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from common.frontend.text.parsing.items import Said
from common.frontend.text.tool_calls import ToolFormat, tool_parser


@dataclass(frozen=True, slots=True)
class Parsers:
    """What a server was told of its model. tool_call: `--tool-call-parser`, "" for none."""

    tool_call: str = ""


class OutputParser(Protocol):
    """Takes the text of one output in pieces."""

    def push(self, piece: str) -> Said:
        """What is certain now, in order."""

    def flush(self) -> Said:
        """The rest, once no text follows."""


@dataclass(frozen=True, slots=True)
class Parsing:
    """How to read the outputs of one body. tool_format: None if none is looked for.

    names: of the tools that may be called.
    """

    tool_format: ToolFormat | None = None
    names: frozenset[str] = frozenset()

    def parser(self) -> OutputParser:
        """For one output."""
        if self.tool_format is None:
            return Verbatim()
        return tool_parser(self.tool_format, self.names)


class Verbatim:
    """An output that is text and nothing else."""

    def push(self, piece: str) -> Said:
        return [piece] if piece else []

    def flush(self) -> Said:
        return []
