"""One sample's output as text, reasoning and calls, for whichever API tells of it.

Knows nothing of bodies or replies.
"""

from __future__ import annotations

from bisect import bisect_left

from common.frontend.requests.generation import Continuation
from common.frontend.text.parsing.items import Reasoning, Said, ToolCall
from common.frontend.text.parsing.parsing import Parsing


class ParsedOutput:
    """Reads the text of one sample as it grows. call_count: calls so far."""

    def __init__(self, one: Continuation, parsing: Parsing) -> None:
        self.call_count = 0
        self._one = one
        self._parser = parsing.parser()
        self._drops_reasoning = parsing.drops_reasoning

    def push(self, text: str) -> Said:
        """What is certain with the next `text` of the sample, in order; all of it, once the sample
        has ended. Then it is called once more at most."""
        said = self._parser.push(text)
        if self._one.is_ended:
            said = [*said, *self._parser.flush()]
        self.call_count += sum(isinstance(item, ToolCall) for item in said)
        if self._drops_reasoning:
            return [item for item in said if not isinstance(item, Reasoning)]
        return said

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
