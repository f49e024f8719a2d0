"""One sample's output as text, reasoning and calls, for whichever API tells of it.

Knows nothing of bodies or replies.
"""

from __future__ import annotations

from bisect import bisect_left

from common.frontend.requests.generation import Continuation
from common.frontend.text.parsing.items import Item, Reasoning, Said, ToolCall
from common.frontend.text.parsing.parsing import Parsing


class ParsedOutput:
    """Reads the text of one sample as it grows. call_count: calls so far."""

    def __init__(self, one: Continuation, parsing: Parsing) -> None:
        self.call_count = 0
        self._one = one
        self._parsing = parsing
        self._parser = parsing.parser()

    def push(self, text: str) -> Said:
        """What is certain with the next `text` of the sample, in order; the rest too once it has
        ended, and nothing may be pushed after that."""
        said = self._parser.push(text)
        if self._one.is_ended:
            said = [*said, *self._parser.flush()]
        return [item for item in said if self._is_told(item)]

    def _is_told(self, item: Item) -> bool:
        if isinstance(item, ToolCall):
            if self._parsing.is_single and self.call_count:
                return False
            self.call_count += 1
        return not (isinstance(item, Reasoning) and self._parsing.drops_reasoning)

    @property
    def reasoning_token_count(self) -> int:
        """Tokens of reasoning so far, its markers included."""
        starts = self._one.text_starts
        count = 0
        for start, end in self._parser.spans:
            last = len(starts) if end < 0 else bisect_left(starts, end)
            count += last - bisect_left(starts, start)
        return count

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's; None while the sample runs."""
        if self._one.finish is None:
            return None
        kind = str(self._one.finish.kind)
        return "tool_calls" if kind == "stop" and self.call_count else kind
