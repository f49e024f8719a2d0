"""What an output says, as items in order: text for the reader, reasoning, and calls of tools.

Values only.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What a model thinks before it answers; a part of it, as texts are."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: JSON text."""

    call_id: str
    name: str
    arguments: str


Item: TypeAlias = str | Reasoning | ToolCall
Said: TypeAlias = list[Item]


def joined(said: Said) -> Said:
    """The same with neighbouring texts as one, and neighbouring reasoning as one."""
    result: Said = []
    for kind, items in groupby(said, type):
        if kind is str:
            result.append("".join(item for item in items if isinstance(item, str)))
        elif kind is Reasoning:
            texts = [item.text for item in items if isinstance(item, Reasoning)]
            result.append(Reasoning("".join(texts)))
        else:
            result += items
    return result
