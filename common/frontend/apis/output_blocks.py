"""A sample's output as blocks, one after another: a text, a piece of reasoning, a call of a tool.

For APIs that tell of an output as a list of such blocks. Knows nothing of their shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from common.frontend.apis.parsed_output import ParsedOutput
from common.frontend.requests.generation import Continuation
from common.frontend.text.parsing.items import Item, Reasoning, ToolCall
from common.frontend.text.parsing.parsing import Parsing


class BlockKind(StrEnum):
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """index: its place in the output. text: so far; of a call its arguments.

    call: None of other kinds. is_whole: nothing was cut off, as far as the model says.
    """

    index: int
    kind: BlockKind
    text: str = ""
    call: ToolCall | None = None
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class Opened:
    block: Block


@dataclass(frozen=True, slots=True)
class Grown:
    """text: the new part."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """Nothing more follows in this block."""

    block: Block


BlockStep: TypeAlias = Opened | Grown | Closed


class OutputBlocks:
    """Reads the output of one sample as it grows. At most the last block is open."""

    def __init__(self, one: Continuation, parsing: Parsing) -> None:
        self.blocks: list[Block] = []
        self._one = one
        self._output = ParsedOutput(one, parsing)
        self._open: Block | None = None

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's; None while the sample runs."""
        return self._output.finish_reason

    @property
    def reasoning_token_count(self) -> int:
        return self._output.reasoning_token_count

    def push(self, text: str) -> list[BlockStep]:
        """What happens with the next `text` of the sample, in order; all of it, once the sample has
        ended. Then it is called once more at most."""
        steps: list[BlockStep] = []
        for item in self._output.push(text):
            steps += self._take(item)
        if self._one.is_ended:
            if self._open is not None:
                self._open.is_whole = self.finish_reason in ("stop", "tool_calls")
            steps += self._close()
        return steps

    def _take(self, item: Item) -> list[BlockStep]:
        match item:
            case str():
                return self._grow(BlockKind.TEXT, item)
            case Reasoning():
                return self._grow(BlockKind.REASONING, item.text)
            case ToolCall():
                block = Block(len(self.blocks), BlockKind.CALL, item.arguments, item)
                steps = self._close()
                self.blocks.append(block)
                return [*steps, Opened(block), Grown(block, item.arguments), Closed(block)]

    def _grow(self, kind: BlockKind, text: str) -> list[BlockStep]:
        steps: list[BlockStep] = []
        if self._open is None or self._open.kind is not kind:
            steps = self._close()
            self._open = Block(len(self.blocks), kind)
            self.blocks.append(self._open)
            steps.append(Opened(self._open))
        self._open.text += text
        return [*steps, Grown(self._open, text)]

    def _close(self) -> list[BlockStep]:
        block, self._open = self._open, None
        return [] if block is None else [Closed(block)]
