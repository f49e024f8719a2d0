"""One sample's output as text, reasoning and calls, for whichever API tells of it.

Knows nothing of bodies or replies.
"""

from __future__ import annotations

from common.frontend.requests.generation import Continuation
from common.frontend.text.parsing.items import Said, ToolCall
from common.frontend.text.parsing.parsing import Parsing


class ParsedOutput:
    """Reads the text of one sample as it grows. call_count: calls so far."""

    def __init__(self, one: Continuation, parsing: Parsing) -> None:
        self.call_count = 0
        self._one = one
        self._parser = parsing.parser()

    def push(self, text: str) -> Said:
        """What is certain with the next `text` of the sample, in order; all of it, once the sample
        has ended. Then it is called once more at most."""
        said = self._parser.push(text)
        if self._one.is_ended:
            said = [*said, *self._parser.flush()]
        self.call_count += sum(isinstance(item, ToolCall) for item in said)
        return said

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's; None while the sample runs."""
        if self._one.finish is None:
            return None
        kind = str(self._one.finish.kind)
        return "tool_calls" if kind == "stop" and self.call_count else kind
