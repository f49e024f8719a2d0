"""What an output says, as items in order: text for the reader, reasoning, and calls of tools.

Values only.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    for item in said:
        last = result[-1] if result else None
        if isinstance(item, str) and isinstance(last, str):
            result[-1] = last + item
        elif isinstance(item, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + item.text)
        else:
            result.append(item)
    return result
